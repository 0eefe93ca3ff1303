"""Turn timestamps into seconds per module.

A stamp is a mark (a moment on a clock) with the name of the module that runs from then on. The time
up to the next stamp is part of the self time of this module.

    stamp      root   observer   q        observer   root      end
    mark       0      2          3        9          10        12     self: root 4, q 6; observer 2

"Observer" stands for the code of lflops' hooks. It runs between two stamps, so its time is known
and can be left out. But the time that torch takes to call a hook lies outside these stamps. This
time is called `HookOverhead`. It is about the same for every call, and a trial measures it.

Passes without hooks are called unprofiled. Their time is divided among modules in two steps:

1. The hook overhead is subtracted from the times of the hooked passes (passes in which hooks time
   every module). The real overhead is larger than in the trial if caches are cold, and zero if the
   host runs ahead of a busy device. So the overhead is multiplied by a factor from 0 to 3.
2. The remaining times are scaled so that they add up to the time of an unprofiled pass. If this
   changes them much, a note reports it. If a trace measured the times of kernels, only the rest of
   each module's time is scaled, because hooks slow down only the host. On a busy machine, the time
   in which a module sleeps is not scaled, because other programs slow down only what needs a core.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Self

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note, notes_with
from lflops.profile.profile import Profile, with_works
from lflops.profile.records import PASS_PHASES, ModulePhase, TimingStats
from lflops.profile.steps import WITHIN_FORWARD, Step, is_disturbed, with_phases
from lflops.timing.clock import Clock, UncontendedClock

Stamp = tuple[Any, ModulePhase | None, str]
"""A mark of the clock, the module and phase that run after this mark, and why the mark was made.

The module and phase are `None` if lflops code runs after the mark. The reason is one of the
constants below, or empty.
"""

MODULE_ENTERED = "enters"
"""Reason for a reading of the clock: a module was entered."""

SEGMENT_BEGAN = "segment"
"""Reason for a reading of the clock: backward began to run the autograd nodes of one module."""

OPERATOR_COUNTED = "operator"
"""Reason for a reading of the clock: an operator was counted."""


@dataclass(frozen=True, kw_only=True)
class HookOverhead:
    """Time that torch takes to call hooks and dispatch modes, in seconds. No stamp shows this time.

    Attributes:
        inside: Seconds per module call that are measured as time of the called module.
        outside: Seconds per module call that are measured as time of the calling module.
        segment: Seconds per segment of backward. A segment is a series of autograd nodes that were
            built by one module, and begins with a hook.
        operator: Seconds per operator that is counted.
    """

    inside: float = 0.0
    outside: float = 0.0
    segment: float = 0.0
    operator: float = 0.0


NO_OVERHEAD = HookOverhead()


@dataclass(kw_only=True)
class PassTimes:
    """Times and counts of a pass, or of a part of it such as `forward`, by module and phase.

    Attributes:
        self_seconds: Self time of each module in each phase, in seconds.
        asleep: The part of the self time in which the thread needed no core. Empty if the clock
            does not measure it.
        observer: Total time of lflops' hooks in the pass, in seconds.
        called: Number of times that each module is called.
        calls_others: Number of times that each module calls other modules.
        segments: Number of segments of backward in each module. A segment is a series of autograd
            nodes that one module built, and begins with a hook.
        operators: Number of operators that are counted in each module.
    """

    self_seconds: defaultdict[ModulePhase, float] = field(
        default_factory=lambda: defaultdict(float)
    )
    asleep: defaultdict[ModulePhase, float] = field(default_factory=lambda: defaultdict(float))
    observer: float = 0.0
    called: Counter[ModulePhase] = field(default_factory=Counter)
    calls_others: Counter[ModulePhase] = field(default_factory=Counter)
    segments: Counter[ModulePhase] = field(default_factory=Counter)
    operators: Counter[ModulePhase] = field(default_factory=Counter)

    def add(self, other: "PassTimes") -> None:
        self.observer += other.observer
        for key, seconds in other.self_seconds.items():
            self.self_seconds[key] += seconds
        for key, seconds in other.asleep.items():
            self.asleep[key] += seconds
        self.called.update(other.called)
        self.calls_others.update(other.calls_others)
        self.segments.update(other.segments)
        self.operators.update(other.operators)

    def overhead(self, key: ModulePhase, each: HookOverhead) -> float:
        """Return the seconds of hook overhead in the self time of a module and phase.

        `each` has the overhead of one call, of one segment and of one operator.
        """
        at_modules = each.inside * self.called[key] + each.outside * self.calls_others[key]
        return at_modules + each.segment * self.segments[key] + each.operator * self.operators[key]

    def total_overhead(self, each: HookOverhead) -> float:
        return sum(self.overhead(key, each) for key in self.self_seconds)


def pass_times(stamps: Sequence[Stamp], clock: Clock) -> PassTimes:
    """Compute the times of modules from stamps. Call `settle` of the clock first.

    The last stamp only ends the time that began at the previous stamp.
    """
    times = PassTimes()
    running: ModulePhase | None = None
    entering = False
    for (mark, key, reason), (end, _, _) in pairwise(stamps):
        seconds = clock.seconds(mark, end)
        if key is None:
            times.observer += seconds
            entering = reason == MODULE_ENTERED
            if running is not None:
                times.calls_others[running] += entering
                times.operators[running] += reason == OPERATOR_COUNTED
            continue
        times.self_seconds[key] += seconds
        if isinstance(clock, UncontendedClock):
            times.asleep[key] += clock.asleep(mark, end)
        times.called[key] += entering
        times.segments[key] += reason == SEGMENT_BEGAN
        running = key
        entering = False
    return times


def inclusive(self_seconds: Mapping[ModulePhase, float]) -> dict[ModulePhase, float]:
    """Return the time of each module in each phase, including all modules below it."""
    totals: defaultdict[ModulePhase, float] = defaultdict(float)
    for (fqn, phase), seconds in self_seconds.items():
        for above in ancestry(fqn):
            totals[ModulePhase(above, phase)] += seconds
    return dict(totals)


MOST_OVERHEAD = 3.0
"""Maximum factor by which the measured hook overhead is multiplied."""

NO_SECONDS: Mapping[Any, float] = {}


@dataclass(frozen=True, kw_only=True)
class ScaledTimes:
    """Times of modules, scaled so that they add up to the time of a pass without hooks.

    A hooked pass is a pass in which hooks time every module.

    Attributes:
        self_seconds: Statistics of the self time of each module and phase, over the hooked passes.
        inclusive: The same statistics for the time that includes all modules below the module.
        factors: For each part of a pass, such as `forward`, the factor by which the times of the
            hooked passes were scaled after the overhead was subtracted. If it is close to 1, the
            division of time among modules is reliable.
        ignored: Median time of each ignored module in seconds. No total includes this time.
    """

    self_seconds: Mapping[ModulePhase, TimingStats]
    inclusive: Mapping[ModulePhase, TimingStats]
    factors: Mapping[str, float]
    ignored: Mapping[str, float]

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[Mapping[ModulePhase, float]],
        factors: Mapping[str, float] = NO_SECONDS,
        ignored: Mapping[str, float] = NO_SECONDS,
    ) -> Self:
        """Compute the statistics from the self seconds of modules in each pass."""
        self_seconds = timing_stats(steps)
        # The median of a sum is not the sum of medians, but inner modules must add up to the module
        # around them. So inclusive medians are sums of self medians.
        totals = inclusive({key: stats.median for key, stats in self_seconds.items()})
        of_modules = timing_stats([inclusive(step) for step in steps])
        for key, stats in of_modules.items():
            shifted = stats.shifted(totals[key] - stats.median)
            of_modules[key] = replace(shifted, median=totals[key])
        return cls(
            self_seconds=self_seconds, inclusive=of_modules, factors=factors, ignored=ignored
        )


def scale_to_unprofiled(
    hooked: Sequence[Mapping[str, PassTimes]],
    unprofiled: Mapping[str, float],
    overhead: HookOverhead,
    ignored: Collection[str] = (),
    means: Mapping[str, float] | None = None,
    *,
    kernels: Mapping[ModulePhase, float] = NO_SECONDS,
) -> ScaledTimes:
    """Scale module times from passes with hooks to the time of passes without hooks.

    First, the hook overhead is subtracted from the times of the modules.

    Args:
        hooked: For each pass with hooks, the times of each part, such as `forward`, by the name of
            the part. If a gradient is computed in forward, this part contains time of the phase
            `backward`.
        unprofiled: The typical seconds of each part in a pass without hooks. A part that is missing
            in this mapping is not scaled.
        overhead: The hook overhead that a trial measured.
        ignored: Names of modules whose times are returned separately, outside every total.
        means: For each part, the seconds that the times of the modules must add up to. Default:
            `unprofiled`.
        kernels: For each module and phase, the seconds per step that are not scaled. This is either
            the time of the kernels that the module itself launches, as measured in a trace, or the
            time in which the thread needs no core.
    """
    if means is None:
        means = unprofiled
    kept: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in hooked]
    # For each ignored module, its seconds in each pass.
    left_out: dict[str, list[float]] = {}
    for name in ignored:
        left_out[name] = [0.0] * len(hooked)
    factors = {}
    for part in _parts_of(hooked):
        passes = [parts.get(part, PassTimes()) for parts in hooked]
        is_scaled = part in unprofiled
        factor = _overhead_factor(passes, unprofiled[part], overhead) if is_scaled else 1.0
        self_seconds = [_without_overhead(times, overhead, factor, kernels) for times in passes]
        total = _total(self_seconds)
        if is_scaled and total > 0:
            factors[part] = unprofiled[part] / total
            _fit(self_seconds, kernels, means[part])
        for place, of_part in enumerate(self_seconds):
            for key, seconds in of_part.items():
                if key.fqn in left_out:
                    left_out[key.fqn][place] += seconds
                else:
                    kept[place][key] += seconds
    medians = {}
    for name, of_passes in left_out.items():
        medians[name] = statistics.median(of_passes)
    return ScaledTimes.of_steps(kept, factors, medians)


def _parts_of(passes: Sequence[Mapping[str, PassTimes]]) -> list[str]:
    """Return the names of the parts of all passes, such as `forward`, in order of appearance."""
    names: dict[str, None] = {}
    for parts in passes:
        names.update(dict.fromkeys(parts))
    return list(names)


def _without_overhead(
    times: PassTimes, overhead: HookOverhead, factor: float, kernels: Mapping[ModulePhase, float]
) -> dict[ModulePhase, float]:
    """Return the self time of each module, minus its overhead multiplied by `factor`.

    The result is at least the time of the module's kernels, because hooks do not slow down kernels.
    """
    self_seconds = {}
    for key, least in _in_kernels(times.self_seconds, kernels).items():
        without_hooks = times.self_seconds[key] - factor * times.overhead(key, overhead)
        self_seconds[key] = max(without_hooks, least)
    return self_seconds


def _in_kernels(
    self_seconds: Mapping[ModulePhase, float], kernels: Mapping[ModulePhase, float]
) -> dict[ModulePhase, float]:
    """Return the part of each self time in which the module's kernels run.

    It is the time of the kernels, but not more than the self time.
    """
    in_kernels = {}
    for key, seconds in self_seconds.items():
        in_kernels[key] = min(seconds, kernels.get(key, 0.0))
    return in_kernels


def _total(passes: Sequence[Mapping[ModulePhase, float]]) -> float:
    return sum(stats.median for stats in timing_stats(passes).values())


def _fit(
    self_seconds: Sequence[dict[ModulePhase, float]],
    kernels: Mapping[ModulePhase, float],
    seconds: float,
) -> None:
    """Scale the self times so that the sum of their medians is `seconds`.

    `self_seconds` contains the times of each pass, and is changed in place.

    Only the time outside kernels is scaled. But if the kernels alone take longer than `seconds`,
    their times are scaled as well.
    """
    busy = [_in_kernels(of_pass, kernels) for of_pass in self_seconds]
    computing = _total(busy)
    total = _total(self_seconds)
    if 0 < computing < total:
        factor = max(seconds - computing, 0.0) / (total - computing)
        for of_pass, of_kernels in zip(self_seconds, busy, strict=True):
            for key, in_kernels in of_kernels.items():
                of_pass[key] = in_kernels + factor * (of_pass[key] - in_kernels)
        total = _total(self_seconds)
    scale = seconds / total
    for of_pass in self_seconds:
        for key in of_pass:
            of_pass[key] *= scale


def _overhead_factor(
    passes: Sequence[PassTimes], unprofiled: float, overhead: HookOverhead
) -> float:
    """Return the factor by which the overhead must be multiplied before it is subtracted.

    With this factor, the overhead is exactly the time by which a pass with hooks is longer than a
    pass without hooks. The result is limited to the range from 0 to `MOST_OVERHEAD`.
    """
    hooked = statistics.median(sum(times.self_seconds.values()) for times in passes)
    expected = statistics.median(times.total_overhead(overhead) for times in passes)
    if expected <= 0:
        return 0.0
    return min(max((hooked - unprofiled) / expected, 0.0), MOST_OVERHEAD)


def timing_stats(passes: Sequence[Mapping[ModulePhase, float]]) -> dict[ModulePhase, TimingStats]:
    """Return statistics of the seconds of each module and phase over the passes.

    If a module runs only in some passes, such as the discriminator of a GAN, its statistics are
    multiplied by the share of passes in which it runs. So they are still seconds per pass.
    """
    seconds_by_key: defaultdict[ModulePhase, list[float]] = defaultdict(list)
    for self_seconds in passes:
        for key, seconds in self_seconds.items():
            seconds_by_key[key].append(seconds)
    result = {}
    for key, values in seconds_by_key.items():
        stats = TimingStats.of(values)
        if stats is None:
            continue
        share = stats.n / len(passes)
        result[key] = stats.times(share) if share < 1 else stats
    return result


WORTH_SAYING = 0.05
"""A note mentions that module times were scaled if the factor differs from 1 by at least this."""


def attach_module_times(
    profile: Profile,
    hooked: Sequence[Mapping[str, PassTimes]],
    overhead: HookOverhead,
    kernels: Mapping[ModulePhase, float] = NO_SECONDS,
) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
    """Divide the time of unprofiled steps among modules in the proportions of module-timing steps.

    Args:
        profile: The profile, with its steps.
        hooked: For each module-timing step, the times of each part, such as `forward`.
        overhead: The hook overhead that a trial measured.
        kernels: As in `scale_to_unprofiled`.

    Returns:
        The profile with the times of its modules, and the unscaled self times of the modules in
        each module-timing step. Ranks are compared by the unscaled times, because hooks cost the
        same on all ranks. Scaled times would make some ranks look slow, because each rank has its
        own scaling factor.
    """
    unprofiled, scale = with_phases([step for step in profile.steps if step.is_unprofiled])
    hooked_steps = [step for step in profile.steps if step.kind == "module_timing"]
    are_waits_known = all(step.waiting is not None for step in (*unprofiled, *hooked_steps))
    waits_apart = are_waits_known and len(hooked_steps) == len(hooked)
    passes = list(hooked)
    if waits_apart:
        for number, step in enumerate(hooked_steps):
            passes[number] = _with_wait_apart(hooked[number], step.waiting or 0.0)

    known: dict[str, list[float]] = {}
    for step in unprofiled:
        for part, seconds in _parts(step, waits_apart=waits_apart).items():
            known.setdefault(part, []).append(seconds)
    means = {}
    usual = {}
    is_uncontended = bool(hooked_steps) and all(step.uncontended_phases for step in hooked_steps)
    for part, of_part in known.items():
        # If a step has no such part, it counts as zero seconds, so that the modules add up to the
        # sum of all steps.
        means[part] = sum(of_part) * scale / len(unprofiled)
        usual[part] = statistics.median(of_part) * len(of_part) / len(unprofiled)
        if is_uncontended:
            # The times of the modules exclude waits for a core, so their total must exclude them
            # too.
            usual[part] = min(usual[part], _without_core_waits(usual[part], part, hooked_steps))

    times = scale_to_unprofiled(
        passes,
        usual,
        overhead,
        ignored_modules(profile),
        means,
        kernels=kernels or _asleep(passes),
    )
    timed = with_times(profile, times)
    run = replace(timed.run, observer_ratio=_observer_ratio(hooked_steps, unprofiled))
    notes = timed.notes
    far = {part: factor for part, factor in times.factors.items() if _is_far(part, factor)}
    if far:
        notes = (*notes, Note(code="time_scaled", subject="", values=far))
    return replace(timed, run=run, notes=notes), tuple(map(_self_seconds_of_pass, hooked))


def _asleep(passes: Sequence[Mapping[str, PassTimes]]) -> dict[ModulePhase, float]:
    """Return the seconds in which each module needs no core, as the median over the passes."""
    totals = []
    for parts in passes:
        asleep: defaultdict[ModulePhase, float] = defaultdict(float)
        for times in parts.values():
            for key, seconds in times.asleep.items():
                asleep[key] += seconds
        totals.append(asleep)
    medians = {}
    for key in dict.fromkeys(chain.from_iterable(totals)):
        medians[key] = statistics.median(asleep.get(key, 0.0) for asleep in totals)
    return medians


def _is_far(part: str, factor: float) -> bool:
    """Return whether a note reports the factor by which the times of a part were scaled."""
    return part != "waiting" and abs(factor - 1) > WORTH_SAYING


def ignored_modules(profile: Profile) -> set[str]:
    """Return the names of the modules that the user chose to ignore.

    Their self work and time are left out of every total.
    """
    return {note.subject for note in notes_with("ignored", profile.notes)}


def _observer_ratio(hooked: Sequence[Step], unprofiled: Sequence[Step]) -> float | None:
    """Return the duration of a module-timing step relative to an unprofiled step, such as 1.2.

    It is the ratio of two medians. Module-timing steps whose duration is not typical, for example
    because of validation, are left out.
    """
    slow = []
    for step in hooked:
        if step.seconds and not is_disturbed(step.marks):
            slow.append(step.seconds)
    fast = [step.seconds for step in unprofiled if step.seconds]
    if not slow or not fast:
        return None
    return statistics.median(slow) / statistics.median(fast)


def _self_seconds_of_pass(parts: Mapping[str, PassTimes]) -> dict[ModulePhase, float]:
    """Return the self seconds of the modules, summed over all parts of a pass."""
    self_seconds: defaultdict[ModulePhase, float] = defaultdict(float)
    for times in parts.values():
        for key, seconds in times.self_seconds.items():
            self_seconds[key] += seconds
    return dict(self_seconds)


def _without_core_waits(seconds: float, part: str, hooked: Sequence[Step]) -> float:
    """Return the time of a part of an unprofiled step, without waits for a core.

    Only module-timing steps measure these waits, so it is assumed that unprofiled steps wait for
    the same share of their time.

    Args:
        seconds: The duration of the part in an unprofiled step.
        part: The name of the part, such as `forward`.
        hooked: The module-timing steps. Without waits, the part has a median duration in these
            steps. The result is at most this duration.
    """
    uncontended_seconds = []
    whole = 0.0
    for step in hooked:
        uncontended = step.uncontended_phases or {}
        uncontended_seconds.append(uncontended.get(part, 0.0))
        whole += (step.phases or {}).get(part, 0.0)
    if not whole:
        return seconds
    return min(seconds * sum(uncontended_seconds) / whole, statistics.median(uncontended_seconds))


def with_times(profile: Profile, times: ScaledTimes) -> Profile:
    """Return the profile with the times of its modules.

    The time of a module stays unknown if the module did not run in any hooked pass.
    """
    notes = []
    for note in profile.notes:
        if note.code == "ignored" and note.subject in times.ignored:
            values = {**note.values, "seconds": times.ignored[note.subject]}
            notes.append(replace(note, values=values))
        else:
            notes.append(note)
    works = {}
    for key, seconds in times.inclusive.items():
        if key.fqn in profile.modules and key.phase in PASS_PHASES:
            work = profile.modules[key.fqn].work(key.phase)
            works[key] = replace(work, seconds=seconds, self_seconds=times.self_seconds.get(key))
    return replace(profile, modules=with_works(profile.modules, works), notes=tuple(notes))


def _with_wait_apart(parts: Mapping[str, PassTimes], seconds: float) -> dict[str, PassTimes]:
    """Move the wait for other ranks from the part `backward` into a separate part `waiting`.

    Otherwise, a delay of other ranks would change the times of this rank's modules.

    Args:
        parts: The parts of a module-timing step.
        seconds: Duration of the wait.
    """
    root = ModulePhase("", "backward")
    backward = parts.get("backward", PassTimes())
    self_seconds = defaultdict(float, backward.self_seconds)
    waited = min(seconds, self_seconds[root])
    self_seconds[root] -= waited
    return {
        **parts,
        "backward": dataclasses.replace(backward, self_seconds=self_seconds),
        "waiting": PassTimes(self_seconds=defaultdict(float, {root: waited})),
    }


def _parts(step: Step, *, waits_apart: bool) -> dict[str, float]:
    """Return the duration of each part of an unprofiled step, in seconds.

    Text generation has no phase `forward`, but `prefill` and `decode`. Their sum is used as
    `forward`. With `waits_apart`, the wait for other ranks is a separate part.
    """
    parts = {}
    for name in ("forward", "backward"):
        if name in step.phases:
            parts[name] = step.phases[name]
    generating = [step.phases[name] for name in WITHIN_FORWARD if name in step.phases]
    if generating and "forward" not in parts:
        parts["forward"] = sum(generating)
    if waits_apart and "backward" in parts:
        parts["waiting"] = step.waiting or 0.0
        parts["backward"] -= parts["waiting"]
    return parts

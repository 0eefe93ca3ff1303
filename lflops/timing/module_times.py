"""From moments to seconds.

A stamp says what runs from here on; the time up to the next stamp is that module's own.

    stamp      root   observer   q        observer   root      end
    mark       0      2          3        9          10        12          own: root 4, q 6; the observer 2

What a hook does is between two stamps, so it is measured and left out. What torch takes to call the
hook is in no stamp. That is the `HookOverhead`: about the same for every call, and known from a
trial. With cold caches it is more, and on a busy device it is nothing, so it is scaled by a factor
from 0 to 3. What it does not explain of a hooked pass scales all modules equally, and is reported:
clean time is divided over modules as that of hooked passes is. Kernels that a trace has are not
scaled: hooks make only the host slower.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import Profile, with_works
from lflops.profile.records import PASS_PHASES, ModulePhase, TimingStats
from lflops.profile.series import gathered, summed
from lflops.profile.steps import WITHIN_FORWARD, Step, is_disturbed, with_phases
from lflops.timing.clock import Clock

Stamp = tuple[
    Any, ModulePhase | None, str
    # a mark, what runs from there on, and why; `None` is the observer
]

ENTERS, SEGMENT, OPERATOR = "enters", "segment", "operator"
"""Why: a module is entered; a segment of backward begins; an operator is counted."""


@dataclass(frozen=True, kw_only=True)
class HookOverhead:
    """Seconds that hooks and modes take outside of our stamps."""

    # in a module, for each call of it
    inside: float = 0.0
    # in the caller, for each call that it makes
    outside: float = 0.0
    # in backward, for each segment
    segment: float = 0.0
    # where an operator is counted, for each
    operator: float = 0.0


NO_OVERHEAD = HookOverhead()


@dataclass(kw_only=True)
class PassTimes:
    """One pass by module and phase.

    Own seconds; how often it was called, called others, began a segment of backward, ran an
    operator.
    """

    own: defaultdict[ModulePhase, float] = field(default_factory=lambda: defaultdict(float))
    observer: float = 0.0
    called: Counter[ModulePhase] = field(default_factory=Counter)
    calls_others: Counter[ModulePhase] = field(default_factory=Counter)
    segments: Counter[ModulePhase] = field(default_factory=Counter)
    operators: Counter[ModulePhase] = field(default_factory=Counter)

    def add(self, other: "PassTimes") -> None:
        self.observer += other.observer
        for key, seconds in other.own.items():
            self.own[key] += seconds
        for name in ("called", "calls_others", "segments", "operators"):
            getattr(self, name).update(getattr(other, name))

    def overhead(self, key: ModulePhase, each: HookOverhead) -> float:
        """The hook overhead in the seconds of a module and phase."""
        at_modules = each.inside * self.called[key] + each.outside * self.calls_others[key]
        return at_modules + each.segment * self.segments[key] + each.operator * self.operators[key]


def pass_times(stamps: Sequence[Stamp], clock: Clock) -> PassTimes:
    """The times between settled stamps; the last one only ends the one before."""
    times = PassTimes()
    running: ModulePhase | None = None
    entering = False
    for (mark, key, why), (end, _, _) in pairwise(stamps):
        seconds = clock.seconds(mark, end)
        if key is None:
            times.observer += seconds
            entering = why == ENTERS
            if running is not None:
                times.calls_others[running] += entering
                times.operators[running] += why == OPERATOR
            continue
        times.own[key] += seconds
        times.called[key] += entering
        times.segments[key] += why == SEGMENT
        running, entering = key, False
    return times


def inclusive(own: Mapping[ModulePhase, float]) -> dict[ModulePhase, float]:
    """Seconds of each row and of all rows below it, in each phase."""
    return summed(
        (ModulePhase(above, phase), seconds)
        for (row, phase), seconds in own.items()
        for above in ancestry(row)
    )


# the largest factor of the trial's overhead
MOST_OVERHEAD = 3.0

NONE: Mapping[Any, float] = {}


@dataclass(frozen=True, kw_only=True)
class ScaledTimes:
    """Seconds by module and phase, own and inclusive, over the hooked passes."""

    own: Mapping[ModulePhase, TimingStats]
    inclusive: Mapping[ModulePhase, TimingStats]
    # Of each part, usual seconds of clean passes over those of hooked ones without the overhead: 1
    # is a good division.
    factors: Mapping[str, float]
    # median seconds of each row that is in none of the others
    ignored: Mapping[str, float]

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[Mapping[ModulePhase, float]],
        factors: Mapping[str, float] = NONE,
        ignored: Mapping[str, float] = NONE,
    ) -> Self:
        """The spreads over passes whose own seconds are known."""
        own = spreads_of(steps)
        medians = {key: spread.median for key, spread in own.items()}
        # The median of a sum is not the sum of medians, but the rows below a row have to add up to
        # it.
        sums, spreads = inclusive(medians), spreads_of([inclusive(each) for each in steps])
        summed = {
            key: replace(spread.shifted(sums[key] - spread.median), median=sums[key])
            for key, spread in spreads.items()
        }
        return cls(own=own, inclusive=summed, factors=factors, ignored=ignored)


def scale_to_clean(
    hooked: Sequence[Mapping[str, PassTimes]],
    clean: Mapping[str, float],
    overhead: HookOverhead,
    # rows that are left out
    ignored: Collection[str] = (),
    means: Mapping[str, float]
    # seconds of each part, which the modules add up to in the end; without them the usual ones
    | None = None,
    *,
    kernels: Mapping[
        ModulePhase, float
        # own seconds of a step on the device, where they are known
    ] = NONE,
) -> ScaledTimes:
    """Take off hook overhead, and scale the rest to add up to the clean passes."""
    # Each hooked pass is given by its parts, of which forward may have time of the backward phase,
    # where it takes a gradient. `clean` are the usual seconds of each part of a clean pass; a part
    # not in it is not scaled.
    means = clean if means is None else means
    scaled: list[defaultdict[ModulePhase, float]] = [defaultdict(float) for _ in hooked]
    factors = {}
    for part in dict.fromkeys(part for each in hooked for part in each):
        passes = [each.get(part, PassTimes()) for each in hooked]
        times = _times_the_overhead(passes, clean[part], overhead) if part in clean else 1.0
        own = [
            {
                key: max(
                    took - times * each.overhead(key, overhead), min(took, kernels.get(key, 0.0))
                )
                for key, took in each.own.items()
            }
            for each in passes
        ]
        if part in clean and (total := _total(own)) > 0:
            factors[part] = clean[part] / total
            own = _fitted(own, kernels, means[part])
        for sums, of_pass in zip(scaled, own, strict=True):
            for key, seconds in of_pass.items():
                sums[key] += seconds
    kept = [
        {key: seconds for key, seconds in own.items() if key.fqn not in ignored} for own in scaled
    ]
    left_out = {
        row: statistics.median(
            sum(took for key, took in own.items() if key.fqn == row) for own in scaled
        )
        for row in ignored
    }
    return ScaledTimes.of_steps(kept, factors, left_out)


def _total(passes: Sequence[Mapping[ModulePhase, float]]) -> float:
    return sum(spread.median for spread in spreads_of(passes).values())


def _fitted(
    own: list[dict[ModulePhase, float]], kernels: Mapping[ModulePhase, float], seconds: float
) -> list[dict[ModulePhase, float]]:
    """Scale what modules took besides their kernels, so that all of it takes so long.

    The kernels too where they alone take longer.
    """
    busy = [{key: min(took, kernels.get(key, 0.0)) for key, took in each.items()} for each in own]
    computing, total = _total(busy), _total(own)
    if 0 < computing < total:
        factor = max(seconds - computing, 0.0) / (total - computing)
        pairs = zip(own, busy, strict=True)
        own = [
            {key: of_busy[key] + factor * (took - of_busy[key]) for key, took in each.items()}
            for each, of_busy in pairs
        ]
        total = _total(own)
    return [{key: took * (seconds / total) for key, took in each.items()} for each in own]


def _times_the_overhead(passes: Sequence[PassTimes], clean: float, overhead: HookOverhead) -> float:
    """The factor of the trial's overhead that explains what hooked passes took longer."""
    hooked = statistics.median(sum(each.own.values()) for each in passes)
    expected = statistics.median(
        sum(each.overhead(key, overhead) for key in each.own) for each in passes
    )
    return min(max((hooked - clean) / expected, 0.0), MOST_OVERHEAD) if expected > 0 else 0.0


def spreads_of(passes: Sequence[Mapping[ModulePhase, float]]) -> dict[ModulePhase, TimingStats]:
    """Over the passes: what a module usually takes where it runs, times how often it does, as those of a GAN that take turns."""
    ran = gathered(item for each in passes for item in each.items())
    spreads = {
        key: spread
        for key, seconds in ran.items()
        if (spread := TimingStats.of(seconds)) is not None
    }
    for key, spread in spreads.items():
        if (often := spread.n / len(passes)) < 1:
            spreads[key] = spread.times(often)
    return spreads


# how far the hooked passes may be off the clean ones before a note says so
WORTH_SAYING = 0.05


def attach_module_times(
    profile: Profile,
    hooked: Sequence[Mapping[str, PassTimes]],
    overhead: HookOverhead,
    kernels: Mapping[ModulePhase, float] = NONE,
) -> tuple[Profile, tuple[Mapping[ModulePhase, float], ...]]:
    """A profile whose steps are timed with the time of its modules.

    The clean steps' time, divided as in the hooked ones.
    """
    # Also the own seconds of the modules in each hooked step, as stamped: ranks are compared by
    # these. Their hooks cost all ranks the same; a factor of each rank's own would be taken for a
    # slow rank.
    clean, scale = with_phases([step for step in profile.steps if step.is_unprofiled])
    of_hooks = [step for step in profile.steps if step.kind == "module_timing"]
    waits_apart = len(of_hooks) == len(hooked) and all(
        step.waiting is not None for step in (*clean, *of_hooks)
    )
    known = gathered(
        item for step in clean for item in _parts(step, waits_apart=waits_apart).items()
    )
    # A step without the part has none of its seconds: so modules add up to the summed clean steps.
    means = {part: sum(seconds) * scale / len(clean) for part, seconds in known.items()}
    usual = {part: statistics.median(known[part]) * len(known[part]) / len(clean) for part in means}
    if of_hooks and all(
        step.uncontended_phases
        for step in of_hooks
        # their modules are timed without what others took
    ):
        usual = {
            part: min(seconds, _without_others(seconds, part, of_hooks))
            for part, seconds in usual.items()
        }
    ignored = frozenset(note.subject for note in profile.notes if note.code == "ignored")
    apart = (
        [
            _with_wait_apart(parts, step.waiting or 0.0)
            for parts, step in zip(hooked, of_hooks, strict=True)
        ]
        if waits_apart
        else hooked
    )
    times = scale_to_clean(apart, usual, overhead, ignored, means, kernels=kernels)
    timed = with_times(profile, times)
    slow = [step.seconds for step in of_hooks if step.seconds and not is_disturbed(step.marks)]
    undisturbed = [step.seconds for step in clean if step.seconds]
    run = replace(
        timed.run,
        observer_ratio=statistics.median(slow) / statistics.median(undisturbed)
        if slow and undisturbed
        else None,
    )
    far: Mapping[str, float] = {
        name: by
        for name, by in times.factors.items()
        if name != "waiting" and abs(by - 1) > WORTH_SAYING
    }
    notes = (*timed.notes, Note(code="time_scaled", subject="", values=far)) if far else timed.notes
    own_of_steps = tuple(
        summed(item for part in parts.values() for item in part.own.items()) for parts in hooked
    )
    return replace(timed, run=run, notes=notes), own_of_steps


def _without_others(seconds: float, part: str, hooked: Sequence[Step]) -> float:
    """What a part of a clean step took, without the share that others had of it in the hooked ones, and no more than these took."""
    own, whole = (
        [phases.get(part, 0.0) for phases in of_all]
        for of_all in zip(*((each.uncontended_phases, each.phases) for each in hooked), strict=True)
    )
    return min(seconds * sum(own) / sum(whole), statistics.median(own)) if sum(whole) else seconds


def with_times(profile: Profile, times: ScaledTimes) -> Profile:
    """The profile with the seconds of its modules; a row that ran in no stamped pass stays unknown."""
    notes = (
        replace(note, values={**note.values, "seconds": times.ignored[note.subject]})
        if note.code == "ignored" and note.subject in times.ignored
        else note
        for note in profile.notes
    )
    works = {
        key: replace(
            profile.modules[key.fqn].work(key.phase),
            seconds=seconds,
            self_seconds=times.own.get(key),
        )
        for key, seconds in times.inclusive.items()
        if key.fqn in profile.modules and key.phase in PASS_PHASES
    }
    return replace(profile, modules=with_works(profile.modules, works), notes=tuple(notes))


def _with_wait_apart(parts: Mapping[str, PassTimes], seconds: float) -> dict[str, PassTimes]:
    """The parts of a hooked step with the wait for other ranks as one more.

    How late they are says nothing about the modules.
    """
    root, backward = ModulePhase("", "backward"), parts.get("backward", PassTimes())
    waited, own = min(seconds, backward.own.get(root, 0.0)), defaultdict(float, backward.own)
    own[root] -= waited
    return {
        **parts,
        "backward": dataclasses.replace(backward, own=own),
        "waiting": PassTimes(own=defaultdict(float, {root: waited})),
    }


def _parts(step: Step, *, waits_apart: bool) -> dict[str, float]:
    """What a clean pass times as one.

    Generation has two parts, prefill and decode, which together are forward.
    """
    parts = {part: step.phases[part] for part in ("forward", "backward") if part in step.phases}
    generating = [step.phases[name] for name in WITHIN_FORWARD if name in step.phases]
    if generating and "forward" not in parts:
        parts["forward"] = sum(generating)
    if waits_apart and "backward" in parts:
        parts["waiting"] = step.waiting or 0.0
        parts["backward"] -= parts["waiting"]
    return parts

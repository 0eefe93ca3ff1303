"""The budget of a step: disjoint parts of the summed clean steps that add up to 1.

    a step    |data|transfer|  forward, module by module  |  backward, likewise  |communication|clip|optimizer|other|
    a module                 |useful|recompute|memory-bound|below the roof|

A phase outside modules is one part. A module's own time is divided in the order shown, each part
clipped to the time left:

useful           its contractions at the peak
recompute        its recomputed contractions at the peak
memory-bound     its operators' bytes at the bandwidth, as far as that takes longer
below the roof   the rest

With a device trace the phases are those of its kernels. The time in which the device computed
nothing is then another part.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from lflops.analysis.step_times import StepTimes
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import peak_of
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, PHASES, step_phase
from lflops.profile.series import summed

IN_MODULES = (
    "useful",
    "recompute",
    "memory_bound",
    "below_roof",
    # the parts of a module's own time, in this order
)

# Work is divided by pass: a fused backward's second product has no separate time. `_BOTH` is used
# where forward and backward cannot be separated.
_BOTH = ""
# share of a step that is rounding error of sums of floats
_NOISE = 1e-9


class StepBreakdown(Struct, frozen=True, kw_only=True):
    """Shares of the summed clean steps."""

    # of the mean clean step
    seconds: float
    # By name, adding up to 1: those of `IN_MODULES`, each phase outside modules, and the activities
    # of a traced device. `forward` and `backward` are the time of these phases that is in no module
    # of the profile.
    parts: Mapping[str, float]
    modules: Mapping[
        str, Mapping[str, float]
        # the parts of `IN_MODULES` by module, of its self time; `parts` has their sums
    ]
    idle: Mapping[
        str, float
        # of a traced device, shares of forward and backward in which it computed nothing
    ]
    inside_rest: tuple[
        str, ...
        # parts that are unknown, and so are within `below_roof`: `idle`, `memory_bound`
    ]


class _Need(Struct, frozen=True, gc=False):
    """Seconds at the peak and at the bandwidth."""

    useful: float = 0.0
    recompute: float = 0.0
    memory_bound: float = 0.0

    def __add__(self, other: "_Need") -> "_Need":
        return _Need(
            self.useful + other.useful,
            self.recompute + other.recompute,
            self.memory_bound + other.memory_bound,
        )


class _StepParts(NamedTuple):
    """The seconds of a step by phase or device activity, and each module's own seconds by pass."""

    seconds: Mapping[str, float]
    own: Mapping[tuple[str, str], float]
    # of a device, by pass
    idle: Mapping[str, float] = {}

    def scaled_to(self, seconds: float) -> "_StepParts":
        """The same parts, scaled to add up to a step's seconds.

        One part where nothing is separated.
        """
        factor = seconds / total if (total := sum(self.seconds.values())) else 0.0
        parts = (
            {name: part_seconds * factor for name, part_seconds in self.seconds.items()}
            if factor
            else {_BOTH: seconds}
        )
        return self._replace(
            seconds=parts, own={key: own * factor for key, own in self.own.items()}
        )


def budget(
    profile: Profile, chip: Hardware | None, times: StepTimes, *, share: float = 1.0
) -> StepBreakdown | None:
    """Divide the mean clean step, whose phases are the first cut.

    `share` is the share of the counts that one rank did.

    `None` where the time, or the peak of a dtype in which something was multiplied, is unknown, and
    where nothing was counted.
    """
    seconds = times.mean
    needs = _needs(profile, chip, share) if chip and profile.op_counts else None
    if not seconds or needs is None or chip is None:
        return None
    step = (_of_device(profile, times) or _of_phases(profile, times)).scaled_to(seconds)
    parts: defaultdict[str, float] = defaultdict(float)
    modules: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: dict.fromkeys(IN_MODULES, 0.0)
    )
    for name, part_seconds in step.seconds.items():
        for module, took, need in _by_module(name, part_seconds, needs, step.own):
            # What is no module's and has none of its operators in it is a part by its own name.
            for part, cut in (
                _divide(took, need)
                if module is not None or need != _Need()
                else [(name or "below_roof", took)]
            ):
                parts[part] += cut / seconds
                if module is not None:
                    modules[module][part] += cut / seconds
    unknown = (
        "" if "idle" in step.seconds or profile.run.device_type == "cpu" else "idle",
        "" if chip.bandwidth_bytes_per_second else "memory_bound",
    )
    return StepBreakdown(
        seconds=seconds,
        parts={name: parts[name] for name in (*IN_MODULES, *step.seconds) if parts.get(name)},
        modules=dict(modules),
        idle={name: took / seconds for name, took in step.idle.items() if name and took},
        inside_rest=tuple(filter(None, unknown)),
    )


def _divide(seconds: float, need: _Need) -> Iterator[tuple[str, float]]:
    """Each part clipped to the time that the parts before it left."""
    left = seconds
    for part, needed in zip(
        IN_MODULES, (need.useful, need.recompute, need.memory_bound, seconds), strict=True
    ):
        cut = min(needed, left)
        left -= cut
        yield part, cut


def _needs(profile: Profile, chip: Hardware, share: float) -> dict[tuple[str, str], _Need] | None:
    """What each module's own operators need, by pass; `None` where a peak is unknown."""
    needs: dict[tuple[str, str], _Need] = {}
    bandwidth = chip.bandwidth_bytes_per_second
    for cell in profile.op_counts:
        if (when := step_phase(cell.phase)) not in PASSES:
            continue
        peak = peak_of(cell.dtype, chip)
        if cell.executed_macs and peak is None:
            return None
        compute = 2 * cell.executed_macs * share / peak if peak else 0.0
        moving = cell.bytes_moved * share / bandwidth if bandwidth else 0.0
        key, beyond = (cell.module, when), max(moving - compute, 0.0)
        needed = (
            _Need(0.0, compute, beyond)
            if cell.phase == "recompute"
            else _Need(compute, 0.0, beyond)
        )
        needs[key] = needs.get(key, _Need()) + needed
    return needs


def _by_module(
    name: str,
    seconds: float,
    needs: Mapping[tuple[str, str], _Need],
    own: Mapping[tuple[str, str], float],
) -> Iterator[tuple[str | None, float, _Need]]:
    """The seconds of a part by module, with what each needed; time of no module comes last."""
    # A module without a time, as those within a compiled one, ran in that of the nearest above it
    # that has one
    times = {
        module: took
        for (module, when), took in own.items()
        if when == name and name in {*PASSES, _BOTH}
    }
    needed: defaultdict[str | None, _Need] = defaultdict(_Need)
    for (module, when), need in needs.items():
        if name in {when, _BOTH}:
            timed = next((above for above in ancestry(module) if above in times), None)
            needed[timed] += need
    total = sum(times.values())
    scale = min(seconds / total, 1.0) if total else 0.0
    for module, took in times.items():
        yield module, took * scale, needed[module]
    left = seconds - total * scale
    if left > _NOISE * seconds:
        yield None, left, needed[None]


def _of_phases(profile: Profile, times: StepTimes) -> _StepParts:
    """The phases of the clean steps, and the own seconds of modules.

    The time in which they communicate is a separate part.
    """
    parts, own = dict(times.parts), _by_pass(profile, "self_seconds")
    for (name, when), seconds in times.communicating.items():
        cut = _move(parts, seconds, "communication", when)
        if (name, when) in own:
            own[name, when] = max(own[name, when] - cut, 0.0)
    return _StepParts(parts, own)


def _move(parts: dict[str, float], seconds: float, to: str, *places: str) -> float:
    """Move so many seconds to another part, out of the first place that has some.

    Returns how many there were.
    """
    moved = 0.0
    for place in places:
        cut = min(seconds - moved, parts.get(place, 0.0))
        if cut > 0:
            parts[place] -= cut
            parts[to] = parts.get(to, 0.0) + cut
            moved += cut
    return moved


def _of_device(profile: Profile, times: StepTimes) -> _StepParts | None:
    """The phases of the clean steps, of whose forward and backward a traced device computed a part.

    `None` without such a trace.
    """
    # Tracing makes the host slower and not the device's work, so what this leaves of the two phases
    # is idle time. Copies and communication that nothing hides are taken out of what they are in.
    trace = profile.trace
    if trace is None or trace.device_compute_seconds is None:
        return None
    steps = (trace.batches or 1) / (profile.run.accumulation or 1)
    inclusive, computing = _by_pass(profile, "device_seconds"), trace.device_compute_seconds / steps
    # its kernels are among those of the modules
    for each in profile.communication:
        for key in ((above, step_phase(each.phase)) for above in ancestry(each.module)):
            inclusive[key] = max(inclusive.get(key, 0.0) - (each.seconds or 0.0), 0.0)
    total = sum(inclusive.get(("", name), 0.0) for name in (*PASSES, "optimizer"))
    factor = (
        min(computing / total, 1.0) if total else 0.0
        # kernels are recorded per step, and on streams that overlap
    )
    own = {key: took * factor for key, took in inclusive.items()}
    for (name, when), took in inclusive.items():
        if name and (above := (name.rpartition(".")[0], when)) in own:
            own[above] = max(own[above] - took * factor, 0.0)
    parts = dict(times.parts) or {_BOTH: times.mean or 0.0}
    if not factor:
        parts[_BOTH] = sum(parts.pop(name, 0.0) for name in (*PASSES, _BOTH))
    busy = (
        {when: inclusive.get(("", when), 0.0) * factor for when in PASSES}
        if factor
        else {_BOTH: computing}
    )
    idle = {name: max(parts.get(name, 0.0) - took, 0.0) for name, took in busy.items()}
    for name, left in idle.items():
        _move(parts, left, "idle", name)
    _move(
        parts,
        (trace.exposed_copy_seconds or 0.0) / steps - parts.get("transfer", 0.0),
        "copy",
        "other",
        "idle",
    )
    _move(parts, (trace.exposed_comm_seconds or 0.0) / steps, "communication", "idle", "other")
    return _StepParts(parts, own, idle)


def _by_pass(profile: Profile, field: str) -> dict[tuple[str, str], float]:
    """Medians by module, those of the phases of one pass added up; the unknown left out."""
    works = (
        (name, phase, module.work(phase))
        for phase, (name, module) in product(PHASES, profile.modules.items())
    )
    spreads = ((name, phase, getattr(work, field)) for name, phase, work in works)
    return summed(
        ((name, step_phase(phase)), spread.median)
        for name, phase, spread in spreads
        if spread is not None
    )

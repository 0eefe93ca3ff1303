"""Compute the step breakdown: divide the time of a step into disjoint parts.

The parts are shares of the time of the unprofiled steps, and add up to 1. Each phase outside
modules is one part, such as `data`, `transfer`, `clip` and `optimizer`. Forward and backward are
divided among the modules, and the self time of each module is divided into these parts:

* `ideal_compute`: the time of the module's matmuls at the chip's peak.
* `recompute`: the time of the module's recomputed matmuls at the peak.
* `memory_bound`: the time by which moving the operators' bytes at the chip's bandwidth takes longer
  than their matmuls.
* `inefficient_kernels`: the rest.

They are computed in this order, and no part can be longer than the time that is left.

Communication is a separate part. If a device was traced, the times of modules are kernel times, and
the idle time of the device is another part. A pass is forward or backward; backward includes
recomputation.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from lflops.analysis.step_times import StepTimes
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import peak_of
from lflops.profile.module_names import ancestry, parent_of
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, PHASES, step_phase
from lflops.profile.series import scaled, summed

IN_MODULES = ("ideal_compute", "recompute", "memory_bound", "inefficient_kernels")
"""The parts into which a module's self time is divided, in the order in which they are computed."""

# Work and time are divided by pass, not by phase. Fused attention recomputes a matmul inside its
# backward kernel, so this recomputation has no separate time. The following name stands for both
# passes if the times of forward and backward are not known separately.
_BOTH_PASSES = ""
# Rounding error of summed floats, as a share of a step.
_ROUNDING = 1e-9


class StepBreakdown(Struct, frozen=True, kw_only=True):
    """The parts of a step, as shares of the time of the unprofiled steps.

    Attributes:
        seconds: Mean duration of an unprofiled step, in seconds.
        parts: The share of each part, keyed by name. All shares add up to 1. The names are the
            names in `IN_MODULES`, the phases outside modules and, if a device was traced,
            activities of the device such as `idle` or `copy`. `forward` and `backward` are the time
            of these phases that belongs to no module.
        modules: The parts of each module's self time, as shares of the step, keyed by module. The
            parts are the names in `IN_MODULES`.
        idle: Share of the step in which a traced device computed nothing, keyed by `forward` and
            `backward`.
        inside_rest: Names of parts (`idle`, `memory_bound`) that could not be computed. The time of
            these parts is included in `inefficient_kernels`.
    """

    seconds: float
    parts: Mapping[str, float]
    modules: Mapping[str, Mapping[str, float]]
    idle: Mapping[str, float]
    inside_rest: tuple[str, ...]


class _LeastTime(NamedTuple):
    """The least time of a module's operators on the chip, in seconds, by part of the step.

    The fields are the parts of `IN_MODULES`, except the rest, `inefficient_kernels`.
    """

    ideal_compute: float = 0.0
    recompute: float = 0.0
    memory_bound: float = 0.0

    def plus(self, other: "_LeastTime") -> "_LeastTime":
        return _LeastTime(
            self.ideal_compute + other.ideal_compute,
            self.recompute + other.recompute,
            self.memory_bound + other.memory_bound,
        )


class _StepParts(NamedTuple):
    """The times of the phases and modules of a step, from which the step breakdown is computed.

    A pass is forward or backward; backward includes recomputation.

    Attributes:
        seconds: Seconds of each phase, and of each activity of a traced device, such as `idle`.
        own: Self time of each module in each pass, in seconds.
        idle: Seconds in which a device computed nothing, keyed by pass.
    """

    seconds: Mapping[str, float]
    own: Mapping[tuple[str, str], float]
    idle: Mapping[str, float] = {}

    def scaled_to(self, seconds: float) -> "_StepParts":
        """Scale all times so that the phases and activities add up to `seconds`.

        If the step has no times, the result has a single part for forward and backward.
        """
        total = sum(self.seconds.values())
        if not total:
            own = dict.fromkeys(self.own, 0.0)
            return self._replace(seconds={_BOTH_PASSES: seconds}, own=own)
        factor = seconds / total
        return self._replace(seconds=scaled(self.seconds, factor), own=scaled(self.own, factor))


def step_breakdown(
    profile: Profile, chip: Hardware | None, times: StepTimes, *, share: float = 1.0
) -> StepBreakdown | None:
    """Divide the mean unprofiled step into parts, first by phase and then by module.

    `share` is the share of the counted work that one rank did, which is below 1 if ranks do
    different work. Return `None` if nothing was counted. Also return `None` if the step time, the
    chip, or the chip's peak for a dtype of the matmuls is unknown.
    """
    seconds = times.mean
    if not seconds or chip is None or not profile.op_counts:
        return None
    needs = _needs(profile, chip, share)
    if needs is None:
        return None
    step = _device_parts(profile, times) or _phase_parts(profile, times)
    step = step.scaled_to(seconds)

    parts: defaultdict[str, float] = defaultdict(float)
    modules: defaultdict[str, dict[str, float]]
    modules = defaultdict(lambda: dict.fromkeys(IN_MODULES, 0.0))
    for name, part_seconds in step.seconds.items():
        for module, took, need in _by_module(name, part_seconds, needs, step.own):
            if module is None and not any(need):
                # No module and no operator of a module ran in this time.
                parts[name or "inefficient_kernels"] += took / seconds
                continue
            for part, cut in _divide(took, need):
                parts[part] += cut / seconds
                if module is not None:
                    modules[module][part] += cut / seconds

    unknown = []
    if "idle" not in step.seconds and profile.run.device_type != "cpu":
        unknown.append("idle")
    if not chip.bandwidth_bytes_per_second:
        unknown.append("memory_bound")
    names = (*IN_MODULES, *step.seconds)
    idle = {name: took / seconds for name, took in step.idle.items() if name and took}
    return StepBreakdown(
        seconds=seconds,
        parts={name: parts[name] for name in names if parts.get(name)},
        modules=dict(modules),
        idle=idle,
        inside_rest=tuple(unknown),
    )


def _divide(seconds: float, need: _LeastTime) -> Iterator[tuple[str, float]]:
    """Divide a module's time into the parts in `IN_MODULES`, and yield the seconds of each part.

    A part gets the time that it needs, but at most the time that remains after the previous parts.
    """
    left = seconds
    for part, needed in zip(IN_MODULES, (*need, seconds), strict=True):
        cut = min(needed, left)
        left -= cut
        yield part, cut


def _needs(
    profile: Profile, chip: Hardware, share: float
) -> dict[tuple[str, str], _LeastTime] | None:
    """Return the least time of each module's operators, keyed by module and pass.

    Return `None` if the peak for a dtype of the matmuls is unknown.
    """
    needs: defaultdict[tuple[str, str], _LeastTime] = defaultdict(_LeastTime)
    bandwidth = chip.bandwidth_bytes_per_second
    for cell in profile.op_counts:
        when = step_phase(cell.phase)
        if when not in PASSES:
            continue
        peak = peak_of(cell.dtype, chip)
        if cell.executed_macs and peak is None:
            return None
        compute = 0.0
        if peak:
            compute = 2 * cell.executed_macs * share / peak
        moving = 0.0
        if bandwidth:
            moving = cell.bytes_moved * share / bandwidth
        memory_bound = max(moving - compute, 0.0)
        if cell.phase == "recompute":
            need = _LeastTime(recompute=compute, memory_bound=memory_bound)
        else:
            need = _LeastTime(ideal_compute=compute, memory_bound=memory_bound)
        key = (cell.module, when)
        needs[key] = needs[key].plus(need)
    return needs


def _by_module(
    name: str,
    seconds: float,
    needs: Mapping[tuple[str, str], _LeastTime],
    own: Mapping[tuple[str, str], float],
) -> Iterator[tuple[str | None, float, _LeastTime]]:
    """Divide the time of a phase among the modules.

    Each item has a module, the seconds that it took, and the least time of its operators. If some
    time belongs to no module, the last item has this time, and `None` instead of a module.

    Args:
        name: The phase.
        seconds: The time of the phase.
        needs: The least time of the operators of each module in each pass.
        own: The self time of each module in each pass.
    """
    times: dict[str, float] = {}
    if name in PASSES or name == _BOTH_PASSES:
        for (module, when), took in own.items():
            if when == name:
                times[module] = took
    # A module may have no time, for example inside a compiled module. If so, its work is added to
    # the nearest module above it that has a time.
    needed: defaultdict[str | None, _LeastTime] = defaultdict(_LeastTime)
    for (module, when), need in needs.items():
        if name not in {when, _BOTH_PASSES}:
            continue
        timed = _nearest_timed(module, times)
        needed[timed] = needed[timed].plus(need)
    total = sum(times.values())
    scale = min(seconds / total, 1.0) if total else 0.0
    for module, took in times.items():
        yield module, took * scale, needed[module]
    left = seconds - total * scale
    if left > _ROUNDING * seconds:
        yield None, left, needed[None]


def _nearest_timed(module: str, times: Mapping[str, float]) -> str | None:
    """Return the module or, if it has no time, the nearest module above it that has one."""
    for above in ancestry(module):
        if above in times:
            return above
    return None


def _phase_parts(profile: Profile, times: StepTimes) -> _StepParts:
    """Return the times of the phases and modules of a step, for a profile without a device trace.

    Communication is a separate part, and its time is subtracted from the modules that communicate.
    """
    parts = dict(times.parts)
    own = _seconds_by_pass(profile, "self_seconds")
    for (module, when), seconds in times.communicating.items():
        moved = move(parts, seconds, "communication", when)
        if (module, when) in own:
            own[module, when] = max(own[module, when] - moved, 0.0)
    return _StepParts(parts, own)


def move(parts: dict[str, float], seconds: float, to: str, *sources: str) -> float:
    """Move time from some parts to another part, and return how much was moved.

    Args:
        parts: Seconds or share of each part. Modified in place.
        seconds: Seconds or share to move.
        to: The part that the time is moved to.
        sources: The parts that the time is taken from. The first source is used up first.
    """
    moved = 0.0
    for source in sources:
        cut = min(seconds - moved, parts.get(source, 0.0))
        if cut > 0:
            parts[source] -= cut
            parts[to] = parts.get(to, 0.0) + cut
            moved += cut
    return moved


def _device_parts(profile: Profile, times: StepTimes) -> _StepParts | None:
    """Return the times of the phases and modules of a step, for a profile with a device trace.

    Idle time, communication, and copies outside the phase `transfer` become separate parts. Their
    time is subtracted from the parts that contained it. Copies and communication only count if the
    device did nothing else at the same time.

    Tracing slows down the host, but not the device. So the idle time of a phase is the time of the
    phase in unprofiled steps, minus the time in which the traced device computed. Return `None` if
    no device was traced.
    """
    trace = profile.trace
    if trace is None or trace.device_compute_seconds is None:
        return None
    steps = (trace.batches or 1) / (profile.run.accumulation or 1)
    computing = trace.device_compute_seconds / steps
    inclusive = _computing_by_pass(profile)
    of_root = {when: inclusive.get(("", when), 0.0) for when in (*PASSES, "optimizer")}

    # Kernels may run on several streams at the same time. Then the sum of their times is larger
    # than the time in which the device computed.
    total = sum(of_root.values())
    factor = min(computing / total, 1.0) if total else 0.0
    parts = dict(times.parts) or {_BOTH_PASSES: times.mean or 0.0}
    if factor:
        busy = {when: of_root[when] * factor for when in PASSES}
    else:
        busy = {_BOTH_PASSES: computing}
        undivided = []
        for name in (*PASSES, _BOTH_PASSES):
            undivided.append(parts.pop(name, 0.0))
        parts[_BOTH_PASSES] = sum(undivided)
    idle = {}
    for name, took in busy.items():
        idle[name] = max(parts.get(name, 0.0) - took, 0.0)
        move(parts, idle[name], "idle", name)
    copying = (trace.exposed_copy_seconds or 0.0) / steps - parts.get("transfer", 0.0)
    move(parts, copying, "copy", "other", "idle")
    communicating = (trace.exposed_comm_seconds or 0.0) / steps
    move(parts, communicating, "communication", "idle", "other")
    return _StepParts(parts, _without_submodules(inclusive, factor), idle)


def _without_submodules(
    inclusive: Mapping[tuple[str, str], float], factor: float
) -> dict[tuple[str, str], float]:
    """Return self times, computed from times with submodules and multiplied by a factor.

    The times are in seconds, keyed by module and pass (forward or backward).
    """
    own = scaled(inclusive, factor)
    for (module, when), took in inclusive.items():
        parent = (parent_of(module), when)
        if module and parent in own:
            own[parent] = max(own[parent] - took * factor, 0.0)
    return own


def _computing_by_pass(profile: Profile) -> dict[tuple[str, str], float]:
    """Return the device time of each module in each pass (forward or backward), in seconds.

    It includes submodules, but not communication kernels.
    """
    inclusive = _seconds_by_pass(profile, "device_seconds")
    for collective in profile.communication:
        when = step_phase(collective.phase)
        for module in ancestry(collective.module):
            left = inclusive.get((module, when), 0.0) - (collective.seconds or 0.0)
            inclusive[module, when] = max(left, 0.0)
    return inclusive


def _seconds_by_pass(profile: Profile, field: str) -> dict[tuple[str, str], float]:
    """Return the median time of each module, in seconds, keyed by module and phase of the step.

    Recomputation is part of backward. `field` is the field of `Work` that has the times, such as
    `self_seconds`. Modules with an unknown median are left out.
    """
    medians = []
    for phase in PHASES:
        for name, module in profile.modules.items():
            spread = getattr(module.work(phase), field)
            if spread is not None:
                medians.append(((name, step_phase(phase)), spread.median))
    return summed(medians)

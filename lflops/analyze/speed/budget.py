"""Where a step's peak-seconds went: parts of peak x step time that are disjoint and add up to 1.

    a step    |data|transfer|  forward, module by module  |  backward, so too  |clip|optimizer|other|
    a module                 |useful|recompute|memory-bound|below the roof|

A phase outside modules is a part as it is. The time of a module itself is cut in the order shown, each part clipped to what is left: what
its contractions need at the peak, what those need that ran again, what its operators' bytes need at the bandwidth beyond that, the rest.
Where a trace tells what the device did, its kernels take the place of the phases, and what it did not compute in is a part by itself.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from lflops.analyze.speed.peaks import peak_of
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile, Work
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, Phase, Spread

__all__ = ["IN_MODULES", "Budget", "budget"]

IN_MODULES = ("useful", "recompute", "memory_bound", "below_roof")
"""What a module's own time is cut into, in this order."""

# A pass, and the phases whose work is done in it: a fused backward's second product has no time of its own. The whole stands for both,
# where nobody tells them apart.
_WHOLE = ""
_PASSES: Mapping[str, tuple[Phase, ...]] = {"forward": ("forward",), "backward": ("backward", "recompute"), _WHOLE: ()}
_WITHIN_FORWARD = frozenset({"prefill", "decode"})
_NOISE = 1e-9
"""Of a step: what is left of sums of floats."""


class Budget(Struct, frozen=True, kw_only=True):
    """Shares of peak x step time.

    Attributes:
        seconds: Of the step.
        parts: By name, adding up to 1: those of `IN_MODULES`, and each phase outside modules or what a traced device did by its own name.
            `forward` and `backward` are what of these is in no module that is shown.
        modules: The parts of `IN_MODULES` by module, of its own time; `parts` has their sums.
        idle: The part `idle` by the phase that the host was in meanwhile; empty where a trace does not tell.
        inside_rest: What cannot be told apart and lies within `below_roof`: `idle`, `memory_bound`.
    """

    seconds: float
    parts: Mapping[str, float]
    modules: Mapping[str, Mapping[str, float]]
    idle: Mapping[str, float]
    inside_rest: tuple[str, ...]


class _Need(Struct, frozen=True, gc=False):
    """Seconds at the peak and at the bandwidth."""

    useful: float = 0.0
    recompute: float = 0.0
    memory_bound: float = 0.0

    def __add__(self, other: "_Need") -> "_Need":
        return _Need(self.useful + other.useful, self.recompute + other.recompute, self.memory_bound + other.memory_bound)


class _Stretches(NamedTuple):
    """What a step is made of, in seconds, and each module's own time by pass."""

    seconds: Mapping[str, float]
    own: Mapping[tuple[str, str], float]

    def scaled_to(self, seconds: float) -> "_Stretches":
        """Adding up to so much; one whole where nothing is told apart."""
        factor = seconds / whole if (whole := sum(self.seconds.values())) else 0.0
        stretches = {name: stretch * factor for name, stretch in self.seconds.items()} if factor else {_WHOLE: seconds}
        return _Stretches(stretches, {place: took * factor for place, took in self.own.items()})


def budget(profile: Profile, chip: Hardware | None, *, seconds: float | None, share: float = 1.0) -> Budget | None:
    """Cut a step.

    Args:
        profile: What was counted, with its times.
        chip: What the device can do.
        seconds: Of a step.
        share: What of the counts one rank did.

    Returns:
        `None` where the time, or the peak of a dtype in which something was multiplied, is unknown, and where nothing was counted.
    """
    needs = _needs(profile, chip, share) if chip and profile.cells else None
    if not seconds or needs is None or chip is None:
        return None
    stretches = (_of_device(profile) or _of_phases(profile)).scaled_to(seconds)
    parts: defaultdict[str, float] = defaultdict(float)
    modules: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(IN_MODULES, 0.0))
    for name, stretch in stretches.seconds.items():
        for module, took, need in _divided(name, stretch, needs, stretches.own):
            # What is no module's and has none of its operators in it is a part by its own name.
            for part, cut in _cut(took, need) if module is not None or need != _Need() else [(name or "below_roof", took)]:
                parts[part] += cut / seconds
                if module is not None:
                    modules[module][part] += cut / seconds
    unknown = (
        "" if "idle" in stretches.seconds or profile.run.device_type == "cpu" else "idle",
        "" if chip.bandwidth_bytes_per_second else "memory_bound",
    )
    return Budget(
        seconds=seconds,
        parts={name: parts[name] for name in (*IN_MODULES, *stretches.seconds) if parts.get(name)},
        modules=dict(modules),
        idle=_idle(profile, parts["idle"]),
        inside_rest=tuple(filter(None, unknown)),
    )


def _idle(profile: Profile, share: float) -> dict[str, float]:
    """The idle share by the host's phase."""
    by_phase = (profile.trace.device_idle_by_phase if profile.trace else None) or {}
    whole = sum(by_phase.values())
    return {phase: share * seconds / whole for phase, seconds in by_phase.items()} if whole and share else {}


def _cut(seconds: float, need: _Need) -> Iterator[tuple[str, float]]:
    """Each part clipped to what the ones before it left."""
    left = seconds
    for part, needed in zip(IN_MODULES, (need.useful, need.recompute, need.memory_bound, seconds), strict=True):
        cut = min(needed, left)
        left -= cut
        yield part, cut


def _needs(profile: Profile, chip: Hardware, share: float) -> dict[tuple[str, str], _Need] | None:
    """Of each module's own operators by pass; `None` where a peak is unknown."""
    needs: dict[tuple[str, str], _Need] = {}
    bandwidth = chip.bandwidth_bytes_per_second
    passes = {phase: name for name, phases in _PASSES.items() for phase in phases}
    for cell in profile.cells:
        if cell.phase not in passes:
            continue
        peak = peak_of(cell.dtype, profile.run, chip)
        if cell.executed_macs and peak is None:
            return None
        compute = 2 * cell.executed_macs * share / peak if peak else 0.0
        moving = cell.bytes_moved * share / bandwidth if bandwidth else 0.0
        key, beyond = (cell.module, passes[cell.phase]), max(moving - compute, 0.0)
        needed = _Need(0.0, compute, beyond) if cell.phase == "recompute" else _Need(compute, 0.0, beyond)
        needs[key] = needs.get(key, _Need()) + needed
    return needs


def _divided(
    name: str, seconds: float, needs: Mapping[tuple[str, str], _Need], own: Mapping[tuple[str, str], float]
) -> Iterator[tuple[str | None, float, _Need]]:
    """A stretch as the modules' own times and what these needed; what is no module's comes last.

    A module without a time, as those within a compiled one, ran in that of the nearest above it that has one.
    """
    times = {module: took for (module, when), took in own.items() if when == name and name in _PASSES}
    needed: defaultdict[str | None, _Need] = defaultdict(_Need)
    for (module, when), need in needs.items():
        if name in {when, _WHOLE}:
            timed = next((above for above in ancestry(module) if above in times), None)
            needed[timed] += need
    whole = sum(times.values())
    scale = min(seconds / whole, 1.0) if whole else 0.0
    for module, took in times.items():
        yield module, took * scale, needed[module]
    left = seconds - whole * scale
    if left > _NOISE * seconds:
        yield None, left, needed[None]


def _of_phases(profile: Profile) -> _Stretches:
    """The phases of a step as its clean steps tell. What is in none of them is `other`."""
    steps = [(step.seconds, step.phases) for step in profile.steps if step.is_typical and step.seconds is not None and step.phases]
    told: defaultdict[str, list[float]] = defaultdict(list)
    for seconds, phases in steps:
        apart = {name: took for name, took in phases.items() if name not in _WITHIN_FORWARD}
        rest = seconds - sum(apart.values())
        if rest > _NOISE * seconds:
            apart["other"] = apart.get("other", 0.0) + rest
        for name, took in apart.items():
            told[name].append(took)
    # Of a phase that only some steps have, as an optimizer that waits for gradients to add up, the others have nothing.
    stretches = {name: statistics.median([*took, *[0.0] * (len(steps) - len(took))]) for name, took in told.items()}
    return _Stretches(stretches, _by_pass({(name, phase): work.own_seconds for name, phase, work in _works(profile)}))


def _of_device(profile: Profile) -> _Stretches | None:
    """What a traced device did, its kernels by what asked for them; `None` without a trace that tells."""
    trace = profile.trace
    if trace is None or trace.device_compute_seconds is None:
        return None
    inclusive = _by_pass({(name, phase): work.device_seconds for name, phase, work in _works(profile)})
    kernels = {name: inclusive.get(("", name), 0.0) for name in ("forward", "backward", "optimizer", "other")}
    whole = sum(kernels.values())
    computing = trace.device_compute_seconds
    factor = computing / whole if whole else 0.0  # kernels are told by step, and on streams that overlap
    apart = {"communication": trace.exposed_comm_seconds, "copy": trace.exposed_copy_seconds, "idle": trace.device_idle_seconds}
    own = {place: took * factor for place, took in inclusive.items()}
    for (name, when), took in inclusive.items():
        if name and (above := (name.rpartition(".")[0], when)) in own:
            own[above] = max(own[above] - took * factor, 0.0)
    stretches = {name: took * factor for name, took in kernels.items()} if factor else {_WHOLE: computing}
    return _Stretches(stretches | {name: took or 0.0 for name, took in apart.items()}, own)


def _works(profile: Profile) -> Iterator[tuple[str, Phase, Work]]:
    return ((name, phase, module.work(phase)) for name, module in profile.modules.items() for phase in PHASES)


def _by_pass(spreads: Mapping[tuple[str, Phase], Spread | None]) -> dict[tuple[str, str], float]:
    """Medians by module, those of the phases of one pass added up; the unknown left out."""
    passes: Mapping[str, str] = {phase: name for name, phases in _PASSES.items() for phase in phases}
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (name, phase), spread in spreads.items():
        if spread is not None:
            seconds[name, passes.get(phase, phase)] += spread.median
    return dict(seconds)

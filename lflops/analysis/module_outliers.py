"""Find modules that are much slower than other modules that do the same work in the same place.

An example is a single slow layer in a stack of identical layers. Modules are in the same place if
their names only differ in an index, such as `layers.3.mlp` and `layers.4.mlp`.

A module is flagged if its excess time over the other modules is larger than three limits: a
threshold, the noise, and the time that other processes took. If the excess time is above the
threshold but below another limit, the module is not flagged, and a caveat gives the reason.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from lflops.analysis.step_times import lost_share, uncontended_phases
from lflops.profile.module_names import parent_of
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import ModuleProfile, Profile
from lflops.profile.records import PASS_PHASES, Phase
from lflops.profile.series import ratio, robust_deviation

OutlierCaveat = Literal["busy", "few_steps", "varied", "scaled", "allocating"]
"""Reasons why lflops cannot decide whether a module is slow.

* `busy`: other processes used the CPU.
* `few_steps`: there are too few module-timing steps.
* `varied`: the module-timing steps vary too much.
* `scaled`: the hooks that time modules changed the times too much.
* `allocating`: the module's kernels are as short as the kernels of identical modules, but the host
  waits for the driver to allocate memory.
"""

_LEAST_MODULES = 3
_LEAST_STEPS = 5
_LEAST_RATIO = 1.2
# Smallest excess time, as a share of the step.
_LEAST_SHARE = 0.02
# Share of the CPU time that other processes must take to explain why times vary.
_BUSY = 0.05
# Smallest excess time, as a multiple of its error. One module in 30,000 exceeds it by chance.
_REACH = 4.0
# A submodule explains an outlier if it has at least this share of the outlier's excess time.
_MOST_OF = 0.7

# Beginnings of the names of driver calls that allocate or free memory.
_ALLOCATES = (
    "cudaMalloc",
    "cudaFree",
    "hipMalloc",
    "hipFree",
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
)


class Outlier(Struct, frozen=True, kw_only=True):
    """A module that is slower than identical modules.

    Identical modules do the same work and have the same pattern, such as `layers.*.mlp`.

    Attributes:
        others: Number of other identical modules.
        seconds: Time of the module in forward and backward, including submodules.
        usual_seconds: Median time of all identical modules, in seconds.
    """

    module: str
    others: int
    seconds: float
    usual_seconds: float

    @property
    def excess(self) -> float:
        """Seconds by which the module takes longer than `usual_seconds`."""
        return self.seconds - self.usual_seconds


class Outliers(NamedTuple):
    """The modules that are slower than identical modules.

    Attributes:
        found: The slow modules, the largest excess time first.
        caveat: Reason why another module that seems slow was not flagged, or `None`.
    """

    found: tuple[Outlier, ...] = ()
    caveat: OutlierCaveat | None = None


def outliers(
    profile: Profile,
    patterns: Mapping[str, str],
    identical: Mapping[str, int],
    below: Mapping[str, Sequence[str]],
    step: float | None,
) -> Outliers:
    """Find modules that are slower than identical modules.

    If a submodule explains why a module is slow, only the submodule is returned.

    Args:
        profile: The profile.
        patterns: Pattern of each module, such as `layers.*.mlp`, keyed by module name.
        identical: A number for each module. Modules with the same number do the same work.
        below: Names of the modules directly below each module.
        step: Mean duration of an unprofiled step in seconds. If `None`, no outliers are found.
    """
    if not step:
        return Outliers()
    circumstances = _Circumstances(profile, step)
    found: dict[str, Outlier] = {}
    excesses: dict[str, float] = {}
    largest_doubtful = 0.0
    caveat: OutlierCaveat | None = None
    for names in _identical_modules(patterns, identical):
        times = _times(profile, names)
        if not times:
            continue
        usual = statistics.median(time.seconds for time in times.values())
        for name, time in times.items():
            excess = time.seconds - usual
            is_slow = time.seconds >= _LEAST_RATIO * usual and excess >= _LEAST_SHARE * step
            if not usual or not is_slow:
                continue
            others = [other for other in times.values() if other is not time]
            reason = circumstances.caveat(time, others, excess)
            if reason is None:
                excesses[name] = excess
                found[name] = Outlier(
                    module=name, others=len(names) - 1, seconds=time.seconds, usual_seconds=usual
                )
            elif excess >= largest_doubtful:
                largest_doubtful = excess
                caveat = reason
    deepest = [found[name] for name in explaining(excesses, below)]
    return Outliers(tuple(sorted(deepest, key=lambda outlier: -outlier.excess)), caveat)


def _identical_modules(
    patterns: Mapping[str, str], identical: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yield groups of modules that do the same work and have the same pattern.

    Groups that are too small for a comparison are left out.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name, pattern in patterns.items():
        if pattern != name:
            groups.setdefault((pattern, identical[name]), []).append(name)
    for names in groups.values():
        if len(names) >= _LEAST_MODULES:
            yield names


class _Time(NamedTuple):
    """The time of a module in forward and backward.

    Attributes:
        seconds: The time in seconds.
        error: Standard error of `seconds`, in seconds.
        steps: Number of timed steps.
        kernels: Seconds in which the module's kernels ran on the device.
    """

    seconds: float
    error: float
    steps: int
    kernels: float


class _Circumstances:
    """Circumstances of a run that can make a module seem slow, such as a busy CPU."""

    def __init__(self, profile: Profile, step: float) -> None:
        self._step = step
        # If it is known how long other threads used the CPU core, module times already exclude this
        # time.
        self._lost = 0.0 if uncontended_phases(profile) else lost_share(profile)
        self._is_scaled = are_times_far_off(profile.notes)
        self._allocating = allocating(profile)

    def caveat(self, time: _Time, others: Sequence[_Time], excess: float) -> OutlierCaveat | None:
        """Return the reason why it is uncertain that a module is slow, or `None` if it is certain.

        Args:
            time: The time of the module.
            others: The times of identical modules.
            excess: Seconds by which the module takes longer than the median.
        """
        is_noise = excess <= _noise(time, others)
        if self._lost >= excess / self._step or (is_noise and self._lost >= _BUSY):
            return "busy"
        if time.steps < _LEAST_STEPS:
            return "few_steps"
        if is_noise:
            return "varied"
        if self._is_scaled:
            return "scaled"
        usual_kernels = statistics.median(other.kernels for other in (time, *others))
        if self._allocating >= excess and time.kernels < _LEAST_RATIO * usual_kernels:
            return "allocating"
        return None


def _times(profile: Profile, names: Sequence[str]) -> dict[str, _Time]:
    """Return the time of each module in forward and backward, so that modules can be compared.

    If a phase was not timed in one of the modules, the phase is left out for all of them. For
    example, recomputation in fused attention is a part of the backward kernel, so it is not timed.
    """
    modules = [profile.modules[name] for name in names]
    phases = []
    for phase in PASS_PHASES:
        if all(module.work(phase).seconds is not None for module in modules):
            phases.append(phase)
    if not phases:
        return {}
    times = {}
    for name, module in zip(names, modules, strict=True):
        times[name] = _time(module, phases)
    return times


def _time(module: ModuleProfile, phases: Sequence[Phase]) -> _Time:
    """Add up the times of a module in some phases. Kernels of all phases are included."""
    seconds = 0.0
    error = 0.0
    steps = []
    kernels = []
    for phase in PASS_PHASES:
        work = module.work(phase)
        if work.device_seconds:
            kernels.append(work.device_seconds.median)
        if work.seconds is not None and phase in phases:
            seconds += work.seconds.median
            error += work.seconds.error or 0.0
            steps.append(work.seconds.n)
    return _Time(seconds, error, min(steps), sum(kernels))


def allocating(profile: Profile) -> float:
    """Return the seconds per traced step in which the driver allocates or frees memory.

    The result is 0 if nothing was traced.
    """
    if profile.trace is None:
        return 0.0
    seconds = 0.0
    for operator in profile.trace.operators:
        if operator.name.startswith(_ALLOCATES):
            seconds += operator.self_host_seconds
    return ratio(seconds, profile.traced_steps) or 0.0


def _noise(time: _Time, others: Sequence[_Time]) -> float:
    """Return by how many seconds a module can exceed identical modules by chance.

    This follows from the error of the module's time, and from the errors and the scatter of the
    times of the other modules.
    """
    scatter = robust_deviation([other.seconds for other in others])
    error = max(time.error, statistics.median(other.error for other in others))
    return _REACH * math.hypot(error, scatter)


def explaining(excesses: Mapping[str, float], below: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the slow modules, but not both a slow module and a slow module inside it.

    The inner module is returned if it has most of the outer module's excess time. Otherwise, the
    outer module is returned.

    Args:
        excesses: Excess time of each slow module, in seconds.
        below: Names of the modules directly below each module.
    """
    found: dict[str, None] = {}
    for name in excesses:
        if parent_of(name) not in excesses:
            found[_deepest(name, excesses, below)] = None
    return list(found)


def _deepest(name: str, excesses: Mapping[str, float], below: Mapping[str, Sequence[str]]) -> str:
    """Return the deepest submodule that explains why a module is slow, or the module itself."""
    least = _MOST_OF * excesses[name]
    inner = [child for child in below[name] if excesses.get(child, -math.inf) >= least]
    if not inner:
        return name
    return _deepest(max(inner, key=excesses.__getitem__), excesses, below)

"""Modules that take much longer than the others at their place, which do the same work.

One slow layer of a stack.

A module is accused where its excess is above the threshold, the noise, and what other processes
took. Otherwise a large excess is a doubt.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from lflops.analysis.step_times import lost_share, without_others
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES
from lflops.profile.series import grouped

Doubt = Literal["busy", "few_steps", "varied", "scaled", "allocating"]
"""Why no one can tell whether a module is slow.

Other processes had the CPU, too few hooked steps, hooked steps that vary too much, or
times that had to be scaled too much. `allocating`: its kernels are as short as its equals', and
modules wait for the driver's memory.
"""

_LEAST_MODULES = 3
# the fewest hooked steps that a module is accused by
_LEAST_STEPS = 5
_LEAST_RATIO = 1.2
# the least excess, as a share of the step
_LEAST_SHARE = 0.02
# the share of CPU time that other processes took, from which they are why times vary
_BUSY = 0.05
_REACH = (
    # how many of its errors an excess has to be: chance is beyond that once in 30,000 modules
    4.0
)
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
# a module below explains an outlier if it has this share of its excess
_MOST_OF = 0.7


class Outlier(Struct, frozen=True, kw_only=True):
    """A module that is slower than its repeats."""

    module: str
    # how many others do the same work at its place
    others: int
    # of forward and backward, with all below it
    seconds: float
    # the median of all at its place
    usual_seconds: float

    @property
    def excess(self) -> float:
        """Seconds beyond the median."""
        return self.seconds - self.usual_seconds


class Outliers(NamedTuple):
    """The outliers, the largest excess first; and why others may be among what is not known."""

    found: tuple[Outlier, ...] = ()
    doubt: Doubt | None = None


def outliers(
    profile: Profile,
    patterns: Mapping[str, str],
    identical: Mapping[str, int],
    below: Mapping[str, Sequence[str]],
    step: float | None,
) -> Outliers:
    """The outliers; of a block and a part of it that explains it, the part.

    `identical` has a number for each module, the same for modules that do the same work, and
    `below` the names directly below each. `step` are the seconds of a clean step: without them
    nothing is found.
    """
    if not step:
        return Outliers()
    groups = grouped(
        (name for name in patterns if patterns[name] != name),
        lambda name: (patterns[name], identical[name]),
    )
    lost = (
        0.0 if without_others(profile) else lost_share(profile)
        # in the times of modules, or none of it
    )
    far_off: Doubt | None = "scaled" if are_times_far_off(profile.notes) else None
    waited = allocating(profile)
    found: dict[str, Outlier] = {}
    doubts: dict[float, Doubt] = {}
    for names in groups.values():
        times = _times(profile, names) if len(names) >= _LEAST_MODULES else {}
        usual = statistics.median(each.seconds for each in times.values()) if times else 0.0
        for name, each in times.items():
            excess = each.seconds - usual
            if not usual or each.seconds < _LEAST_RATIO * usual or excess < _LEAST_SHARE * step:
                continue
            noise = _noise(each, [other for other in times.values() if other is not each])
            doubt = (
                _doubt(each.steps, is_noise=excess <= noise, lost=lost, share=excess / step)
                or far_off
            )
            if waited >= excess and each.kernels < _LEAST_RATIO * statistics.median(
                other.kernels for other in times.values()
            ):
                doubt = doubt or "allocating"
            if doubt is None:
                found[name] = Outlier(
                    module=name, others=len(names) - 1, seconds=each.seconds, usual_seconds=usual
                )
            else:
                doubts[excess] = doubt
    deepest = [
        found[name]
        for name in explaining({name: each.excess for name, each in found.items()}, below)
    ]
    return Outliers(
        tuple(sorted(deepest, key=lambda each: -each.excess)),
        doubts[max(doubts)] if doubts else None,
    )


class _Time(NamedTuple):
    """A module's seconds of forward and backward, the error of that, from how many steps it is, and the seconds of its kernels."""

    seconds: float
    error: float
    steps: int
    kernels: float


def _times(profile: Profile, names: Sequence[str]) -> dict[str, _Time]:
    """Add up the phases that all of them have a time in.

    A fused attention's recompute has calls and none: it is within backward.
    """
    spreads = {
        phase: [profile.modules[name].work(phase).seconds for name in names]
        for phase in PASS_PHASES
    }
    known = [
        [each for each in of_all if each is not None]
        for of_all in spreads.values()
        if None not in of_all
    ]
    kernels = {
        name: sum(
            spread.median
            for phase in PASS_PHASES
            if (spread := profile.modules[name].work(phase).device_seconds)
        )
        for name in names
    }
    return {
        name: _Time(
            sum(each.median for each in of_one),
            sum(each.error or 0.0 for each in of_one),
            min(each.n for each in of_one),
            kernels[name],
        )
        for name, *of_one in zip(names, *known, strict=True)
        if of_one
    }


def allocating(profile: Profile) -> float:
    """Seconds of a traced step in which the host waits for the driver to give memory, or to take it back."""
    trace = profile.trace
    if trace is None:
        return 0.0
    seconds = sum(
        each.self_host_seconds for each in trace.operators if each.name.startswith(_ALLOCATES)
    )
    return (trace.per_batch(seconds) or 0.0) * (profile.run.accumulation or 1)


def _noise(time: _Time, others: Sequence[_Time]) -> float:
    """The least excess that is more than chance, given the module's spread, that of the others, and the scatter among them."""
    middle = statistics.median(each.seconds for each in others)
    scatter = 1.4826 * statistics.median(abs(each.seconds - middle) for each in others)
    return _REACH * math.hypot(
        max(time.error, statistics.median(each.error for each in others)), scatter
    )


def _doubt(steps: int, *, is_noise: bool, lost: float, share: float) -> Doubt | None:
    """Why an excess proves nothing.

    The shares are of the step: what other processes took, and the excess.
    """
    if lost >= share or (is_noise and lost >= _BUSY):
        return "busy"
    if steps < _LEAST_STEPS:
        return "few_steps"
    return "varied" if is_noise else None


def explaining(excesses: Mapping[str, float], below: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the uppermost of these modules, which take too long, or the parts of them that explain it."""
    return list(
        dict.fromkeys(
            _deepest(name, excesses, below)
            for name in excesses
            if name.rpartition(".")[0] not in excesses
        )
    )


def _deepest(name: str, excesses: Mapping[str, float], below: Mapping[str, Sequence[str]]) -> str:
    """The module itself, or what explains it below."""
    inner = [
        each
        for each in below[name]
        if each in excesses and excesses[each] >= _MOST_OF * excesses[name]
    ]
    return _deepest(max(inner, key=excesses.__getitem__), excesses, below) if inner else name

"""Predict how long a measured step would take after a change.

The mean unprofiled step is divided into its phases. A change subtracts seconds from phases, or
multiplies them by a factor. Every change has an error, which is a share of the changed time. On a
device, one wait can hide another wait, which appears when the first wait is removed. So removing
communication might not save its full time.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import hypot
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from lflops.analysis.step_breakdown import IN_MODULES, step_breakdown
from lflops.analysis.step_times import VERY_BUSY, StepTimes, lost_share, step_times
from lflops.analysis.utilization import seconds_at_peak
from lflops.errors import ProfileError
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of
from lflops.profile.module_names import ancestry
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES, median_of
from lflops.profile.series import ratio, without_none

ERRORS: Mapping[str, float] = {
    "phase": 0.1,
    "module": 0.25,
    "recompute": 0.25,
    "scaled": 0.15,
    "batch": 0.25,
}
"""Relative error of a prediction, keyed by the kind of change.

The kinds are a removed phase, a removed module, removed recomputation, a scaled time, and another
batch size.
"""

STEP_ERROR = 0.03
"""Relative error that is always included: the usual difference between two equal runs."""

MUCH_IDLE = 0.2
"""If a device is idle for at least this share of the step, the host limits the step."""

# Names in `without` and `scale` that are not phases.
_RECOMPUTE = "recompute"
_COMMUNICATION = "communication"
# Phases with a time that does not depend on the batch size.
_ONCE = ("optimizer", "clip", "sync")

WhatIfCaveat = Literal["busy", "modules", "idle"]


class WhatIf(Struct, frozen=True, kw_only=True):
    """The predicted time of a step after changes.

    Attributes:
        measured: Mean duration of an unprofiled step before the changes, in seconds.
        seconds: Predicted duration of the changed step, in seconds. The true value is likely
            between `low` and `high`.
        phases: Seconds of each phase of the changed step.
        caveats: Reasons why the prediction is unreliable. `busy`: other processes took much of the
            CPU time. `modules`: the change refers to modules, and the times of modules are
            approximate. `idle`: the device is idle, and the idle time might change a lot, for
            example with another batch size.
    """

    measured: float
    seconds: float
    low: float
    high: float
    phases: Mapping[str, float]
    caveats: tuple[WhatIfCaveat, ...] = ()


class _Phase(NamedTuple):
    """The predicted seconds of a phase, and the error of this prediction in seconds."""

    seconds: float
    error: float = 0.0

    def times(self, factor: float, error: float) -> "_Phase":
        """Multiply the seconds by a factor that has an absolute error of `error`."""
        return _Phase(self.seconds * factor, hypot(self.error * factor, self.seconds * error))

    def minus(self, seconds: float, error: float) -> "_Phase":
        """Subtract seconds that have a relative error of `error`."""
        return _Phase(max(self.seconds - seconds, 0.0), hypot(self.error, seconds * error))


def what_if(
    profile: Profile,
    *,
    without: str | Iterable[str] = (),
    scale: Mapping[str, float] | None = None,
    batch: float = 1.0,
    accumulation: int | None = None,
    hardware: Hardware | str | None = None,
) -> WhatIf:
    """Predict the time of a measured step after changes, with an interval.

    Args:
        profile: A profile with times, of a training run or of `lflops.measure`.
        without: Names of parts of the step whose time is removed: a phase such as `data`, a module
            with its submodules, `recompute`, or `communication` (only where it does not overlap
            with computation).
        scale: Factors by which the times of phases or modules are multiplied, keyed by name. With
            0.5, a phase is twice as fast.
        batch: Factor by which the number of samples is multiplied.
        accumulation: Number of batches to accumulate gradients over.
        hardware: Another chip that the step runs on, as in `utilization`. The chip of the profile
            must be known.

    Raises:
        ProfileError: An argument is invalid, or the profile does not have the time that an argument
            names.
        HardwareError: The chip is unknown.
    """
    times = step_times(profile)
    if not times.mean or times.seconds is None:
        raise ProfileError(
            "what_if: the profile has no step that was timed while nothing was profiled: "
            "pass a profile of a training run, or of lflops.measure"
        )
    removed = [without] if isinstance(without, str) else without
    factors = {**dict.fromkeys(removed, 0.0), **(scale or {})}
    _check_overlap(profile, factors)
    step = _ChangedStep(profile, times)
    for name, factor in factors.items():
        if not _is_number(factor):
            raise ProfileError(
                f"what_if: scale[{name!r}]={factor!r}: pass a factor of at least 0 for the time of "
                f"{name!r}"
            )
        step.scale(name, factor)
    if hardware is not None:
        step.change_chip(hardware)
    if not _is_number(batch) or not batch:
        raise ProfileError(
            f"what_if: batch={batch!r}: pass a factor above 0 for the number of samples"
        )
    step.repeat(batch, ERRORS["batch"])
    if accumulation is not None:
        is_whole = _is_number(accumulation) and accumulation == int(accumulation)
        if not is_whole or accumulation < 1:
            raise ProfileError(
                f"what_if: accumulation={accumulation!r}: pass a whole number, at least 1"
            )
        step.repeat(accumulation / (profile.run.accumulation or 1), ERRORS["phase"])

    phases = {name: phase.seconds for name, phase in step.phases.items()}
    seconds = sum(phases.values())
    errors = [phase.error for phase in step.phases.values()]
    error = hypot(*errors, times.seconds.error or 0.0, STEP_ERROR * seconds)
    is_resized = batch != 1 or hardware is not None or _RECOMPUTE in factors
    return WhatIf(
        measured=times.mean,
        seconds=seconds,
        low=max(seconds - error, 0.0),
        high=seconds + error + step.may_stay,
        phases=phases,
        caveats=tuple(step.caveats(is_resized=is_resized)),
    )


def _check_overlap(profile: Profile, names: Collection[str]) -> None:
    """Raise an error if a module and one of its submodules are both named."""
    for name in names:
        for outer in ancestry(name)[1:]:
            if outer in names and outer in profile.modules:
                raise ProfileError(
                    f"what_if: {name!r} is inside {outer!r}: pass only one of the two"
                )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < float("inf")


class _ChangedStep:
    """The phases of a step, and methods that apply changes to them.

    Attributes:
        phases: The phases after the changes so far.
        may_stay: Seconds of removed communication that are possibly not saved, because another wait
            might take their place.
    """

    def __init__(self, profile: Profile, times: StepTimes) -> None:
        parts = times.parts or {"other": times.mean or 0.0}
        self.phases = {name: _Phase(seconds) for name, seconds in parts.items()}
        self.may_stay = 0.0
        self._profile = profile
        self._times = times
        self._uses_module_times = False

    def scale(self, name: str, factor: float) -> None:
        """Multiply the time of a phase, of a module, of recomputation or of communication."""
        if name in self.phases:
            error = ERRORS["phase"] if factor == 0 else ERRORS["scaled"]
            self.phases[name] = self.phases[name].times(factor, error * abs(factor - 1))
        elif name == _RECOMPUTE:
            seconds = self._recompute_seconds() * (1 - factor)
            self._subtract("backward", seconds, ERRORS["recompute"])
        elif name == _COMMUNICATION:
            seconds = self._exposed_communication() * (1 - factor)
            self._subtract("backward", seconds, ERRORS["phase"])
            self.may_stay += max(seconds, 0.0)
        elif name in self._profile.modules:
            self._scale_module(name, factor)
        else:
            known = ", ".join([*self.phases, _RECOMPUTE, _COMMUNICATION])
            raise ProfileError(
                f"what_if: {name!r} is not part of this profile: "
                f"pass the name of a module, or one of {known}"
            )

    def caveats(self, *, is_resized: bool) -> Iterator[WhatIfCaveat]:
        """Yield the reasons why the prediction is unreliable.

        `is_resized` is true if a change may also change how long the device is idle, such as
        another batch size or another chip.
        """
        if lost_share(self._profile) >= VERY_BUSY:
            yield "busy"
        if self._uses_module_times and are_times_far_off(self._profile.notes):
            yield "modules"
        if is_resized:
            breakdown = step_breakdown(self._profile, chip_of(self._profile, None), self._times)
            if breakdown is not None and breakdown.parts.get("idle", 0.0) >= MUCH_IDLE:
                yield "idle"

    def repeat(self, factor: float, error: float) -> None:
        """Multiply the times of all phases that depend on the number or the size of the batches.

        Other phases, such as the optimizer, run once per step and keep their times.
        """
        for name, phase in self.phases.items():
            if name not in _ONCE:
                self.phases[name] = phase.times(factor, error * abs(factor - 1))

    def change_chip(self, hardware: Hardware | str) -> None:
        """Convert the times of forward, backward and the optimizer to another chip.

        Ideal compute and recomputation change with the peaks of the chips, and memory-bound time
        changes with the bandwidths. It is unknown how much the rest of the time changes, for
        example in inefficient kernels, so the interval of the prediction becomes wide.
        """
        old = chip_of(self._profile, None)
        new = chip_of(self._profile, hardware)
        breakdown = step_breakdown(self._profile, old, self._times)
        speed = old and old.bandwidth_bytes_per_second
        new_speed = new and new.bandwidth_bytes_per_second
        if old is None or new is None or breakdown is None or not speed or not new_speed:
            raise ProfileError(
                "what_if: hardware= needs the peak FLOP/s and the bandwidths of the profiled chip "
                "and of the new chip, and a profile in which operators were counted"
            )
        moving = speed / new_speed
        after = seconds_at_peak(self._profile.op_counts, new)
        if after is None:
            raise ProfileError(
                f"what_if: hardware={new.name!r}: this chip has no known peak for one of the "
                "dtypes that the matmuls use"
            )
        before = seconds_at_peak(self._profile.op_counts, old)
        computing = after / before if before else moving

        shares = {name: breakdown.parts.get(name, 0.0) for name in IN_MODULES}
        total = sum(shares.values())
        if total:
            needed = (shares["ideal_compute"] + shares["recompute"]) * computing
            needed += shares["memory_bound"] * moving
            rest = shares["inefficient_kernels"]
            low = (needed + rest * min(computing, moving)) / total
            high = (needed + rest * max(computing, moving, 1.0)) / total
            for name in PASSES:
                self._scale_between(name, low, high)
            self._scale_between("optimizer", min(moving, 1.0), max(moving, 1.0))

    def _scale_between(self, name: str, low: float, high: float) -> None:
        if name in self.phases:
            self.phases[name] = self.phases[name].times((low + high) / 2, (high - low) / 2)

    def _subtract(self, name: str, seconds: float, error: float) -> None:
        if name in self.phases:
            self.phases[name] = self.phases[name].minus(seconds, error)

    def _scale_module(self, name: str, factor: float) -> None:
        self._uses_module_times = True
        module = self._profile.modules[name]
        if module.forward.seconds is None and module.backward.seconds is None:
            raise ProfileError(
                f"what_if: the module {name!r} was not timed: pass the name of a timed module"
            )
        error = ERRORS["module"] if factor < 1 else ERRORS["scaled"]
        for name_of_pass, phases in PASSES.items():
            medians = without_none(median_of(module.work(phase).seconds) for phase in phases)
            self._subtract(name_of_pass, sum(medians) * (1 - factor), error)
        optimizer = self.phases.get("optimizer")
        all_parameters = self._profile.modules[""].trainable_parameters
        if factor == 0 and optimizer and all_parameters:
            seconds = optimizer.seconds * module.trainable_parameters / all_parameters
            self._subtract("optimizer", seconds, error)

    def _recompute_seconds(self) -> float:
        """Return the seconds per step in which activations are recomputed.

        If they were not measured, they are estimated from the share of backward's FLOPs that are
        recomputed.
        """
        root = self._profile.modules[""]
        if root.recompute.seconds is not None:
            self._uses_module_times = True
            return root.recompute.seconds.median
        flops = root.backward.flops + root.recompute.flops
        if not flops:
            return 0.0
        return self._times.parts.get("backward", 0.0) * root.recompute.flops / flops

    def _exposed_communication(self) -> float:
        """Return the seconds per step in which communication does not overlap with computation."""
        trace = self._profile.trace
        if trace is not None:
            exposed = ratio(trace.exposed_comm_seconds, self._profile.traced_steps)
            if exposed is not None:
                return exposed
        known = without_none(each.exposed_seconds for each in self._profile.communication)
        waiting = self._times.waiting or 0.0
        if not known and not waiting:
            raise ProfileError(
                "what_if: the communication of this run was not timed: "
                "pass a profile that has several ranks and a trace"
            )
        return max(sum(known), waiting)

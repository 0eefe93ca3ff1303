"""What a measured step would take after a change: a pure function of its profile.

The mean clean step is divided into its phases. A change takes seconds from phases, or multiplies
them. Each has an error, a share of what changes. On a device a wait that goes may uncover another
one: exposed communication may stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import hypot
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from lflops.analysis.step_breakdown import IN_MODULES, budget
from lflops.analysis.step_times import VERY_BUSY, StepTimes, lost_share, step_times
from lflops.errors import ProfileError
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of, peak_of
from lflops.profile.module_names import ancestry
from lflops.profile.notes import are_times_far_off
from lflops.profile.profile import Profile
from lflops.profile.records import PASSES

ERRORS: Mapping[str, float] = {
    "phase": 0.1,
    "module": 0.25,
    "recompute": 0.25,
    "scaled": 0.15,
    "batch": 0.25,
}
"""The error of a change as a share of it.

A phase or module that goes, what is recomputed, what is multiplied, a larger batch.
"""

# of a step, from one run of the same code to the next
STEP_ERROR = 0.03
# of the step: the host limits it
MUCH_IDLE = 0.2
# parts that are no phase
RECOMPUTE, COMMUNICATION = "recompute", "communication"
# phases that do not grow with the batch
_ONCE = ("optimizer", "clip", "sync")


Doubt = Literal["busy", "modules", "idle"]


class WhatIf(Struct, frozen=True, kw_only=True):
    """The time of a step after changes."""

    # seconds of the mean clean step, unchanged
    measured: float
    # of the changed step, between `low` and `high`
    seconds: float
    low: float
    high: float
    # the seconds of its phases
    phases: Mapping[str, float]
    # Why its times are no measure. Others had much of the CPU; modules, of which one is asked for,
    # were timed roughly; a device is idle, which other batches and fewer launches change most.
    doubts: tuple[Doubt, ...] = ()


class _Phase(NamedTuple):
    """Seconds with their error."""

    seconds: float
    error: float = 0.0

    def times(self, factor: float, error: float) -> "_Phase":
        return _Phase(self.seconds * factor, hypot(self.error * factor, self.seconds * error))


def what_if(
    profile: Profile,
    *,
    without: str | Iterable[str] = (),
    scale: Mapping[str, float] | None = None,
    batch: float = 1.0,
    accumulation: int | None = None,
    hardware: Hardware | str | None = None,
) -> WhatIf:
    """Answer what a measured step would take after changes, as an interval.

    Args:
        profile: Of a training or of `lflops.measure`, with times.
        without: What would be gone: a phase, as `data`; a module with all below it; `recompute`, or
            `communication` that is exposed.
        scale: By phase or module, how many times as long it would take: 0.5 is twice as fast.
        batch: How many times as many samples.
        accumulation: Batches over which gradients would be accumulated.
        hardware: Another chip, as in `utilization`. The profile's own has to be known.

    Raises:
        ProfileError: An argument is wrong, or the profile lacks the time that it names.
        HardwareError: The chip is unknown.
    """
    times = step_times(profile)
    if not times.mean or times.seconds is None:
        raise ProfileError(
            "what_if: the profile has no undisturbed step: give one of a training, or of lflops.measure"
        )
    step = _Changed(profile, times)
    names = {
        **dict.fromkeys([without] if isinstance(without, str) else without, 0.0),
        **(scale or {}),
    }
    for name in names:
        outer = next(
            (
                other
                for other in names
                if other != name and other in ancestry(name) and name in profile.modules
            ),
            None,
        )
        if outer is not None:
            raise ProfileError(f"what_if: {name!r} is in {outer!r}: give one of the two")
    for name, factor in names.items():
        if not _is_number(factor):
            raise ProfileError(
                f"what_if: scale[{name!r}]={factor!r}: give how many times as long it takes, 0 or more"
            )
        step.change(name, factor)
    if hardware is not None:
        step.move(hardware)
    if not _is_number(batch) or not batch:
        raise ProfileError(
            f"what_if: batch={batch!r}: give how many times as many samples, more than 0"
        )
    if accumulation is not None and not (
        _is_number(accumulation) and accumulation >= 1 and accumulation == int(accumulation)
    ):
        raise ProfileError(
            f"what_if: accumulation={accumulation!r}: give a whole number, at least 1"
        )
    batches = 1.0 if accumulation is None else accumulation / (profile.run.accumulation or 1)
    step.repeat(batch, ERRORS["batch"])
    step.repeat(batches, ERRORS["phase"])
    seconds = sum(phase.seconds for phase in step.phases.values())
    error = hypot(
        *(phase.error for phase in step.phases.values()),
        (times.seconds.error or 0.0),
        STEP_ERROR * seconds,
    )
    return WhatIf(
        measured=times.mean,
        seconds=seconds,
        low=max(seconds - error, 0.0),
        high=seconds + error + step.may_stay,
        phases={name: phase.seconds for name, phase in step.phases.items()},
        doubts=tuple(step.doubts(resized=batch != 1 or hardware is not None or RECOMPUTE in names)),
    )


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    )


class _Changed:
    """The phases of a step, which changes change."""

    def __init__(self, profile: Profile, times: StepTimes) -> None:
        self._profile, self._times = profile, times
        self.phases = {
            name: _Phase(seconds)
            for name, seconds in (times.parts or {"other": times.mean or 0.0}).items()
        }
        self._asks_modules = False
        # seconds that go only if nothing else takes their place
        self.may_stay = 0.0

    def change(self, name: str, factor: float) -> None:
        """Let a phase, a module or a part take `factor` times as long."""
        if name in self.phases:
            self.phases[name] = self.phases[name].times(
                factor, ERRORS["phase" if factor == 0 else "scaled"] * abs(factor - 1)
            )
        elif name == RECOMPUTE:
            self._less("backward", self._recomputed() * (1 - factor), ERRORS["recompute"])
        elif name == COMMUNICATION:
            self._communicate(factor)
        elif name in self._profile.modules:
            self._module(name, factor)
        else:
            known = ", ".join([*self.phases, RECOMPUTE, COMMUNICATION])
            raise ProfileError(
                f"what_if: {name!r} is no part of this profile: give a module's name, or one of {known}"
            )

    def doubts(self, *, resized: bool) -> Iterator[Doubt]:
        """Why the times that it rests on are no measure."""
        if lost_share(self._profile) >= VERY_BUSY:
            yield "busy"
        if self._asks_modules and are_times_far_off(self._profile.notes):
            yield "modules"
        divided = (
            budget(self._profile, chip_of(self._profile, None), self._times) if resized else None
        )
        if divided is not None and divided.parts.get("idle", 0.0) >= MUCH_IDLE:
            yield "idle"

    def repeat(self, factor: float, share: float) -> None:
        """Let everything but the optimizer run so many times."""
        error = share * abs(factor - 1)
        self.phases = {
            name: phase if name in _ONCE else phase.times(factor, error)
            for name, phase in self.phases.items()
        }

    def move(self, hardware: Hardware | str) -> None:
        """Run modules and the optimizer on another chip.

        What is slower than this one allows may stay as long.
        """
        profile, old, new = (
            self._profile,
            chip_of(self._profile, None),
            chip_of(self._profile, hardware),
        )
        parts = budget(profile, old, self._times)
        if (
            old is None
            or new is None
            or parts is None
            or not (old.bandwidth_bytes_per_second and new.bandwidth_bytes_per_second)
        ):
            raise ProfileError(
                "what_if: hardware: the peaks and bandwidths of both chips have to be known, and the work has to be counted"
            )
        work = [each for each in profile.op_counts if each.executed_macs]
        before, after = ([peak_of(each.dtype, chip) for each in work] for chip in (old, new))
        if not all(after):
            raise ProfileError(
                f"what_if: hardware={new.name!r}: its peak is unknown for a dtype of the products"
            )
        computing = [
            sum(each.executed_macs / peak for each, peak in zip(work, peaks, strict=True) if peak)
            for peaks in (after, before)
        ]
        moving = old.bandwidth_bytes_per_second / new.bandwidth_bytes_per_second
        product = computing[0] / computing[1] if computing[1] else moving
        shares = {name: parts.parts.get(name, 0.0) for name in IN_MODULES}
        known = (shares["useful"] + shares["recompute"]) * product + shares["memory_bound"] * moving
        total, rest = sum(shares.values()), shares["below_roof"]
        ends = known + rest * min(product, moving), known + rest * max(product, moving, 1.0)
        for name in (*PASSES, "optimizer"):
            if name in self.phases and total:
                low, high = (
                    (min(moving, 1.0), max(moving, 1.0))
                    if name == "optimizer"
                    else (each / total for each in ends)
                )
                self.phases[name] = self.phases[name].times((low + high) / 2, (high - low) / 2)

    def _less(self, name: str, seconds: float, share: float) -> None:
        if (phase := self.phases.get(name)) is not None:
            self.phases[name] = _Phase(
                max(phase.seconds - seconds, 0.0), hypot(phase.error, share * seconds)
            )

    def _module(self, name: str, factor: float) -> None:
        module, self._asks_modules = self._profile.modules[name], True
        if all(module.work(phase).seconds is None for phase in ("forward", "backward")):
            raise ProfileError(f"what_if: {name!r} was not timed")
        share = ERRORS["module" if factor < 1 else "scaled"]
        for name_of_pass, phases in PASSES.items():
            seconds = sum(
                spread.median
                for phase in phases
                if (spread := module.work(phase).seconds) is not None
            )
            self._less(name_of_pass, seconds * (1 - factor), share)
        root = self._profile.modules[""]
        if (
            root.trainable_parameters
            and factor == 0
            and (optimizer := self.phases.get("optimizer"))
        ):
            self._less(
                "optimizer",
                optimizer.seconds * module.trainable_parameters / root.trainable_parameters,
                share,
            )

    def _recomputed(self) -> float:
        """Seconds of a step in which activations are computed again.

        As timed, or by their share of the FLOPs of backward.
        """
        root = self._profile.modules[""]
        if root.recompute.seconds is not None:
            self._asks_modules = True
            return root.recompute.seconds.median
        flops = root.backward.flops + root.recompute.flops
        return (
            self._times.parts.get("backward", 0.0) * root.recompute.flops / flops if flops else 0.0
        )

    def _communicate(self, factor: float) -> None:
        known = [
            each.exposed_seconds
            for each in self._profile.communication
            if each.exposed_seconds is not None
        ]
        trace = self._profile.trace
        exposed = (
            None
            if trace is None or trace.exposed_comm_seconds is None
            else trace.per_batch(trace.exposed_comm_seconds)
        )
        if exposed is not None:
            seconds = exposed * (self._profile.run.accumulation or 1)
        elif known or self._times.waiting:
            seconds = max(sum(known), self._times.waiting or 0.0)
        else:
            raise ProfileError(
                "what_if: 'communication' was not timed: give a profile of several ranks with a trace"
            )
        self._less("backward", seconds * (1 - factor), ERRORS["phase"])
        self.may_stay += max(seconds * (1 - factor), 0.0)

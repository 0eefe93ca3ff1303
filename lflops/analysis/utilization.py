"""Compute MFU and HFU, which compare the rate of a step's matmuls with the chip's peak."""

import statistics
from collections.abc import Iterable

from msgspec import Struct

from lflops.analysis.step_breakdown import StepBreakdown, step_breakdown
from lflops.analysis.step_times import StepTimes, step_times
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of, name_of_peak, peak_of
from lflops.profile.profile import OpCount, Profile
from lflops.profile.records import PASS_PHASES, Phase
from lflops.profile.series import multiplied, ratio, sum_known, without_none

MODEL_PHASES: tuple[Phase, ...] = ("forward", "backward")
"""The phases whose MACs count for MFU."""

# Largest factor by which the measured time of a module can be wrong.
_PRECISION = 1.1


LEAST_EXCESS = 1e-4
"""A peak is too low only if the excess over it is at least this share of the step.

The measured time of a small module can be 0, and would exceed every peak.
"""


class Utilization(Struct, frozen=True, kw_only=True):
    """The rate at which one device ran the unprofiled steps, relative to its peak.

    `None` means unknown.

    Attributes:
        mfu: 2 x MACs of forward and backward, divided by the step time and the peak of the run's
            dtype.
        hfu: Like `mfu`, but includes the MACs of recomputation, so it is never below `mfu`.
        executed: Share of the peak at which the chip really executed matmuls. It includes
            recomputation and leaves out the MACs that kernels skip because of a mask. The MACs of
            each dtype are relative to the peak of this dtype.
        flops_per_second: 2 x MACs of forward and backward, divided by the step time.
        peak_flops_per_second: Peak of the run's dtype.
        dtype: Dtype of the peak, one of `hardware.DTYPES`.
        hardware: Name of the chip.
        breakdown: The parts into which the time of the mean step is divided.
    """

    mfu: float | None
    hfu: float | None
    executed: float | None
    flops_per_second: float | None
    peak_flops_per_second: float | None
    dtype: str | None
    hardware: str | None
    breakdown: StepBreakdown | None = None

    @property
    def is_peak_too_low(self) -> bool:
        """Return whether the step, or all modules together, ran matmuls faster than the peak.

        If so, the peak is wrong and MFU is too high.
        """
        if self.mfu is not None and self.mfu > 1:
            return True
        if self.breakdown is None or self.executed is None:
            return False
        parts = self.breakdown.parts
        at_peak = parts.get("ideal_compute", 0.0) + parts.get("recompute", 0.0)
        return self.executed > at_peak * _PRECISION + LEAST_EXCESS


def flops_per_second(macs: float, seconds: float | None) -> float | None:
    """Return the rate of matmuls, with 2 FLOPs per MAC. Return `None` if the time is unknown."""
    return ratio(2 * macs, seconds)


def of_peak(rate: float | None, peak: float | None) -> float | None:
    """Return a rate as a share of a peak, or `None` if either is unknown.

    The result is MFU if the rate counts the MACs of forward and backward. It is HFU if the rate
    also counts the MACs of recomputation.
    """
    return ratio(rate, peak)


def utilization(profile: Profile, hardware: Hardware | str | None = None) -> Utilization:
    """Compute the share of the peak that the unprofiled steps of a profile reached.

    Args:
        profile: A profile with counted work and timed steps.
        hardware: The chip, or its name in the table of chips. By default, the chip of the run.

    Raises:
        HardwareError: The table has no chip with this name.
    """
    return utilization_at(profile, chip_of(profile, hardware), step_times(profile))


def utilization_at(profile: Profile, chip: Hardware | None, times: StepTimes) -> Utilization:
    """Compute the share of a chip's peak that the unprofiled steps reached."""
    root = profile.modules[""]
    macs = sum(root.work(phase).macs for phase in MODEL_PHASES)
    share = _share_of_a_rank(profile, macs)
    seconds = times.mean if profile.op_counts else None
    rate = flops_per_second(macs * share, seconds)
    rate_with_recompute = flops_per_second((macs + root.recompute.macs) * share, seconds)
    peak = peak_of(profile.run.dtype, chip)
    executed = None
    if chip is not None:
        in_passes = [count for count in profile.op_counts if count.phase in PASS_PHASES]
        executed = ratio(multiplied(seconds_at_peak(in_passes, chip), share), seconds)
    return Utilization(
        mfu=of_peak(rate, peak),
        hfu=of_peak(rate_with_recompute, peak),
        executed=executed,
        flops_per_second=rate,
        peak_flops_per_second=peak,
        dtype=name_of_peak(profile.run.dtype, chip),
        hardware=chip.name if chip else None,
        breakdown=step_breakdown(profile, chip, times, share=share),
    )


def _share_of_a_rank(profile: Profile, macs: int) -> float:
    """Return the share of the root's MACs that a rank computes on average.

    The share is below 1 if ranks do different work, because the root's MACs then include the MACs
    of several ranks.
    """
    known = without_none(rank.macs for rank in profile.ranks)
    if not known or not macs:
        return 1.0
    return statistics.mean(known) / macs


def seconds_at_peak(op_counts: Iterable[OpCount], chip: Hardware) -> float | None:
    """Return how many seconds all matmuls together take at the peak of their dtypes.

    The work that a mask skips is left out. Return `None` if one of these peaks is unknown.
    """
    macs: dict[str, int] = {}
    for count in op_counts:
        if count.executed_macs:
            macs[count.dtype] = macs.get(count.dtype, 0) + count.executed_macs
    seconds = []
    for dtype, of_dtype in macs.items():
        seconds.append(ratio(2 * of_dtype, peak_of(dtype, chip)))
    return sum_known(seconds)

"""MFU and HFU: the rate of a step's contractions, and its share of the chip's peak.

And what the chip executed.
"""

import statistics

from msgspec import Struct

from lflops.analysis.step_breakdown import StepBreakdown, budget
from lflops.analysis.step_times import StepTimes, step_times
from lflops.hardware.chips import Hardware
from lflops.hardware.peaks import chip_of, name_of_peak, peak_of
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, Phase
from lflops.profile.series import sum_known, summed

# the phases whose MACs count for MFU
MODEL_PHASES: tuple[Phase, ...] = ("forward", "backward")
# the modules' times are no more exact than that
_BEYOND = 1.1


class Utilization(Struct, frozen=True, kw_only=True):
    """The rate of one device over the clean steps. `None` is unknown."""

    mfu: (
        float | None
        # 2 x MACs of forward and backward, over the step and the peak of the run's dtype: a share of 1
    )
    # the same with the MACs of recompute. It is never below `mfu`.
    hfu: float | None
    executed: (
        float | None
        # what the chip did: the MACs of all of these that no mask let it skip, each at its own dtype's
        # peak
    )
    # 2 x MACs of forward and backward, over the step
    flops_per_second: float | None
    # of the run's dtype
    peak_flops_per_second: float | None
    # the peak's name, one of `hardware.DTYPES`
    dtype: str | None
    # the chip's name
    hardware: str | None
    budget: StepBreakdown | None = (
        # where the rest went: named shares of peak x step time that add up to 1
        None
    )

    @property
    def is_peak_too_low(self) -> bool:
        """Whether the step, or its modules together, multiplied faster than the peak allows.

        Then MFU is too high.
        """
        if self.budget is None or self.executed is None:
            return (self.mfu or 0.0) > 1
        taken = sum(self.budget.parts.get(part, 0.0) for part in ("useful", "recompute"))
        return (self.mfu or 0.0) > 1 or self.executed > taken * _BEYOND


def flops_per_second(macs: float, seconds: float | None) -> float | None:
    """The rate of contractions, 2 FLOPs for each multiply-accumulate; `None` without a time."""
    return 2 * macs / seconds if seconds else None


def of_peak(rate: float | None, peak: float | None) -> float | None:
    """A rate's share of a peak.

    MFU of the MACs of forward and backward, HFU with those of recompute. `None` where one is
    unknown.
    """
    return None if rate is None or not peak else rate / peak


def utilization(profile: Profile, hardware: Hardware | str | None = None) -> Utilization:
    """The share of the peak that a step reached.

    Args:
        profile: What was counted, with the times of its steps.
        hardware: What the device can do, or its name in the table; `None` takes what the run says
            it is.

    Raises:
        HardwareError: The table does not have the name.
    """
    return utilization_at(profile, chip_of(profile, hardware), step_times(profile))


def utilization_at(profile: Profile, chip: Hardware | None, times: StepTimes) -> Utilization:
    """The share of a chip's peak that the summed clean steps reach."""
    peak = peak_of(profile.run.dtype, chip)
    macs = sum(profile.modules[""].work(phase).macs for phase in MODEL_PHASES)
    share = _share_of_a_rank(profile, macs)
    # Without a cell nothing was counted.
    seconds = times.mean if profile.op_counts else None
    rate = flops_per_second(macs * share, seconds)
    again = flops_per_second((macs + profile.modules[""].recompute.macs) * share, seconds)
    needed = _peak_seconds(profile, chip) if chip else None
    return Utilization(
        mfu=of_peak(rate, peak),
        hfu=of_peak(again, peak),
        executed=None if not seconds or needed is None else needed * share / seconds,
        flops_per_second=rate,
        peak_flops_per_second=peak,
        dtype=name_of_peak(profile.run.dtype, chip),
        hardware=chip.name if chip else None,
        budget=budget(profile, chip, times, share=share),
    )


def _share_of_a_rank(profile: Profile, macs: int) -> float:
    """The mean rank's share of the root's MACs.

    Where ranks differ, the root's MACs are not those of one rank.
    """
    known = [rank.macs for rank in profile.ranks if rank.macs is not None]
    return statistics.mean(known) / macs if known and macs else 1.0


def _peak_seconds(profile: Profile, chip: Hardware) -> float | None:
    """Seconds of the executed contractions at the peaks of their dtypes.

    `None` where one of the peaks is unknown.
    """
    macs = summed(
        (cell.dtype, cell.executed_macs)
        for cell in profile.op_counts
        if cell.phase in PASS_PHASES and cell.executed_macs
    )
    peaks = {dtype: peak_of(dtype, chip) for dtype in macs}
    return sum_known(
        None if peak is None else 2 * macs[dtype] / peak for dtype, peak in peaks.items()
    )

"""MFU and HFU of a trace: its counted multiply-accumulates over its time and the peak of a chip."""

from collections.abc import Sequence

from msgspec import Struct

from lflops.analyze.speed.utilization import flops_per_second, of_peak
from lflops.hardware.chips import Hardware
from lflops.trace_analysis.host_walk import HostWalk
from lflops.trace_analysis.operator_cost import cost_of
from lflops.trace_analysis.operators import precision
from lflops.trace_analysis.timeline import StepTimes


class TraceUtilization(Struct, frozen=True, kw_only=True):
    """`None` is unknown."""

    seconds: float  # of all steps, or of the window where there are none; times the number of devices
    steps: int  # how many steps; 0 is the window
    macs: int  # Multiply-accumulates that were launched in this time, those of recompute left out
    flops_per_second: float | None
    mfu: float | None  # 2 x MACs over `seconds` and the peak of `precision`, without what activation checkpointing computes again
    hfu: float | None  # the same with that, and with what fused attention computes again
    executed: float | None  # what the device did: `hfu` without what masks leave out, each precision at its own peak
    precision: str | None  # the one that most MACs are of
    peak_flops_per_second: float | None
    hardware: str | None  # the chip's name


def utilization(walk: HostWalk, steps: Sequence[StepTimes], window: int, devices: int, chip: Hardware | None) -> TraceUtilization | None:
    """Of the steps, or without any of the window in nanoseconds; `None` where nothing that multiplies was counted."""
    macs: dict[str | None, int] = {}
    executed: dict[str | None, int] = {}
    first = again = 0
    for start, sums, is_recompute in walk.counted:
        if steps and not any(step.start <= start < step.end for step in steps):
            continue
        cost = cost_of(sums.name, sums.inputs)
        if cost is not None and cost.macs:
            dtype = precision(sums)
            macs[dtype] = macs.get(dtype, 0) + cost.macs
            executed[dtype] = executed.get(dtype, 0) + cost.executed_macs
            again += cost.macs * is_recompute + cost.recompute_macs
            first += cost.macs * (not is_recompute)
    if not macs:
        return None
    seconds = (sum(step.end - step.start for step in steps) if steps else window) / 1e9 * max(devices, 1)
    most = max(macs, key=lambda dtype: macs[dtype])
    peaks = {dtype: chip.peak_flops_per_second.get(dtype or "") if chip else None for dtype in macs}
    rate = flops_per_second(first, seconds)
    peak = peaks[most]
    needed = [2 * executed[dtype] / each if each else None for dtype, each in peaks.items()]
    known = [each for each in needed if each is not None]
    return TraceUtilization(
        seconds=seconds,
        steps=len(steps),
        macs=first,
        flops_per_second=rate,
        mfu=of_peak(rate, peak),
        hfu=of_peak(flops_per_second(first + again, seconds), peak),
        executed=sum(known) / seconds if len(known) == len(needed) and seconds else None,
        precision=most,
        peak_flops_per_second=peak,
        hardware=chip.name if chip else None,
    )

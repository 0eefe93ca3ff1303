"""Compute the MFU and HFU of a trace from the operators with known FLOPs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from lflops.analysis.utilization import flops_per_second, of_peak
from lflops.hardware.chips import Hardware
from lflops.profile.series import ratio, sum_known
from lflops.trace.analysis.host_walk import HostWalk
from lflops.trace.analysis.operator_cost import cost_of
from lflops.trace.analysis.operators import precision
from lflops.trace.analysis.steps import StepTimes


class TraceUtilization(Struct, frozen=True, kw_only=True):
    """MFU and HFU of a trace, and the values from which they are computed; `None` if unknown.

    Attributes:
        seconds: Time of all steps, or of the analyzed time if there is no step, times the
            number of devices.
        steps: Number of these steps; 0 if `seconds` is the analyzed time.
        macs: Multiply-accumulates that were launched in this time, without recomputation.
        mfu: 2 × `macs`, divided by `seconds` and by the peak of `precision`.
        hfu: Like `mfu`, but including the MACs that activation checkpointing and fused attention
            recompute.
        executed: Like `hfu`, but without the MACs that are skipped because of masks, and with the
            peak of each precision instead of the peak of `precision`.
        precision: The precision with the most MACs.
        hardware: The chip's name.
    """

    seconds: float
    steps: int
    macs: int
    flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    executed: float | None
    precision: str | None
    peak_flops_per_second: float | None
    hardware: str | None


def trace_utilization(
    host: HostWalk, steps: Sequence[StepTimes], window: int, devices: int, chip: Hardware | None
) -> TraceUtilization | None:
    """Return the utilization in the steps, or in the analyzed time if there is no step.

    Args:
        host: The operator calls with known FLOPs.
        steps: The profiler's steps.
        window: Length of the analyzed time in nanoseconds.
        devices: Number of devices.
        chip: The chip with the peaks, if known.

    Returns:
        The utilization, or `None` if no matmul has known FLOPs.
    """
    macs: Counter[str | None] = Counter()
    executed: Counter[str | None] = Counter()
    first_macs = 0
    recomputed_macs = 0
    for call in host.counted:
        if steps and not _is_in_step(call.start, steps):
            continue
        cost = cost_of(call.operator.name, call.operator.inputs)
        if cost is None or not cost.macs:
            continue
        dtype = precision(call.operator)
        macs[dtype] += cost.macs
        executed[dtype] += cost.executed_macs
        recomputed_macs += cost.recompute_macs
        if call.is_recompute:
            recomputed_macs += cost.macs
        else:
            first_macs += cost.macs
    if not macs:
        return None
    nanoseconds = sum(step.duration for step in steps) if steps else window
    seconds = nanoseconds / 1e9 * max(devices, 1)
    main_dtype = max(macs, key=lambda dtype: macs[dtype])
    peaks = {} if chip is None else chip.peak_flops_per_second
    peak = peaks.get(main_dtype or "")
    rate = flops_per_second(first_macs, seconds)
    return TraceUtilization(
        seconds=seconds,
        steps=len(steps),
        macs=first_macs,
        flops_per_second=rate,
        mfu=of_peak(rate, peak),
        hfu=of_peak(flops_per_second(first_macs + recomputed_macs, seconds), peak),
        executed=_executed_share(executed, peaks, seconds),
        precision=main_dtype,
        peak_flops_per_second=peak,
        hardware=None if chip is None else chip.name,
    )


def _is_in_step(moment: int, steps: Iterable[StepTimes]) -> bool:
    return any(step.start <= moment < step.end for step in steps)


def _executed_share(
    executed: Mapping[str | None, int], peaks: Mapping[str, float], seconds: float
) -> float | None:
    """Return the time that the executed MACs would need at peak rate, divided by `seconds`.

    Each precision has its own peak. If one of the peaks is unknown, the result is `None`.
    """
    needed = []
    for dtype, macs in executed.items():
        peak = peaks.get(dtype or "")
        needed.append(ratio(2 * macs, peak))
    return ratio(sum_known(needed), seconds)

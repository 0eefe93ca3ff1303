"""Sentences about a roofline: why a point is above its roof, and why there is no roof."""

from lflops.analyze.speed.roofline import Over, Roofline
from lflops.profile.model import Run

__all__ = ["OVER", "why_no_roof"]

OVER: dict[Over, str] = {
    "cache": "over its roof: what it works on fits the cache",
    "compiled": "over its roof: the bytes are those of the code as written, and it runs compiled",
    "cache_unknown": "over its roof: what it works on may fit the cache, whose size is not known; else a count, a time or a peak is wrong",
    "error": "over its roof: a count, a time or a peak is wrong",
}


def why_no_roof(run: Run, roofline: Roofline) -> str:
    """Why the points have no roof; empty where they have one."""
    if run.hardware is None:
        return (
            f'what {run.device_name} can do is not known; run FlopsMonitor or lflops.measure with hardware="measure", or with a name that '
            "lflops hardware lists"
        )
    if not any(ceiling.is_judged_by for ceiling in roofline.ceilings):
        return f"{run.hardware.name} has no known peak in any of the dtypes that were multiplied"
    if run.hardware.bandwidth_bytes_per_second is None:
        return f"the bandwidth of {run.hardware.name} is not known"
    return ""

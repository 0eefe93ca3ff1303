"""Measure the peak of live memory with the CPU allocator's own statistics."""

import gc
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from lflops.garbage import gc_paused
from tests.support.quarters import exact


def allocated(begin: Callable[[], Callable[[], object]], folder: Path, steps: int = 2) -> list[int]:
    """The peak in each of some steps, by torch's profiler, of the bytes that were given out under it.

    `begin` makes what makes a step.
    """
    gc.collect()  # garbage of earlier tests is not to go meanwhile: it would count as given back
    with gc_paused(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = begin()
        for place in range(steps):
            with record_function(f"step {place}"):
                step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = exact(folder / "trace.json")["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("step ")
    )
    totals = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]"
    ]
    _, total, nbytes = min(totals)
    # What was given out under an earlier profiler and returned since is still in the total.
    return [
        max(each for at, each, _ in totals if begin <= at <= end) - (total - nbytes)
        for begin, end in spans
    ]

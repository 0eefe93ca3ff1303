"""Measure the peak of live memory with the statistics of torch's CPU allocator."""

import gc
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from lflops.garbage import gc_paused
from tests.support.quarters import exact


def allocated(begin: Callable[[], Callable[[], object]], folder: Path, steps: int = 2) -> list[int]:
    """Return the peak of the allocated bytes in each step, as recorded by torch.profiler.

    Only memory that was allocated while the profiler ran is included.

    Args:
        begin: Prepares the steps, and returns the function that runs one.
        folder: Where the trace is written.
        steps: The number of steps.
    """
    # Collect the garbage of earlier tests now. If it were collected under the profiler, its memory
    # would count as freed.
    gc.collect()
    with gc_paused(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = begin()
        for place in range(steps):
            with record_function(f"step {place}"):
                step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = exact(folder / "trace.json")["traceEvents"]
    step_events = [event for event in events if event["name"].startswith("step ")]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in step_events)
    memory_events = [event for event in events if event["name"] == "[memory]"]
    totals = []
    for event in memory_events:
        args = event["args"]
        totals.append((event["ts"], args["Total Allocated"], args["Bytes"]))
    # The total is not 0 at the beginning: it still includes memory that was allocated under an
    # earlier profiler, even if this memory has been freed since.
    _, first_total, first_bytes = min(totals)
    already_included = first_total - first_bytes
    peaks = []
    for start, end in spans:
        peak = max(total for at, total, _ in totals if start <= at <= end)
        peaks.append(peak - already_included)
    return peaks

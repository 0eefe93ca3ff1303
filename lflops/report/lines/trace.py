"""The traces of a window as lines: their files, and the operators with the most own time."""

from collections.abc import Iterator

from lflops import units
from lflops.profile.records import Trace, TracedOperator
from lflops.report.lines.text import plain

_LISTED = 5


def traced(trace: Trace) -> Iterator[tuple[str, str]]:
    """Label and value of each line; one without a label goes on with the line above."""
    for rank, file in trace.files.items():
        yield "trace" if len(trace.files) == 1 else f"trace of rank {rank}", plain(file)
    on_device = any(each.own_device_seconds for each in trace.operators)
    for index, each in enumerate(by_own_time(trace, on_device=on_device)[:_LISTED]):
        own = each.own_device_seconds if on_device else each.own_host_seconds
        label = "" if index else f"most self time, {'on the device' if on_device else 'on the host'}, as traced, in a batch"
        yield label, f"{plain(each.name)}  {units.duration(per_batch(own, trace))}, calls: {units.count(per_batch(each.calls, trace))}"


def by_own_time(trace: Trace, *, on_device: bool) -> list[TracedOperator]:
    """The operators, sorted by own time."""
    return sorted(trace.operators, key=lambda each: each.own_device_seconds if on_device else each.own_host_seconds, reverse=True)


def per_batch(figure: float, trace: Trace) -> float | None:
    """The mean over the recorded batches; `None` where their number is unknown."""
    return figure / trace.batches if trace.batches else None

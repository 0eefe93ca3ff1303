"""The steps of a trace, and what ran on each stream."""

from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.series import grouped
from lflops.stretches import joined, shares
from lflops.trace_analysis.host_walk import HostWalk
from lflops.traces.device_states import DeviceTimeline, states, timeline, total
from lflops.traces.recorded import DeviceWork, RecordedTrace


class StreamTimes(Struct, frozen=True, kw_only=True):
    """What ran on one stream of a device, in nanoseconds and numbers; `busy` is less than the sum where kernels of a stream overlap."""

    device: int
    stream: int
    busy: int
    kernels: int
    copies: int


def streams(work: Iterable[DeviceWork], start: int, end: int) -> tuple[StreamTimes, ...]:
    """What ran on each stream between two moments, the busiest first."""
    inside = (each for each in work if each.end > start and each.start < end)
    by_stream: dict[tuple[int, int], list[DeviceWork]] = grouped(inside, attrgetter("device", "stream"))
    rows = (
        StreamTimes(
            device=device,
            stream=stream,
            busy=shares(joined((each.start, each.end) for each in found), [(start, end)])[0],
            kernels=sum(each.kind == "kernel" for each in found),
            copies=sum(each.kind == "copy" for each in found),
        )
        for (device, stream), found in by_stream.items()
    )
    return tuple(sorted(rows, key=lambda row: (row.device, -row.busy, row.stream)))


class StepTimes(Struct, frozen=True, kw_only=True):
    """One step of the profiler: from its beginning on the host to the next step's, and what the device did in that time.

    Of several devices it has the states of all of them together; `None` without a device.
    """

    name: str
    start: int
    end: int
    device: DeviceTimeline | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


def steps(trace: RecordedTrace, walk: HostWalk) -> tuple[StepTimes, ...]:
    """The steps in their order, and what all devices did in them.

    A step that several processes have, as in a merged trace, is one, from the first of its beginnings. The last step ends with its span, or
    with the last work launched in it. It is left out where nothing was launched in it and no operator ran: a profiler that is stopped
    opens a step and closes it at once.
    """
    named = grouped((span for span in trace.spans if span.kind == "step"), attrgetter("name")).values()
    of_all = (replace(found[0], start=min(each.start for each in found), end=max(each.end for each in found)) for found in named)
    spans = sorted(of_all, key=attrgetter("start"))
    if not spans:
        return ()
    last = spans[-1]
    launched = [work.end for work in trace.work if (call := walk.call(work)) is not None and last.start <= call.start < last.end]
    if len(spans) > 1 and not launched and not any(last.start <= call.start < last.end for call in trace.operators):
        end = spans.pop().start
    else:
        end = max([last.end, *launched])
    ends = [*(span.start for span in spans[1:]), end]
    by_device: dict[int, list[DeviceWork]] = grouped(trace.work, attrgetter("device"))
    return tuple(
        StepTimes(
            name=span.name,
            start=span.start,
            end=end,
            device=total(timeline(states(work, span.start, end)) for work in by_device.values()) if by_device else None,
        )
        for span, end in zip(spans, ends, strict=True)
        if end > span.start
    )

"""The timeline of a device: when it computed, when it only communicated or copied, and when it was idle.

A moment has one of four states. Computing wins over communication, and communication over copies, so the parts add up to the window, to
the nanosecond.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from lflops.analyze.trace.categories import communicates
from lflops.analyze.trace.host_walk import HostWalk
from lflops.stretches import Stretches, clipped, joined, length, outside
from lflops.traces.recorded import DeviceWork, RecordedTrace

__all__ = [
    "DeviceTimeline",
    "StepTimes",
    "StreamTimes",
    "Timeline",
    "idle_stretches",
    "states",
    "steps",
    "streams",
    "timeline",
    "total",
]


class DeviceTimeline(Struct, frozen=True, kw_only=True):
    """Nanoseconds of a device in each state; the first four add up to the window.

    Attributes:
        computing: A kernel ran that is no communication, or a fill.
        exposed_communication: It communicated and computed nothing.
        exposed_copies: It copied, and neither computed nor communicated.
        idle: None of these.
        communication, copies: All of it, exposed or not.
    """

    window: int
    computing: int
    exposed_communication: int
    exposed_copies: int
    idle: int
    communication: int
    copies: int

    @property
    def busy(self) -> int:
        """The window without the idle time."""
        return self.window - self.idle

    @property
    def overlapped_communication(self) -> int:
        """Communication that computing hides."""
        return self.communication - self.exposed_communication

    @property
    def overlapped_copies(self) -> int:
        """Copies that computing or communication hides."""
        return self.copies - self.exposed_copies


class StreamTimes(Struct, frozen=True, kw_only=True):
    """What ran on one stream of a device, in nanoseconds and numbers; `busy` is less than the sum where kernels of a stream overlap."""

    device: int
    stream: int
    busy: int
    kernels: int
    copies: int


class Timeline(NamedTuple):
    """A device's busy stretches between two moments."""

    start: int
    end: int
    computing: Stretches
    communicating: Stretches
    copying: Stretches


def states(work: Sequence[DeviceWork], start: int, end: int) -> Timeline:
    """When the work computed, communicated and copied, between two moments."""
    computing: Stretches = []
    communicating: Stretches = []
    copying: Stretches = []
    for each in work:
        if each.end > start and each.start < end:
            stretch = max(each.start, start), min(each.end, end)
            (copying if each.kind == "copy" else communicating if communicates(each) else computing).append(stretch)
    return Timeline(start, end, joined(computing), joined(communicating), joined(copying))


def timeline(found: Timeline) -> DeviceTimeline:
    """The nanoseconds of each state."""
    computing = length(found.computing)
    exposed_communication = length(outside(found.communicating, found.computing))
    busy = joined(found.computing + found.communicating)
    exposed_copies = length(outside(found.copying, busy))
    window = found.end - found.start
    return DeviceTimeline(
        window=window,
        computing=computing,
        exposed_communication=exposed_communication,
        exposed_copies=exposed_copies,
        idle=window - computing - exposed_communication - exposed_copies,
        communication=length(found.communicating),
        copies=length(found.copying),
    )


def idle_stretches(found: Timeline) -> Stretches:
    """When the device did nothing."""
    return outside([(found.start, found.end)], joined(found.computing + found.communicating + found.copying))


def streams(work: Iterable[DeviceWork], start: int, end: int) -> tuple[StreamTimes, ...]:
    """What ran on each stream between two moments, the busiest first."""
    by_stream: dict[tuple[int, int], list[DeviceWork]] = {}
    for each in work:
        if each.end > start and each.start < end:
            by_stream.setdefault((each.device, each.stream), []).append(each)
    rows = (
        StreamTimes(
            device=device,
            stream=stream,
            busy=length(clipped(joined((each.start, each.end) for each in found), start, end)),
            kernels=sum(each.kind == "kernel" for each in found),
            copies=sum(each.kind == "copy" for each in found),
        )
        for (device, stream), found in by_stream.items()
    )
    return tuple(sorted(rows, key=lambda row: (row.device, -row.busy, row.stream)))


class StepTimes(Struct, frozen=True, kw_only=True):
    """One step of the profiler: from its beginning on the host to the next step's, and what the device did in that time.

    Attributes:
        device: The states of one device; of several devices, of all of them together; `None` without a device.
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

    The last step ends with its span, or with the last work launched in it. It is left out where nothing was launched in it and no operator
    ran: a profiler that is stopped opens a step and closes it at once.
    """
    spans = sorted((span for span in trace.spans if span.kind == "step"), key=lambda span: span.start)
    if not spans:
        return ()
    last = spans[-1]
    launched = [work.end for work in trace.work if (call := walk.call(work)) is not None and last.start <= call.start < last.end]
    if len(spans) > 1 and not launched and not any(last.start <= call.start < last.end for call in trace.operators):
        end = spans.pop().start
    else:
        end = max([last.end, *launched])
    ends = [*(span.start for span in spans[1:]), end]
    by_device: defaultdict[int, list[DeviceWork]] = defaultdict(list)
    for work in trace.work:
        by_device[work.device].append(work)
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


def total(timelines: Iterable[DeviceTimeline]) -> DeviceTimeline:
    """The nanoseconds of several devices together."""
    rows = list(timelines)
    return DeviceTimeline(**{name: sum(getattr(row, name) for row in rows) for name in DeviceTimeline.__struct_fields__})

"""Analyze one trace, or the traces of several ranks, and return the results as one value."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.hardware.chips import Hardware, lookup, named
from lflops.intervals import Intervals
from lflops.profile.records import TimingStats
from lflops.profile.series import grouped
from lflops.trace.analysis.collectives import (
    CollectiveTimes,
    Occurrence,
    RankSkew,
    collectives,
    occurrences,
    rank_skew,
)
from lflops.trace.analysis.device_work import (
    CategoryTimes,
    KernelTimes,
    PrecisionTimes,
    StreamTimes,
    by_category,
    by_precision,
    classified,
    kernels,
    streams,
)
from lflops.trace.analysis.host_walk import NOT_RECORDED, HostWalk, walk
from lflops.trace.analysis.idle import (
    Cause,
    LaunchDelays,
    QueueDepth,
    idle_by_cause,
    in_order_of_causes,
    launch_delays,
    queue_depth,
)
from lflops.trace.analysis.operator_cost import cost_of
from lflops.trace.analysis.operators import (
    OperatorTimes,
    ShapeTimes,
    SpanTimes,
    UnsupportedTraceOperator,
    operators,
    shapes,
    span_times,
    unsupported,
)
from lflops.trace.analysis.steps import StepTimes, steps
from lflops.trace.analysis.utilization import TraceUtilization, trace_utilization
from lflops.trace.device_states import (
    DeviceTimeline,
    communicates,
    idle_stretches,
    states,
    timeline,
    total,
)
from lflops.trace.recorded import (
    DeviceEvent,
    MemoryPeak,
    OperatorCall,
    RecordedTrace,
    covered,
    extent,
)


class LeftOut(Struct, frozen=True, kw_only=True):
    """Device work that is left out because it was launched before the recording began.

    It ended before the analyzed time, which begins with the first work whose launch was recorded.

    Attributes:
        calls: Number of kernels, copies and fills.
        device: Total time of this work in nanoseconds.
    """

    calls: int
    device: int


class DeviceSummary(Struct, frozen=True, kw_only=True):
    """The analysis of one device of the trace.

    Attributes:
        timeline: Time in each state, such as computing.
        idle: Nanoseconds of idle time by cause.
        queue: Depth of the launch queue; `None` if no launch was recorded.
    """

    device: int
    name: str | None
    timeline: DeviceTimeline
    idle: Mapping[Cause, int]
    queue: QueueDepth | None
    memory: MemoryPeak | None


class TraceSummary(Struct, frozen=True, kw_only=True):
    """The analysis of one trace.

    Times are integers in nanoseconds, except in `TimingStats`, which has seconds.

    Attributes:
        events: Number of events in the file.
        recorded: Time from the start of the first event to the end of the last event on the host.
        before_device: Time until the first device work, measured from the start of the first step
            or, if there are no steps, from the start of the recording; `None` without a device.
        device: Time in each device state, such as computing, summed over all devices; `None`
            without a device.
        idle: Idle time by cause, summed over all devices.
        step: Median and quartiles of the step times, or `None` without a step.
        shapes: Operators with known FLOPs, summed by name and inputs.
        hardware: The chip, if known. Rates are compared with its peaks.
        left_out: Device work that is left out, because it was launched before the recording began.
        has_stack: Whether Python frames were recorded, which slows the host.
        negative: Number of events with a negative duration, which is treated as 0.
        unread: Number of events of unknown categories, by category.
        unlaunched: Number of kernels, copies and fills whose launch the trace does not show. Their
            time belongs to no operator.
        damaged: Number of events left out because they cannot be read.
        damage: Error of the first damaged event.
    """

    file: str
    rank: int | None
    world_size: int | None
    events: int
    recorded: int
    before_device: int | None
    device: DeviceTimeline | None
    idle: Mapping[Cause, int]
    launches: LaunchDelays | None
    devices: tuple[DeviceSummary, ...]
    streams: tuple[StreamTimes, ...]
    steps: tuple[StepTimes, ...]
    step: TimingStats | None
    categories: tuple[CategoryTimes, ...]
    precisions: tuple[PrecisionTimes, ...]
    kernels: tuple[KernelTimes, ...]
    operators: tuple[OperatorTimes, ...]
    shapes: tuple[ShapeTimes, ...]
    unsupported: tuple[UnsupportedTraceOperator, ...]
    utilization: TraceUtilization | None
    hardware: Hardware | None
    collectives: tuple[CollectiveTimes, ...]
    modules: tuple[SpanTimes, ...]
    scopes: tuple[SpanTimes, ...]
    left_out: LeftOut
    has_stack: bool
    negative: int
    unread: Mapping[str, int]
    unlaunched: int
    damaged: int
    damage: str

    @property
    def work_time(self) -> int:
        """Total time of all kernels, copies and fills."""
        return sum(row.device for row in self.categories)

    @property
    def steps_time(self) -> int:
        """Total time of all steps."""
        return sum(step.duration for step in self.steps)


class TraceSummaries(Struct, frozen=True, kw_only=True):
    """The analyses of several traces, and how ranks wait for each other.

    Attributes:
        ranks: The time that ranks wait for each other; `None` unless all traces are from different,
            known ranks.
    """

    traces: tuple[TraceSummary, ...]
    ranks: RankSkew | None


def summarise_all(
    traces: Iterable[RecordedTrace], hardware: Hardware | str | None = None
) -> TraceSummaries:
    """Analyze traces as `summarise` does.

    If all traces are from different, known ranks, the ranks are also compared.
    """
    summaries = []
    by_rank = {}
    for trace in traces:
        summary, found = _analysed(trace, hardware)
        summaries.append(summary)
        if summary.rank is not None:
            by_rank[summary.rank] = found
    skew = None
    if len(by_rank) == len(summaries):
        skew = rank_skew(by_rank)
    return TraceSummaries(traces=tuple(summaries), ranks=skew)


def summarise(trace: RecordedTrace, hardware: Hardware | str | None = None) -> TraceSummary:
    """Analyze one trace.

    Args:
        trace: The trace.
        hardware: The chip for comparing rates, or its name in the table of chips. By default, the
            chip that the trace names.
    """
    summary, _ = _analysed(trace, hardware)
    return summary


def _analysed(
    trace: RecordedTrace, hardware: Hardware | str | None
) -> tuple[TraceSummary, tuple[Occurrence, ...]]:
    if isinstance(hardware, str):
        chip: Hardware | None = named(hardware)
    else:
        chip = hardware or _chip(trace)
    window = _window(trace)
    host = walk(trace, window.work, _is_counted)
    work = classified(window.work, host)
    devices = []
    for device in window.by_device:
        devices.append(_device(trace, window, device, host))
    step_times = steps(trace, host, window.work)
    window_time = window.end - window.start or trace.last - trace.first
    found_collectives = occurrences(window.work, host, trace)
    summary = TraceSummary(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        events=trace.events,
        recorded=trace.last - trace.first,
        before_device=_time_before_device(trace, window, step_times),
        device=total(device.timeline for device in devices) if devices else None,
        idle=_idle_of_all(devices),
        launches=launch_delays(window.work, host.call),
        devices=tuple(devices),
        streams=streams(window.work, window.start, window.end),
        steps=step_times,
        step=TimingStats.of(step.seconds for step in step_times),
        categories=by_category(work),
        precisions=by_precision(work),
        kernels=kernels(work),
        operators=operators(host),
        shapes=shapes(host, chip),
        unsupported=unsupported(host),
        utilization=trace_utilization(host, step_times, window_time, len(devices), chip),
        hardware=chip,
        collectives=collectives(found_collectives, _computing(window.work)),
        modules=span_times(host, "module"),
        scopes=span_times(host, "scope"),
        left_out=window.left_out,
        has_stack=trace.has_stack,
        negative=trace.negative,
        unread=trace.unread,
        unlaunched=sum(host.launch(work) is NOT_RECORDED for work in window.work),
        damaged=trace.damaged,
        damage=trace.damage,
    )
    return summary, found_collectives


def _is_counted(call: OperatorCall) -> bool:
    return cost_of(call.name, call.inputs) is not None


class _Window(NamedTuple):
    """The analyzed time of a trace, and the device work in it.

    It begins with the first work whose launch is recorded.
    """

    start: int
    end: int
    by_device: Mapping[int, Sequence[DeviceEvent]]
    work: Sequence[DeviceEvent]
    left_out: LeftOut


def _window(trace: RecordedTrace) -> _Window:
    launched = {call.correlation for call in trace.runtime}
    known = [work for work in trace.work if work.correlation in launched] or trace.work
    start, _ = extent(known)
    _, end = extent(trace.work)
    inside = []
    left_out = []
    for work in trace.work:
        overlaps = work.end > start and work.start < end
        if overlaps or work.start == work.end == start:
            inside.append(work)
        elif work.start < start:
            left_out.append(work)
    by_device: dict[int, list[DeviceEvent]] = grouped(
        sorted(inside, key=attrgetter("device", "start")), attrgetter("device")
    )
    before = LeftOut(calls=len(left_out), device=sum(work.duration for work in left_out))
    return _Window(start, end, by_device, inside, before)


def _device(trace: RecordedTrace, window: _Window, device: int, host: HostWalk) -> DeviceSummary:
    work = window.by_device[device]
    found = states(work, window.start, window.end)
    memory = trace.memory.get(device)
    if memory is None and len(window.by_device) == len(trace.memory) == 1:
        # The allocator may use another number for the only device.
        (memory,) = trace.memory.values()
    return DeviceSummary(
        device=device,
        name=_name(trace, device),
        timeline=timeline(found),
        idle=idle_by_cause(idle_stretches(found), work, host.call, trace),
        queue=queue_depth(work, host.call, window.start, window.end),
        memory=memory,
    )


def _idle_of_all(devices: Iterable[DeviceSummary]) -> dict[Cause, int]:
    idle: Counter[Cause] = Counter()
    for device in devices:
        idle.update(device.idle)
    return in_order_of_causes(idle)


def _computing(work: Iterable[DeviceEvent]) -> Intervals:
    computing = []
    for each in work:
        if each.kind != "copy" and not communicates(each):
            computing.append(each)
    return covered(computing)


def _time_before_device(
    trace: RecordedTrace, window: _Window, steps: Sequence[StepTimes]
) -> int | None:
    if not window.by_device:
        return None
    start = steps[0].start if steps else trace.first
    return max(window.start - start, 0)


def _chip(trace: RecordedTrace) -> Hardware | None:
    """Return the chip of the devices that ran work.

    Returns `None` if the devices have different names, or if the table of chips lacks the name.
    """
    names = {_name(trace, work.device) for work in trace.work}
    if len(names) != 1:
        return None
    name = names.pop()
    return lookup(name) if name else None


def _name(trace: RecordedTrace, device: int) -> str | None:
    """Return a device's name, or `None` if unknown.

    Events may use device numbers that are not in the trace's list of devices. If all listed devices
    have the same name, that name is used.
    """
    names = set(trace.devices.values())
    if device not in trace.devices and len(names) == 1:
        return names.pop()
    return trace.devices.get(device)

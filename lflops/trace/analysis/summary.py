"""All that is known of one trace, as one value."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.utilization import flops_per_second, of_peak
from lflops.hardware.chips import Hardware, lookup, named
from lflops.intervals import joined, shares
from lflops.profile.records import TimingStats
from lflops.profile.series import grouped, sum_known, summed
from lflops.trace.analysis.categories import (
    CATEGORIES,
    Category,
    category_of_kernel,
    precision_by_name,
    tensor_cores_by_name,
)
from lflops.trace.analysis.collectives import (
    CollectiveTimes,
    Occurrence,
    RankSkew,
    collectives,
    occurrences,
    rank_skew,
)
from lflops.trace.analysis.host_walk import NOT_RECORDED, HostWalk, walk
from lflops.trace.analysis.idle import (
    CAUSES,
    Cause,
    LaunchDelays,
    QueueDepth,
    idle_by_cause,
    launch_delays,
    queue_depth,
)
from lflops.trace.analysis.operator_cost import cost_of, precision_of
from lflops.trace.analysis.operators import (
    OperatorTimes,
    ShapeTimes,
    SpanTimes,
    UnsupportedTraceOperator,
    operators,
    precision,
    shapes,
    span_times,
    unsupported,
)
from lflops.trace.device_states import (
    DeviceTimeline,
    communicates,
    idle_stretches,
    states,
    timeline,
    total,
)
from lflops.trace.recorded import DeviceEvent, MemoryPeak, RecordedTrace


class StreamTimes(Struct, frozen=True, kw_only=True):
    """What ran on one stream of a device, in nanoseconds and numbers.

    `busy` is less than the sum where kernels of a stream overlap.
    """

    device: int
    stream: int
    busy: int
    kernels: int
    copies: int


def streams(work: Iterable[DeviceEvent], start: int, end: int) -> tuple[StreamTimes, ...]:
    """Sum what ran on each stream between two moments, the busiest first."""
    inside = (each for each in work if each.end > start and each.start < end)
    by_stream: dict[tuple[int, int], list[DeviceEvent]] = grouped(
        inside, attrgetter("device", "stream")
    )
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
    """One step of the profiler.

    From its beginning on the host to the next step's, and what the device did in that time.

    Of several devices it has the states of all of them together; `None` without a device.
    """

    name: str
    start: int
    end: int
    device: DeviceTimeline | None

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def seconds(self) -> float:
        return self.duration / 1e9


def steps(trace: RecordedTrace, walk: HostWalk) -> tuple[StepTimes, ...]:
    """The steps in their order, and what all devices did in them."""
    # A step that several processes have, as in a merged trace, is one, from the first of its
    # beginnings. The last step ends with its span, or with the last work launched in it. It is left
    # out where nothing was launched in it and no operator ran: a profiler that is stopped opens a
    # step and closes it at once.
    named = grouped(
        (span for span in trace.spans if span.kind == "step"), attrgetter("name")
    ).values()
    of_all = (
        replace(
            found[0], start=min(each.start for each in found), end=max(each.end for each in found)
        )
        for found in named
    )
    spans = sorted(of_all, key=attrgetter("start"))
    if not spans:
        return ()
    last = spans[-1]
    launched = [
        work.end
        for work in trace.work
        if (call := walk.call(work)) is not None and last.start <= call.start < last.end
    ]
    if (
        len(spans) > 1
        and not launched
        and not any(last.start <= call.start < last.end for call in trace.operators)
    ):
        end = spans.pop().start
    else:
        end = max([last.end, *launched])
    ends = [*(span.start for span in spans[1:]), end]
    by_device: dict[int, list[DeviceEvent]] = grouped(trace.work, attrgetter("device"))
    return tuple(
        StepTimes(
            name=span.name,
            start=span.start,
            end=end,
            device=total(timeline(states(work, span.start, end)) for work in by_device.values())
            if by_device
            else None,
        )
        for span, end in zip(spans, ends, strict=True)
        if end > span.start
    )


class KernelTimes(Struct, frozen=True, kw_only=True):
    """All calls of one kernel, in nanoseconds, and the operators that launched it, those with the most time first."""

    name: str
    category: Category
    precision: str | None
    tensor_cores: (
        bool | None
        # whether it runs on tensor or matrix cores; `None` where its name does not tell
    )
    calls: int
    device: int
    median: int
    longest: int
    operators: tuple[str, ...]


class CategoryTimes(Struct, frozen=True, kw_only=True):
    """The device's work of one category; nanoseconds.

    Work that overlaps counts as often as it runs.
    """

    category: Category
    device: int
    calls: int


class PrecisionTimes(Struct, frozen=True, kw_only=True):
    """The computing kernels of one precision, which is `None` where neither the inputs nor the names tell; nanoseconds."""

    precision: str | None
    device: int
    calls: int
    # in kernels whose names tell that they run on tensor or matrix cores
    tensor_cores: int


def _operator(walk: HostWalk, work: DeviceEvent) -> str | None:
    operator = walk.launch(work).operator
    return operator.name if operator is not None else None


def _category(walk: HostWalk, work: DeviceEvent) -> Category:
    return category_of_kernel(work, _operator(walk, work))


def _precision(walk: HostWalk, work: DeviceEvent) -> str | None:
    """Take the precision from the kernel's name for TF32, which the inputs do not tell, else by the operator's inputs, else by the name."""
    by_name, operator = precision_by_name(work.name), walk.launch(work).operator
    by_inputs = precision_of(operator.inputs) if operator is not None else None
    return (
        by_name if by_inputs is None or (by_name == "tf32" and by_inputs == "fp32") else by_inputs
    )


def kernels(work: Iterable[DeviceEvent], walk: HostWalk) -> tuple[KernelTimes, ...]:
    """The kernels by name, those with the most time first."""
    rows = [_kernel(name, found, walk) for name, found in grouped(work, attrgetter("name")).items()]
    return tuple(sorted(rows, key=lambda row: (-row.device, row.name)))


def _kernel(name: str, found: Sequence[DeviceEvent], walk: HostWalk) -> KernelTimes:
    times = [each.end - each.start for each in found]
    timed = list(zip(found, times, strict=True))
    by_operator = summed(
        (operator, took) for each, took in timed if (operator := _operator(walk, each)) is not None
    )
    by_category = summed((_category(walk, each), took) for each, took in timed)
    by_precision = summed((_precision(walk, each), took) for each, took in timed)
    computes = found[0].kind == "kernel" and not communicates(found[0])
    return KernelTimes(
        name=name,
        category=max(by_category, key=lambda category: by_category[category]),
        precision=max(by_precision, key=lambda precision: by_precision[precision])
        if computes
        else None,
        tensor_cores=tensor_cores_by_name(name) if computes else None,
        calls=len(found),
        device=sum(times),
        median=round(statistics.median(times)),
        longest=max(times),
        operators=tuple(sorted(by_operator, key=lambda operator: -by_operator[operator])),
    )


def by_category(work: Iterable[DeviceEvent], walk: HostWalk) -> tuple[CategoryTimes, ...]:
    """The work by category, the most time first."""
    rows = (
        CategoryTimes(
            category=category, device=sum(each.end - each.start for each in found), calls=len(found)
        )
        for category, found in grouped(work, lambda each: _category(walk, each)).items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.device, CATEGORIES.index(row.category))))


def by_precision(work: Iterable[DeviceEvent], walk: HostWalk) -> tuple[PrecisionTimes, ...]:
    """The kernels by precision, the most time first; copies, fills and communication are left out."""
    computing = (
        each for each in work if each.kind == "kernel" and _category(walk, each) != "communication"
    )
    rows = (
        PrecisionTimes(
            precision=precision,
            device=sum(each.end - each.start for each in found),
            calls=len(found),
            tensor_cores=sum(
                each.end - each.start for each in found if tensor_cores_by_name(each.name)
            ),
        )
        for precision, found in grouped(computing, lambda each: _precision(walk, each)).items()
    )
    return tuple(sorted(rows, key=lambda row: -row.device))


class LeftOut(Struct, frozen=True, kw_only=True):
    """Work that was launched before the recording began, and ran before the first work that was launched in it."""

    calls: int
    device: int


class DeviceSummary(Struct, frozen=True, kw_only=True):
    """One device of the trace."""

    device: int
    name: str | None
    timeline: DeviceTimeline
    idle: Mapping[Cause, int]
    queue: QueueDepth | None
    memory: MemoryPeak | None


class TraceUtilization(Struct, frozen=True, kw_only=True):
    """`None` is unknown."""

    seconds: (
        # of all steps, or of the window where there are none; times the number of devices
        float
    )
    # how many steps; 0 is the window
    steps: int
    # Multiply-accumulates that were launched in this time, those of recompute left out
    macs: int
    flops_per_second: float | None
    mfu: (
        float | None
        # 2 x MACs over `seconds` and the peak of `precision`, without what activation checkpointing
        # computes again
    )
    # the same with that, and with what fused attention computes again
    hfu: float | None
    executed: (
        float | None
        # what the device did: `hfu` without what masks leave out, each precision at its own peak
    )
    # the one that most MACs are of
    precision: str | None
    peak_flops_per_second: float | None
    # the chip's name
    hardware: str | None


class TraceSummary(Struct, frozen=True, kw_only=True):
    """What a trace says.

    All times are whole nanoseconds, unless they are a `TimingStats`, which is seconds.
    """

    file: str
    rank: int | None
    world_size: int | None
    # how many events the file has
    events: int
    # from the first moment on the host to the last
    recorded: int
    before_device: (
        int | None
        # from the first step's beginning, or the recording's, to the first work of a device; `None`
        # without a device
    )
    # the states of all devices together; `None` without a device
    device: DeviceTimeline | None
    # the idle nanoseconds of all devices by what they were lost to
    idle: Mapping[Cause, int]
    launches: LaunchDelays | None
    devices: tuple[DeviceSummary, ...]
    streams: tuple[StreamTimes, ...]
    steps: tuple[StepTimes, ...]
    # median and quartiles of the steps; `None` without a step
    step: TimingStats | None
    categories: tuple[CategoryTimes, ...]
    precisions: tuple[PrecisionTimes, ...]
    kernels: tuple[KernelTimes, ...]
    operators: tuple[OperatorTimes, ...]
    shapes: tuple[
        ShapeTimes, ...
        # the operators whose inputs tell what they computed, by these inputs
    ]
    unsupported: tuple[UnsupportedTraceOperator, ...]
    utilization: TraceUtilization | None
    # the chip that they are judged by
    hardware: Hardware | None
    collectives: tuple[CollectiveTimes, ...]
    modules: tuple[SpanTimes, ...]
    scopes: tuple[SpanTimes, ...]
    # what ran before the window
    left_out: LeftOut
    # whether Python's frames were recorded, which takes the host's time
    has_stack: bool
    # how many events had a negative length; they are taken as 0 ns long
    negative: int
    # events of kinds that nothing here knows, by category
    unread: Mapping[str, int]
    unlaunched: (
        # how many pieces of work have no launch in the trace, so that they are in no operator
        int
    )
    # how many events are left out because they cannot be read
    damaged: int
    # what is wrong with the first of them
    damage: str


class _Window(NamedTuple):
    """The work that is analysed: from the first that the recording saw being launched on."""

    start: int
    end: int
    by_device: Mapping[int, Sequence[DeviceEvent]]
    work: Sequence[DeviceEvent]
    left_out: LeftOut


class TraceSummaries(Struct, frozen=True, kw_only=True):
    """Several traces, and how ranks wait for each other.

    `None` where the traces are not of different ranks.
    """

    traces: tuple[TraceSummary, ...]
    ranks: RankSkew | None


def summarise_all(
    traces: Iterable[RecordedTrace], hardware: Hardware | str | None = None
) -> TraceSummaries:
    """Analyse traces one after the other as `summarise` does, and together where they are of different ranks."""
    analysed = [_analysed(trace, hardware) for trace in traces]
    by_rank = {summary.rank: found for summary, found in analysed if summary.rank is not None}
    skew = rank_skew(by_rank) if len(by_rank) == len(analysed) else None
    return TraceSummaries(traces=tuple(summary for summary, _ in analysed), ranks=skew)


def summarise(trace: RecordedTrace, hardware: Hardware | str | None = None) -> TraceSummary:
    """Analyse one trace on a chip, or on that of this name in the table.

    `None` looks for the name that the trace has.
    """
    return _analysed(trace, hardware)[0]


def _analysed(
    trace: RecordedTrace, hardware: Hardware | str | None
) -> tuple[TraceSummary, tuple[Occurrence, ...]]:
    chip = named(hardware) if isinstance(hardware, str) else hardware or _chip(trace)
    window = _window(trace)
    found = walk(trace, window.work, lambda call: cost_of(call.name, call.inputs) is not None)
    rows = tuple(_device(trace, window, device, found) for device in window.by_device)
    step_times = steps(trace, found)
    span = window.end - window.start or trace.last - trace.first
    found_collectives = occurrences(window.work, found, trace)
    computing = joined(
        (work.start, work.end)
        for work in window.work
        if work.kind != "copy" and not communicates(work)
    )
    begin = min((step.start for step in step_times), default=trace.first)
    summary = TraceSummary(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        events=trace.events,
        recorded=trace.last - trace.first,
        before_device=max(window.start - begin, 0) if rows else None,
        device=total(row.timeline for row in rows) if rows else None,
        idle={
            cause: nanoseconds
            for cause in CAUSES
            if (nanoseconds := sum(row.idle.get(cause, 0) for row in rows))
        },
        launches=launch_delays(window.work, found.call),
        devices=rows,
        streams=streams(window.work, window.start, window.end),
        steps=step_times,
        step=TimingStats.of(step.seconds for step in step_times),
        categories=by_category(window.work, found),
        precisions=by_precision(window.work, found),
        kernels=kernels(window.work, found),
        operators=operators(found),
        shapes=shapes(found, chip),
        unsupported=unsupported(found),
        utilization=_utilization(found, step_times, span, len(rows), chip),
        hardware=chip,
        collectives=collectives(found_collectives, computing),
        modules=span_times(found, "module"),
        scopes=span_times(found, "scope"),
        left_out=window.left_out,
        has_stack=trace.has_stack,
        negative=trace.negative,
        unread=trace.unread,
        unlaunched=sum(found.launch(work) is NOT_RECORDED for work in window.work),
        damaged=trace.damaged,
        damage=trace.damage,
    )
    return summary, found_collectives


def _device(trace: RecordedTrace, window: _Window, device: int, found: HostWalk) -> DeviceSummary:
    work = window.by_device[device]
    between = states(work, window.start, window.end)
    # Where one device worked and the allocator knows one, by another number, it is that one.
    only = (
        next(iter(trace.memory.values()))
        if len(window.by_device) == len(trace.memory) == 1
        else None
    )
    return DeviceSummary(
        device=device,
        name=_name(trace, device),
        timeline=timeline(between),
        idle=idle_by_cause(idle_stretches(between), work, found.call, trace),
        queue=queue_depth(work, found.call, window.start, window.end),
        memory=trace.memory.get(device, only),
    )


def _window(trace: RecordedTrace) -> _Window:
    launched = {call.correlation for call in trace.runtime}
    known = [work for work in trace.work if work.correlation in launched] or list(trace.work)
    start, end = (
        min((work.start for work in known), default=0),
        max((work.end for work in trace.work), default=0),
    )
    inside = [
        work
        for work in trace.work
        if (work.end > start and work.start < end) or work.start == work.end == start
    ]
    by_device = grouped(sorted(inside, key=attrgetter("device", "start")), attrgetter("device"))
    before = [work for work in trace.work if work.end <= start and work.start < start]
    left_out = LeftOut(calls=len(before), device=sum(work.end - work.start for work in before))
    return _Window(start, end, by_device, inside, left_out)


def _chip(trace: RecordedTrace) -> Hardware | None:
    """The table's row of the devices that worked.

    `None` where they differ, or the table does not have them.
    """
    names = {_name(trace, work.device) for work in trace.work}
    name = names.pop() if len(names) == 1 else None
    return lookup(name) if name else None


def _name(trace: RecordedTrace, device: int) -> str | None:
    """The device's name.

    Where the trace numbers devices otherwise than it lists them, the name that all of them have.
    """
    found = trace.devices.get(device)
    names = set(trace.devices.values())
    return names.pop() if found is None and len(names) == 1 else found


def _utilization(
    walk: HostWalk, steps: Sequence[StepTimes], window: int, devices: int, chip: Hardware | None
) -> TraceUtilization | None:
    """The utilization of the steps, or without any of the window in nanoseconds.

    `None` where nothing that multiplies was counted.
    """
    inside = (
        each
        for each in walk.counted
        if not steps or any(step.start <= each[0] < step.end for step in steps)
    )
    known = [
        (cost_of(sums.name, sums.inputs), precision(sums), is_recompute)
        for _, sums, is_recompute in inside
    ]
    products = [
        (cost, dtype, is_recompute)
        for cost, dtype, is_recompute in known
        if cost is not None and cost.macs
    ]
    if not products:
        return None
    macs = summed((dtype, cost.macs) for cost, dtype, _ in products)
    executed = summed((dtype, cost.executed_macs) for cost, dtype, _ in products)
    first = sum(cost.macs for cost, _, is_recompute in products if not is_recompute)
    again = sum(
        cost.macs * is_recompute + cost.recompute_macs for cost, _, is_recompute in products
    )
    seconds = (
        (sum(step.end - step.start for step in steps) if steps else window) / 1e9 * max(devices, 1)
    )
    most = max(macs, key=lambda dtype: macs[dtype])
    peaks = {dtype: chip.peak_flops_per_second.get(dtype or "") if chip else None for dtype in macs}
    rate = flops_per_second(first, seconds)
    peak = peaks[most]
    needed = [2 * executed[dtype] / each if each else None for dtype, each in peaks.items()]
    all_needed = sum_known(needed)
    return TraceUtilization(
        seconds=seconds,
        steps=len(steps),
        macs=first,
        flops_per_second=rate,
        mfu=of_peak(rate, peak),
        hfu=of_peak(flops_per_second(first + again, seconds), peak),
        executed=all_needed / seconds if all_needed is not None and seconds else None,
        precision=most,
        peak_flops_per_second=peak,
        hardware=chip.name if chip else None,
    )

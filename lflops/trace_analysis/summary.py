"""All that is known of one trace, as one value."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.analyze.speed.utilization import flops_per_second, of_peak
from lflops.hardware.chips import Hardware, lookup, named
from lflops.profile.records import Spread
from lflops.profile.series import grouped
from lflops.stretches import joined
from lflops.trace_analysis.collectives import CollectiveTimes, Occurrence, RankSkew, collectives, occurrences, rank_skew
from lflops.trace_analysis.host_walk import NOT_RECORDED, HostWalk, walk
from lflops.trace_analysis.idle import CAUSES, Cause, LaunchDelays, QueueDepth, idle_by_cause, launch_delays, queue_depth
from lflops.trace_analysis.operator_cost import cost_of
from lflops.trace_analysis.operators import (
    OperatorTimes,
    ShapeTimes,
    SpanTimes,
    Uncounted,
    operators,
    precision,
    shapes,
    span_times,
    uncounted,
)
from lflops.trace_analysis.timeline import (
    CategoryTimes,
    KernelTimes,
    PrecisionTimes,
    StepTimes,
    StreamTimes,
    by_category,
    by_precision,
    kernels,
    steps,
    streams,
)
from lflops.traces.device_states import DeviceTimeline, communicates, idle_stretches, states, timeline, total
from lflops.traces.recorded import DeviceWork, MemoryPeak, RecordedTrace


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


class TraceSummary(Struct, frozen=True, kw_only=True):
    """What a trace says. All times are whole nanoseconds, unless they are a `Spread`, which is seconds."""

    file: str
    rank: int | None
    world_size: int | None
    events: int  # how many events the file has
    recorded: int  # from the first moment on the host to the last
    before_device: int | None  # from the first step's beginning, or the recording's, to the first work of a device; `None` without a device
    device: DeviceTimeline | None  # the states of all devices together; `None` without a device
    idle: Mapping[Cause, int]  # the idle nanoseconds of all devices by what they were lost to
    launches: LaunchDelays | None
    devices: tuple[DeviceSummary, ...]
    streams: tuple[StreamTimes, ...]
    steps: tuple[StepTimes, ...]
    step: Spread | None  # median and quartiles of the steps; `None` without a step
    categories: tuple[CategoryTimes, ...]
    precisions: tuple[PrecisionTimes, ...]
    kernels: tuple[KernelTimes, ...]
    operators: tuple[OperatorTimes, ...]
    shapes: tuple[ShapeTimes, ...]  # the operators whose inputs tell what they computed, by these inputs
    uncounted: tuple[Uncounted, ...]
    utilization: TraceUtilization | None
    hardware: Hardware | None  # the chip that they are judged by
    collectives: tuple[CollectiveTimes, ...]
    modules: tuple[SpanTimes, ...]
    scopes: tuple[SpanTimes, ...]
    left_out: LeftOut  # what ran before the window
    has_stack: bool  # whether Python's frames were recorded, which takes the host's time
    negative: int  # how many events had a negative length; they are taken as 0 ns long
    unread: Mapping[str, int]  # events of kinds that nothing here knows, by category
    unlaunched: int  # how many pieces of work have no launch in the trace, so that they are in no operator
    damaged: int  # how many events are left out because they cannot be read
    damage: str  # what is wrong with the first of them


class _Window(NamedTuple):
    """The work that is analysed: from the first that the recording saw being launched on."""

    start: int
    end: int
    by_device: Mapping[int, Sequence[DeviceWork]]
    work: Sequence[DeviceWork]
    left_out: LeftOut


class TraceSummaries(Struct, frozen=True, kw_only=True):
    """Several traces, and how ranks wait for each other; `None` where the traces are not of different ranks."""

    traces: tuple[TraceSummary, ...]
    ranks: RankSkew | None


def summarise_all(traces: Iterable[RecordedTrace], hardware: Hardware | str | None = None) -> TraceSummaries:
    """Analyse traces one after the other as `summarise` does, and together where they are of different ranks."""
    analysed = [_analysed(trace, hardware) for trace in traces]
    by_rank = {summary.rank: found for summary, found in analysed if summary.rank is not None}
    skew = rank_skew(by_rank) if len(by_rank) == len(analysed) else None
    return TraceSummaries(traces=tuple(summary for summary, _ in analysed), ranks=skew)


def summarise(trace: RecordedTrace, hardware: Hardware | str | None = None) -> TraceSummary:
    """Analyse one trace on a chip, or on that of this name in the table; `None` looks for the name that the trace has."""
    return _analysed(trace, hardware)[0]


def _analysed(trace: RecordedTrace, hardware: Hardware | str | None) -> tuple[TraceSummary, tuple[Occurrence, ...]]:
    chip = named(hardware) if isinstance(hardware, str) else hardware or _chip(trace)
    window = _window(trace)
    found = walk(trace, window.work, lambda call: cost_of(call.name, call.inputs) is not None)
    rows = tuple(_device(trace, window, device, found) for device in window.by_device)
    step_times = steps(trace, found)
    span = window.end - window.start or trace.last - trace.first
    found_collectives = occurrences(window.work, found, trace)
    computing = joined((work.start, work.end) for work in window.work if work.kind != "copy" and not communicates(work))
    begin = min((step.start for step in step_times), default=trace.first)
    summary = TraceSummary(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        events=trace.events,
        recorded=trace.last - trace.first,
        before_device=max(window.start - begin, 0) if rows else None,
        device=total(row.timeline for row in rows) if rows else None,
        idle={cause: nanoseconds for cause in CAUSES if (nanoseconds := sum(row.idle.get(cause, 0) for row in rows))},
        launches=launch_delays(window.work, found.call),
        devices=rows,
        streams=streams(window.work, window.start, window.end),
        steps=step_times,
        step=Spread.of(step.seconds for step in step_times),
        categories=by_category(window.work, found),
        precisions=by_precision(window.work, found),
        kernels=kernels(window.work, found),
        operators=operators(found),
        shapes=shapes(found, chip),
        uncounted=uncounted(found),
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
    only = next(iter(trace.memory.values())) if len(window.by_device) == len(trace.memory) == 1 else None
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
    start, end = min((work.start for work in known), default=0), max((work.end for work in trace.work), default=0)
    inside = [work for work in trace.work if (work.end > start and work.start < end) or work.start == work.end == start]
    by_device = grouped(sorted(inside, key=attrgetter("device", "start")), attrgetter("device"))
    before = [work for work in trace.work if work.end <= start and work.start < start]
    left_out = LeftOut(calls=len(before), device=sum(work.end - work.start for work in before))
    return _Window(start, end, by_device, inside, left_out)


def _chip(trace: RecordedTrace) -> Hardware | None:
    """The table's row of the devices that worked; `None` where they differ, or the table does not have them."""
    names = {_name(trace, work.device) for work in trace.work}
    name = names.pop() if len(names) == 1 else None
    return lookup(name) if name else None


def _name(trace: RecordedTrace, device: int) -> str | None:
    """The device's name. Where the trace numbers devices otherwise than it lists them, the name that all of them have."""
    found = trace.devices.get(device)
    names = set(trace.devices.values())
    return names.pop() if found is None and len(names) == 1 else found


def _utilization(walk: HostWalk, steps: Sequence[StepTimes], window: int, devices: int, chip: Hardware | None) -> TraceUtilization | None:
    """The utilization of the steps, or without any of the window in nanoseconds; `None` where nothing that multiplies was counted."""
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

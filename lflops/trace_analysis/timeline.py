"""The steps of a trace, what ran on each stream, and the kernels by name, by category, by precision."""

import statistics
from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.series import grouped, summed
from lflops.stretches import joined, shares
from lflops.trace_analysis.categories import CATEGORIES, Category, category_of_kernel, precision_by_name, tensor_cores_by_name
from lflops.trace_analysis.host_walk import HostWalk
from lflops.trace_analysis.operator_cost import precision_of
from lflops.traces.device_states import DeviceTimeline, communicates, states, timeline, total
from lflops.traces.recorded import DeviceWork, RecordedTrace


class StreamTimes(Struct, frozen=True, kw_only=True):
    """What ran on one stream of a device, in nanoseconds and numbers; `busy` is less than the sum where kernels of a stream overlap."""

    device: int
    stream: int
    busy: int
    kernels: int
    copies: int


def streams(work: Iterable[DeviceWork], start: int, end: int) -> tuple[StreamTimes, ...]:
    """Sum what ran on each stream between two moments, the busiest first."""
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


class KernelTimes(Struct, frozen=True, kw_only=True):
    """All calls of one kernel, in nanoseconds, and the operators that launched it, those with the most time first."""

    name: str
    category: Category
    precision: str | None
    tensor_cores: bool | None  # whether it runs on tensor or matrix cores; `None` where its name does not tell
    calls: int
    device: int
    median: int
    longest: int
    operators: tuple[str, ...]


class CategoryTimes(Struct, frozen=True, kw_only=True):
    """The device's work of one category; nanoseconds. Work that overlaps counts as often as it runs."""

    category: Category
    device: int
    calls: int


class PrecisionTimes(Struct, frozen=True, kw_only=True):
    """The computing kernels of one precision, which is `None` where neither the inputs nor the names tell; nanoseconds."""

    precision: str | None
    device: int
    calls: int
    tensor_cores: int  # in kernels whose names tell that they run on tensor or matrix cores


def _operator(walk: HostWalk, work: DeviceWork) -> str | None:
    operator = walk.launch(work).operator
    return operator.name if operator is not None else None


def _category(walk: HostWalk, work: DeviceWork) -> Category:
    return category_of_kernel(work, _operator(walk, work))


def _precision(walk: HostWalk, work: DeviceWork) -> str | None:
    """Take the precision from the kernel's name for TF32, which the inputs do not tell, else by the operator's inputs, else by the name."""
    by_name, operator = precision_by_name(work.name), walk.launch(work).operator
    by_inputs = precision_of(operator.inputs) if operator is not None else None
    return by_name if by_inputs is None or (by_name == "tf32" and by_inputs == "fp32") else by_inputs


def kernels(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[KernelTimes, ...]:
    """The kernels by name, those with the most time first."""
    rows = [_kernel(name, found, walk) for name, found in grouped(work, attrgetter("name")).items()]
    return tuple(sorted(rows, key=lambda row: (-row.device, row.name)))


def _kernel(name: str, found: Sequence[DeviceWork], walk: HostWalk) -> KernelTimes:
    times = [each.end - each.start for each in found]
    timed = list(zip(found, times, strict=True))
    by_operator = summed((operator, took) for each, took in timed if (operator := _operator(walk, each)) is not None)
    by_category = summed((_category(walk, each), took) for each, took in timed)
    by_precision = summed((_precision(walk, each), took) for each, took in timed)
    computes = found[0].kind == "kernel" and not communicates(found[0])
    return KernelTimes(
        name=name,
        category=max(by_category, key=lambda category: by_category[category]),
        precision=max(by_precision, key=lambda precision: by_precision[precision]) if computes else None,
        tensor_cores=tensor_cores_by_name(name) if computes else None,
        calls=len(found),
        device=sum(times),
        median=round(statistics.median(times)),
        longest=max(times),
        operators=tuple(sorted(by_operator, key=lambda operator: -by_operator[operator])),
    )


def by_category(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[CategoryTimes, ...]:
    """The work by category, the most time first."""
    groups = grouped(work, lambda each: _category(walk, each))
    rows = (
        CategoryTimes(category=category, device=sum(each.end - each.start for each in groups[category]), calls=len(groups[category]))
        for category in CATEGORIES
        if category in groups
    )
    return tuple(sorted(rows, key=lambda row: -row.device))


def by_precision(work: Iterable[DeviceWork], walk: HostWalk) -> tuple[PrecisionTimes, ...]:
    """The kernels by precision, the most time first; copies, fills and communication are left out."""
    computing = (each for each in work if each.kind == "kernel" and _category(walk, each) != "communication")
    rows = (
        PrecisionTimes(
            precision=precision,
            device=sum(each.end - each.start for each in found),
            calls=len(found),
            tensor_cores=sum(each.end - each.start for each in found if tensor_cores_by_name(each.name)),
        )
        for precision, found in grouped(computing, lambda each: _precision(walk, each)).items()
    )
    return tuple(sorted(rows, key=lambda row: -row.device))

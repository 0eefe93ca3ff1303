"""Compute the times of operators, and the device work of modules, from Kineto's in-memory events.

Operators call other operators, so the events of a thread are nested. Device work belongs to the
operator that launched it, even if the work runs later, and to the module that ran the operator.
Calls are summed by the name of the operator, as in torch's `key_averages()`. The sums also contain
calls of the device's runtime, such as `cudaLaunchKernel`. `trace/analysis/host_walk.py` is
different: it reads a trace file, and sums operators by name and inputs.

An event's key is a number that connects events: it is stored in the event of an operator, and in
the events of the device work that the operator launched.

    host     aten::linear [ aten::addmm [ launch ] ]     self time of linear is without addmm
    device                                    kernel     belongs to addmm
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from operator import attrgetter, ne, not_, or_
from typing import Any, Literal, NamedTuple

from torch.autograd import DeviceType  # type: ignore[attr-defined,unused-ignore]

from lflops.attribution.module_tracker import AutogradSegments
from lflops.model.module_tree import ModuleTree
from lflops.profile.records import Call, ModulePhase, TracedOperator
from lflops.profile.series import grouped
from lflops.trace.record.compiled_time import Region, RegionEvent
from lflops.trace.record.module_log import THREAD, LogEntry, Replay
from lflops.trace.recorded import (
    NODE,
    STEP,
    DeviceEvent,
    HostItem,
    OperatorCall,
    RecordedTrace,
    RuntimeCall,
    SliceTimes,
    Span,
    outer_first,
)

REGION = "## Call CompiledFxGraph "
"""Prefix of the names of events that record a run of a compiled graph. The graph's key follows."""
LAUNCHES = "c10d::"
"""Prefix of the names of operators that launch collectives."""
MAX_TABLE_ROWS = 100
"""Maximum number of operators that a profile lists by device self time.

It also lists at most as many operators by host self time.
"""

_WORK: dict[str, Literal["copy", "fill"]] = {"Memcpy": "copy", "Memset": "fill"}
"""Kind of device work by the first six characters of its name. All other work is a kernel."""

NO_OPERATORS = frozenset(
    {
        "[memory]",
        "[OutOfMemory]",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
    }
)
"""Names of events that are not operators. torch's table leaves out the same events."""

_RawEvent = tuple[str, int, int, int, int, int, bool, bool, bool, int, int]
"""Fields of an event, in the order that the docstring of `recorded` lists."""


def read(raw: Sequence[Any], *, device: bool, stack: bool) -> RecordedTrace:
    """Convert Kineto's events to a trace.

    Fields are read column by column, because a call from Python for each event and field is slow.

    Args:
        raw: Kineto's events.
        device: Whether a device was recorded.
        stack: Whether the Python stack was recorded.
    """
    if not raw:
        return recorded(())
    kind = type(raw[0])
    threads = list(map(kind.start_thread_id, raw))
    is_named = map(kind.is_user_annotation, raw)
    if stack and hasattr(kind, "is_python_function"):
        is_named = map(or_, is_named, map(kind.is_python_function, raw))
    ends_elsewhere = map(ne, threads, map(kind.end_thread_id, raw))
    columns: list[Iterable[Any]] = [
        map(kind.name, raw),
        map(kind.start_ns, raw),
        map(kind.end_ns, raw),
        threads,
        map(kind.sequence_nr, raw),
        map(kind.fwd_thread_id, raw),
        is_named,
        map(or_, ends_elsewhere, map(kind.is_async, raw)),
    ]
    if device:
        is_on_device = (each.device_type() != DeviceType.CPU for each in raw)
        columns.append(is_on_device)
        columns.append(map(kind.correlation_id, raw))
        columns.append(map(kind.linked_correlation_id, raw))
    else:
        # Without a device, `is_on_device`, `key` and `link` are 0 for all events.
        zeros = [0] * len(raw)
        columns += [zeros, zeros, zeros]
    events = zip(*columns, strict=True)
    if stack and hasattr(kind, "is_hidden_event"):
        return recorded(compress(events, map(not_, map(kind.is_hidden_event, raw))))
    return recorded(events)


def recorded(events: Iterable[_RawEvent]) -> RecordedTrace:
    """Convert events to a trace.

    Args:
        events: Tuples of these fields:

            * `name`, `start`, `end` and `thread`; times are nanoseconds since 1970.
            * `number`: For a backward node, the sequence number that it shares with its forward
              operator. For other operators, -1 or the sequence number of the next node.
            * `built_on`: For a backward node, the thread that built it.
            * `is_named`: Whether it is a named span rather than an operator.
            * `spans_threads`: Whether it ended on another thread than it began on.
            * `is_on_device`: Whether the device ran it.
            * `key`: Number that identifies the event.
            * `link`: For device work and runtime calls, the `key` of the operator that launched
              them; 0 if there is none.
    """
    trace = RecordedTrace()
    operators_of_calls: list[int] = []
    for (
        name,
        start,
        end,
        thread,
        number,
        built_on,
        is_named,
        spans_threads,
        is_on_device,
        key,
        link,
    ) in events:
        if is_on_device:
            if not is_named:
                trace.work.append(
                    DeviceEvent(
                        _WORK.get(name[:6], "kernel"), name, 0, thread, start, end, key, link
                    )
                )
        elif is_named:
            kind: Literal["step", "scope"] = "step" if name.startswith(STEP) else "scope"
            trace.spans.append(
                Span(kind, name, thread, start, end, external=key, spans_threads=spans_threads)
            )
        elif link:
            operators_of_calls.append(link)
            trace.runtime.append(RuntimeCall(name, thread, start, end, key))
        elif name not in NO_OPERATORS:
            trace.operators.append(
                OperatorCall(
                    name,
                    thread,
                    start,
                    end,
                    key,
                    sequence=number,
                    forward_thread=built_on,
                    spans_threads=spans_threads,
                )
            )
    if operators_of_calls:
        # The device's runtime numbers threads differently from torch.
        threads = {each.external: each.thread for each in trace.on_host()}
        for call, operator in zip(trace.runtime, operators_of_calls, strict=True):
            call.thread = threads.get(operator, call.thread)
    return trace


class Communicated(NamedTuple):
    """The time of one collective.

    Attributes:
        kind: Kind of the collective, for example `all_reduce`.
        nanoseconds: Duration of the collective.
        exposed: Part of `nanoseconds` in which nothing was computed.
    """

    kind: str
    nanoseconds: int
    exposed: int


@dataclass(slots=True)
class _Times(SliceTimes):
    """Times of all events with the same name.

    Attributes:
        is_node: Whether the events are backward nodes.
        is_region: Whether the events are runs of a compiled graph.
        launches: Whether the events are operators that launch collectives.
    """

    is_node: bool = False
    is_region: bool = False
    launches: bool = False


@dataclass(slots=True)
class _Open(RegionEvent):
    """An event that has begun and not ended at the current position in the thread's events.

    The next events can be inside it.
    """

    times: _Times = field(kw_only=True)
    children: int = 0
    region: Region | None = None


@dataclass(kw_only=True)
class AttributedTrace:
    """Kineto's events, attributed to the modules that ran at the same time.

    Attributes:
        device: For each batch, the device time in nanoseconds, keyed by the module and phase that
            launched the work. If these are unknown, the work belongs to the root module.
        batch_at: Function that returns the index of the batch that contains a given time.
        calls: Calls of modules and scopes inside batches, on all threads.
        operators: The operators with the most time, over all batches.
        communication: Total and exposed time of collectives over all batches, in nanoseconds. The
            keys are the module and phase that launched the collectives, and the kind of collective.
        regions: Runs of compiled graphs.
    """

    device: list[dict[ModulePhase, float]]
    batch_at: Callable[[int], int]
    calls: list[Call] = field(default_factory=list)
    operators: tuple[TracedOperator, ...] = ()
    communication: dict[tuple[ModulePhase, str], tuple[int, int]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)


def join(
    trace: RecordedTrace,
    logs: Mapping[int, Sequence[LogEntry]],
    home: int,
    tree: ModuleTree,
    communicated: Mapping[int, Sequence[Communicated]] | None = None,
    *,
    on_host: Mapping[int, Communicated] | None = None,
) -> AttributedTrace:
    """Attribute each event to the module that ran at that time.

    Args:
        trace: Kineto's events.
        logs: For each thread, the log of the times at which modules run. The key is Python's number
            of the thread.
        home: Python's number of the training thread.
        tree: The modules.
        communicated: Collectives that ran on the device. The key is `OperatorCall.external` of the
            operator that launched them.
        on_host: Collectives that ran on the host, keyed by the start time of the operator that
            launched them.
    """
    begun = steps_of(trace)
    steps = _StepIntervals(begun)
    python_numbers = _python_numbers(trace)
    training_thread = None
    if begun:
        training_thread = begun[0].thread
        python_numbers[training_thread] = home
    work: dict[int, list[DeviceEvent]] = grouped(
        sorted(trace.work, key=attrgetter("start")), attrgetter("external")
    )
    launchers: set[int] = set()
    if work:
        launchers = {each.external for each in trace.on_host() if not each.spans_threads} - {0}
    launched = {key: found for key, found in work.items() if key in launchers}
    walk = _Walk(steps, launched, communicated or {}, on_host or {})
    by_thread: defaultdict[int, list[HostItem]] = defaultdict(list)
    for each in steps.inside(trace.on_host()):
        if each.spans_threads:
            walk.count(each)
        else:
            by_thread[each.thread].append(each)
    threads = sorted(by_thread, key=lambda thread: (thread != training_thread, thread))
    segments = {thread: AutogradSegments(0) for thread in threads}
    for number, thread in enumerate(threads):
        # No Python thread has the number 0.
        entries = logs.get(python_numbers.get(thread, 0), ())
        own = segments[thread]
        replay = Replay(tree, entries, thread=number, segments=segments, own=own)
        walk.walk_thread(by_thread[thread], replay)
    # Threads with a log but without events. Their modules still appear as calls.
    without_events = logs.keys() - python_numbers.values()
    home_first = sorted(without_events, key=lambda python_number: python_number != home)
    for number, python_number in enumerate(home_first, len(threads)):
        own = AutogradSegments(0)
        replay = Replay(tree, logs[python_number], thread=number, segments=segments, own=own)
        walk.found.calls += replay.finish()
    for event in trace.work:
        if event.external not in launchers and event.start in steps:
            walk.add_device_time(steps.index(event.start), ModulePhase("", "other"), event.duration)
    return walk.result()


def _python_numbers(trace: RecordedTrace) -> dict[int, int]:
    """Return Python's number of each thread with a module log, keyed by Kineto's number.

    The training thread is missing, because it records no `THREAD` event.
    """
    numbers = {}
    for span in trace.spans:
        if span.name.startswith(THREAD):
            numbers[span.thread] = int(span.name.removeprefix(THREAD))
    return numbers


def steps_of(trace: RecordedTrace) -> list[Span]:
    """Return the profiler's steps in order."""
    return sorted(trace.steps(), key=attrgetter("start", "end"))


class _StepIntervals:
    """The intervals of the recorded steps.

    The steps need not touch each other: for example, validation can run between two steps.
    """

    def __init__(self, steps: Sequence[Span]) -> None:
        """Store the boundaries of `steps`, which must be in order."""
        self.number = len(steps)
        self._changes: list[int] = []
        for step in steps:
            self._changes.append(step.start)
            self._changes.append(step.end)

    def __contains__(self, moment: int) -> bool:
        return bisect.bisect_right(self._changes, moment) % 2 == 1

    def inside(self, items: Iterable[HostItem]) -> Iterator[HostItem]:
        """Yield the items that begin in a step.

        Consecutive items are usually in the same step, so the step of the previous item is checked
        first.
        """
        begin, end = 0, 0
        for item in items:
            if begin <= item.start < end:
                yield item
            elif item.start in self:
                index = bisect.bisect_right(self._changes, item.start)
                begin, end = self._changes[index - 1], self._changes[index]
                yield item

    def index(self, moment: int) -> int:
        return bisect.bisect_right(self._changes, moment) // 2

    def change(self, moment: int) -> float:
        """Return the next time after `moment` at which a step begins or ends."""
        index = bisect.bisect_right(self._changes, moment)
        return self._changes[index] if index < len(self._changes) else inf


class _Walk:
    """Attributes the events of all threads, one thread after the other."""

    def __init__(
        self,
        steps: _StepIntervals,
        work: Mapping[int, Sequence[DeviceEvent]],
        communicated: Mapping[int, Sequence[Communicated]],
        on_host: Mapping[int, Communicated],
    ) -> None:
        """Prepare to attribute events.

        Args:
            steps: The recorded steps.
            work: Device work. The key is `OperatorCall.external` of the operator that launched it.
            communicated: Collectives on the device, with the same keys.
            on_host: Collectives on the host by the start time of the operator that launched them.
        """
        self.found = AttributedTrace(device=[{} for _ in range(steps.number)], batch_at=steps.index)
        self._steps = steps
        self._work = work
        self._nanoseconds: dict[int, int] = {}
        for key, found in work.items():
            self._nanoseconds[key] = sum(each.duration for each in found)
        self._communicated = communicated
        self._on_host = on_host
        self._operators: dict[str, _Times] = {}
        self._spans: dict[str, _Times] = {}
        # Pairs of an operator and an operator of the same name that it calls.
        self._doubles: list[tuple[_Open, _Open]] = []

    def count(self, item: HostItem) -> _Times:
        """Add a call to the totals of all calls with its name, and return these totals."""
        table = self._spans if isinstance(item, Span) else self._operators
        name = item.name
        times = table.get(name)
        if times is None:
            times = _Times(
                name,
                is_node=name.startswith(NODE) and isinstance(item, OperatorCall),
                is_region=name.startswith(REGION),
                launches=name.startswith(LAUNCHES),
            )
            table[name] = times
        times.calls += 1
        times.host += item.end - item.start
        return times

    def walk_thread(self, items: Iterable[HostItem], replay: Replay) -> None:
        """Assign the events of one thread to modules.

        `replay` provides the module that runs at the time of each event.
        """
        opened: list[_Open] = []
        running = replay.module_phase
        step = 0
        due: float = -1
        for item in outer_first(items, opened, may_cross=False):
            times = self.count(item)
            if item.start >= due or times.is_node:
                replay.go_on(item.start)
                if times.is_node and isinstance(item, OperatorCall):
                    replay.begin_node(item.sequence, item.forward_thread, item.start, item.end)
                step = self._steps.index(item.start)
                due = min(replay.due, self._steps.change(item.start))
                running = replay.module_phase
            event = _Open(item.name, item.start, item.end, times=times)
            self._begin(event, item.external, opened, step, running)
            took = self._nanoseconds.get(item.external)
            if took is not None:
                self.add_device_time(step, running, took)
                self._communicate(running, self._communicated.get(item.external, ()))
                replay.on_device(took)
                times.self_device += took
                for event in opened:
                    event.times.device += took
                    event.device += took
        self.found.calls += replay.finish()

    def add_device_time(self, step: int, running: ModulePhase, nanoseconds: int) -> None:
        """Add the device time of work to the module and phase that launched it, in one step."""
        device = self.found.device[step]
        if nanoseconds:
            device[running] = device.get(running, 0) + nanoseconds

    def _communicate(self, running: ModulePhase, launched: Iterable[Communicated]) -> None:
        for kind, nanoseconds, exposed in launched:
            total, total_exposed = self.found.communication.get((running, kind), (0, 0))
            sums = total + nanoseconds, total_exposed + exposed
            self.found.communication[running, kind] = sums

    def _begin(
        self, event: _Open, key: int, opened: list[_Open], step: int, running: ModulePhase
    ) -> None:
        times = event.times
        took = event.end - event.start
        times.self_host += took
        if times.launches and event.start in self._on_host:
            self._communicate(running, [self._on_host[event.start]])
        if opened:
            parent = opened[-1]
            parent.times.self_host -= took
            parent.children += 1
            if times is parent.times:
                self._doubles.append((parent, event))
            if parent.region is not None:
                parent.region.events.append(event)
        if times.is_region:
            event.region = Region(
                key=event.name.removeprefix(REGION).partition(" ")[0],
                start=event.start,
                end=event.end,
                batch=step,
                running=running,
                kernels=[(each.name, each.duration) for each in self._work.get(key, ())],
            )
            self.found.regions.append(event.region)
        opened.append(event)

    def result(self) -> AttributedTrace:
        """Return the results of all threads.

        If an operator calls an operator of the same name, such as its variant with `out=`, the time
        of the inner call counts once. If it calls nothing else, the two calls count as one, as in
        torch's table.
        """
        for outer, inner in self._doubles:
            outer.times.host -= inner.end - inner.start
            outer.times.device -= inner.device
            if outer.children == 1:
                outer.times.calls -= 1
        self.found.calls = [call for call in self.found.calls if call.start in self._steps]
        self.found.operators = _table(self._operators.values())
        return self.found


def _table(times: Iterable[SliceTimes]) -> tuple[TracedOperator, ...]:
    """Return the operators with the most device self time and with the most host self time.

    Each group has at most `MAX_TABLE_ROWS` operators.
    """
    called = [each for each in times if each.calls]
    with_device = [each for each in called if each.self_device]
    with_device.sort(key=lambda each: -each.self_device)
    by_host = sorted(called, key=lambda each: -each.self_host)
    chosen = [*with_device[:MAX_TABLE_ROWS], *by_host[:MAX_TABLE_ROWS]]
    operators = {}
    for each in chosen:
        operators[each.name] = TracedOperator(
            name=each.name,
            calls=each.calls,
            host_seconds=each.host / 1e9,
            self_host_seconds=max(each.self_host, 0) / 1e9,
            device_seconds=each.device / 1e9,
            self_device_seconds=each.self_device / 1e9,
        )
    return tuple(operators.values())

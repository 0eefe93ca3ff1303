"""What Kineto's raw events say: operators with their own time, and the device's work by module.

An event is inclusive, and an operator calls others: on each thread events are nested by their
times. What the device does is tied to the operator that asked for it, not to the moment at which it
was done. The sums are those of torch's own table, by name, with calls of the device's library as
rows. `trace/analysis/host_walk.py` sums the operators of a file by their inputs.

    host     aten::linear [ aten::addmm [ launch ] ]                own: linear without addmm
    device                                    kernel                tied to addmm, so to the module that ran addmm
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
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
"""Begins the names of the runs of compiled graphs; the graph's key follows."""

# begins the names of the operators that launch collectives
LAUNCHES = "c10d::"
_WORK: dict[str, Literal["copy", "fill"]] = {
    "Memcpy": "copy",
    "Memset": "fill",
    # by how a name of the device begins; else a kernel
}
MAX_TABLE_ROWS = (
    # operators of the table: those with the most self time on the device, and on the host
    20
)

NO_OPERATORS = {
    *("[memory]", "[OutOfMemory]", "aten::is_leaf", "aten::output_nr", "aten::_version"),
    *(f"profiler::_record_function_{part}" for part in ("enter", "enter_new", "exit")),
}
"""What torch's own table leaves out as well."""


def read(raw: Sequence[Any], *, device: bool, stack: bool) -> RecordedTrace:
    """Kineto's events as a trace.

    Where no device or no Python stack was recorded, nothing is asked about it.
    """
    if not raw:
        return recorded(())
    kind = type(raw[0])
    threads = list(map(kind.start_thread_id, raw))
    named = map(kind.is_user_annotation, raw)
    loose = map(ne, threads, map(kind.end_thread_id, raw))
    columns: list[Iterable[Any]] = [
        map(kind.name, raw),
        map(kind.start_ns, raw),
        map(kind.end_ns, raw),
        threads,
        map(kind.sequence_nr, raw),
        map(kind.fwd_thread_id, raw),
        map(or_, named, map(kind.is_python_function, raw))
        if stack and hasattr(kind, "is_python_function")
        else named,
        map(or_, loose, map(kind.is_async, raw)),
    ]
    if device:
        columns += [
            (each.device_type() != DeviceType.CPU for each in raw),
            map(kind.correlation_id, raw),
        ]
        columns += [map(kind.linked_correlation_id, raw)]
    else:
        columns += [repeat(each, len(raw)) for each in (False, 0, 0)]
    events = zip(*columns, strict=True)
    return recorded(
        compress(events, map(not_, map(kind.is_hidden_event, raw)))
        if stack and hasattr(kind, "is_hidden_event")
        else events
    )


def recorded(
    events: Iterable[tuple[str, int, int, int, int, int, bool, bool, bool, int, int]],
) -> RecordedTrace:
    """A trace of events, each a tuple.

    name, start, end, thread: The times are nanoseconds since 1970. number: Of a node of backward,
    when it was built; of any other -1, or the number of the next node. built_on: Of a node of
    backward, the thread that built it. is_named: Whether somebody named a stretch of time, rather
    than that an operator ran. spans_threads: Whether it began on one thread and ended on another.
    is_on_device: Whether the device did it. key: The number of the event. link: The key of the
    operator for which the device or its library did it; 0 is none.
    """
    trace = RecordedTrace()
    # of the calls of the device's library
    links: list[int] = []
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
                Span(kind, name, thread, start, end, "forward", None, key, spans_threads)
            )
        elif link:
            links.append(link)
            trace.runtime.append(RuntimeCall(name, thread, start, end, key))
        elif name not in NO_OPERATORS:
            trace.operators.append(
                OperatorCall(
                    name, thread, start, end, key, None, number, built_on, None, spans_threads
                )
            )
    threads = {each.external: each.thread for each in trace.on_host()} if links else {}
    for link, call in zip(
        links,
        trace.runtime,
        strict=True,
        # the device's library numbers threads otherwise
    ):
        call.thread = threads.get(link, call.thread)
    return trace


class Communicated(NamedTuple):
    """A collective: its kind, how long its kernel ran, and for how much of that nothing was computed, in nanoseconds."""

    kind: str
    nanoseconds: int
    exposed: int


@dataclass(slots=True)
class _Open(RegionEvent):
    """An event that has begun."""

    times: SliceTimes = field(kw_only=True)
    children: int = 0
    region: Region | None = None


@dataclass(kw_only=True)
class AttributedTrace:
    """Kineto's events, joined with the log of modules."""

    # Nanoseconds of the device, by step, and by module and phase of the operator that launched it;
    # other work is the root's.
    device: list[dict[ModulePhase, float]]
    calls: list[Call] = field(
        default_factory=list
        # of modules and named parts, on all threads, in steps
    )
    operators: tuple[
        TracedOperator, ...
        # the table, over all steps. What is between them, as a validation, is in none of this
    ] = ()
    # Nanoseconds of collectives and of these the exposed ones, by module and phase of what launched
    # them, and by kind; over all steps.
    communication: dict[tuple[ModulePhase, str], tuple[int, int]] = field(default_factory=dict)
    # the runs of compiled graphs
    regions: list[Region] = field(default_factory=list)
    # the index of the step at a moment within one
    batch_at: Callable[[int], int]


def join(
    trace: RecordedTrace,
    logs: Mapping[int, Sequence[LogEntry]],
    home: int,
    tree: ModuleTree,
    communicated: Mapping[int, Sequence[Communicated]] | None = None,
    *,
    on_host: Mapping[int, Communicated] | None = None,
) -> AttributedTrace:
    """Tie each event to the module that ran.

    `home` is the thread that trains; `on_host` are collectives by the start of their launch.
    """
    begun = steps_of(trace)
    pythons = {
        span.thread: int(span.name.removeprefix(THREAD))
        for span in trace.spans
        if span.name.startswith(THREAD)
    }
    trainer = begun[0].thread if begun else None
    steps = _StepIntervals(begun)
    if trainer is not None:
        pythons[trainer] = home
    done = grouped(sorted(trace.work, key=attrgetter("start")), attrgetter("external"))
    askers = (
        {each.external for each in trace.on_host() if not each.spans_threads} - {0}
        if done
        else set()
    )
    walk = _Walk(
        steps, {key: done[key] for key in done if key in askers}, communicated or {}, on_host or {}
    )
    by_thread: defaultdict[int, list[HostItem]] = defaultdict(list)
    loose: list[HostItem] = []
    for each in trace.on_host():
        if each.start in steps:
            (loose if each.spans_threads else by_thread[each.thread]).append(each)
    order = sorted(by_thread, key=lambda thread: (thread != trainer, thread))
    segments = {thread: AutogradSegments(0) for thread in order}
    for each in loose:
        walk.count(each)
    for number, thread in enumerate(order):
        # no thread of Python has the number 0
        entries = logs.get(pythons.get(thread, 0), ())
        walk.thread(
            by_thread[thread],
            Replay(tree, entries, thread=number, segments=segments, own=segments[thread]),
        )
    without_events = sorted(logs.keys() - pythons.values(), key=lambda python: python != home)
    for number, python in enumerate(without_events, len(order)):
        walk.found.calls += Replay(
            tree, logs[python], thread=number, segments=segments, own=AutogradSegments(0)
        ).finish()
    for work in trace.work:
        if work.external not in askers and work.start in steps:
            walk.on_device(steps.index(work.start), ModulePhase("", "other"), work.end - work.start)
    return walk.joined()


def steps_of(trace: RecordedTrace) -> list[Span]:
    """The steps of the profiler, in their order."""
    return sorted(
        (span for span in trace.spans if span.kind == "step"), key=attrgetter("start", "end")
    )


class _StepIntervals:
    """The recorded steps in time. Between two of them other things may happen, as a validation."""

    def __init__(self, steps: Iterable[Span]) -> None:
        self._changes = [moment for step in steps for moment in (step.start, step.end)]
        self.number = len(self._changes) // 2

    def __contains__(self, moment: int) -> bool:
        return bisect.bisect_right(self._changes, moment) % 2 == 1

    def index(self, moment: int) -> int:
        return bisect.bisect_right(self._changes, moment) // 2

    def change(self, moment: int) -> float:
        """The next moment at which a step begins or ends."""
        index = bisect.bisect_right(self._changes, moment)
        return self._changes[index] if index < len(self._changes) else inf


class _Walk:
    """Goes through the events of one thread after the other."""

    def __init__(
        self,
        steps: _StepIntervals,
        kernels: Mapping[int, Sequence[DeviceEvent]],
        communicated: Mapping[int, Sequence[Communicated]],
        on_host: Mapping[int, Communicated],
    ) -> None:
        self.steps = steps
        self.asked = {
            key: sum(each.end - each.start for each in done) for key, done in kernels.items()
        }
        self.communicated, self.on_host = communicated, on_host
        self.times: dict[str, SliceTimes] = {}
        self.named: dict[str, SliceTimes] = {}
        self.found = AttributedTrace(device=[{} for _ in range(steps.number)], batch_at=steps.index)
        self._kernels = kernels
        self._doubles: list[
            tuple[_Open, _Open]
            # an operator that calls one of the same name, then that one
        ] = []

    def count(self, item: HostItem) -> SliceTimes:
        """Count a call, and return the sums of its name."""
        table = self.named if isinstance(item, Span) else self.times
        times = table.get(item.name) or table.setdefault(item.name, SliceTimes(item.name))
        times.calls += 1
        times.host += item.end - item.start
        return times

    def thread(self, items: Iterable[HostItem], replay: Replay) -> None:
        opened: list[_Open] = []
        running = replay.module_phase
        due: float = -1
        for item in outer_first(items, opened, may_cross=False):
            start, key, times = item.start, item.external, self.count(item)
            is_node = item.name.startswith(NODE)
            if start >= due or is_node:
                replay.go_on(start)
                if is_node and isinstance(item, OperatorCall):
                    replay.begin_node(item.sequence, item.forward_thread, start, item.end)
                step = self.steps.index(start)
                due = min(replay.due, self.steps.change(start))
                running = replay.module_phase
            self._begin(_Open(item.name, start, item.end, times=times), key, opened, step, running)
            if key in self.asked:
                self.on_device(step, running, self.asked[key])
                self._communicate(running, self.communicated.get(key, ()))
                replay.on_device(self.asked[key])
                times.self_device += self.asked[key]
                for event in opened:
                    event.times.device += self.asked[key]
                    event.device += self.asked[key]
        self.found.calls += replay.finish()

    def on_device(self, step: int, running: ModulePhase, nanoseconds: int) -> None:
        device = self.found.device[step]
        if nanoseconds:
            device[running] = device.get(running, 0) + nanoseconds

    def _communicate(self, running: ModulePhase, launched: Iterable[Communicated]) -> None:
        for kind, nanoseconds, exposed in launched:
            whole, alone = self.found.communication.get((running, kind), (0, 0))
            self.found.communication[running, kind] = whole + nanoseconds, alone + exposed

    def _begin(
        self, event: _Open, key: int, opened: list[_Open], step: int, running: ModulePhase
    ) -> None:
        event.times.self_host += event.end - event.start
        if event.start in self.on_host and event.name.startswith(LAUNCHES):
            self._communicate(running, [self.on_host[event.start]])
        if opened:
            parent = opened[-1]
            parent.times.self_host -= event.end - event.start
            parent.children += 1
            if event.times is parent.times:
                self._doubles.append((parent, event))
            if parent.region is not None:
                parent.region.events.append(event)
        if event.name.startswith(REGION):
            graph = event.name.removeprefix(REGION).partition(" ")[0]
            kernels = [(each.name, each.end - each.start) for each in self._kernels.get(key, ())]
            event.region = Region(
                key=graph,
                start=event.start,
                end=event.end,
                batch=step,
                running=running,
                kernels=kernels,
            )
            self.found.regions.append(event.region)
        opened.append(event)

    def joined(self) -> AttributedTrace:
        """Join what all threads did.

        An operator that only calls another of its name is one with it, as in torch's own table.
        """
        for outer, inner in self._doubles:
            if outer.children == 1:
                outer.times.calls -= 1
                outer.times.host -= inner.end - inner.start
                outer.times.device -= inner.device
        self.found.calls = [call for call in self.found.calls if call.start in self.steps]
        self.found.operators = _table(self.times.values())
        return self.found


def _table(times: Iterable[SliceTimes]) -> tuple[TracedOperator, ...]:
    """Those with the most self time, on the device and on the host."""
    operators = [each for each in times if each.calls]
    on_device = sorted(
        (each for each in operators if each.self_device), key=lambda each: -each.self_device
    )[:MAX_TABLE_ROWS]
    on_host = sorted(operators, key=lambda each: -each.self_host)[:MAX_TABLE_ROWS]
    chosen = {each.name: each for each in (*on_device, *on_host)}
    return tuple(
        TracedOperator(
            name=each.name,
            calls=each.calls,
            host_seconds=each.host / 1e9,
            self_host_seconds=max(each.self_host, 0) / 1e9,
            device_seconds=each.device / 1e9,
            self_device_seconds=each.self_device / 1e9,
        )
        for each in chosen.values()
    )

"""What Kineto's raw events say: operators with their own time, and the device's work by module.

An event is inclusive, and an operator calls others: on each thread events are nested by their times. What the device does is tied to the
operator that asked for it, not to the moment at which it was done. The sums are those of torch's own table, by name, with calls of the
device's library as rows. `trace_analysis/host_walk.py` sums the operators of a file by their inputs.

    host     aten::linear [ aten::addmm [ launch ] ]                own: linear without addmm
    device                                    kernel                tied to addmm, so to the module that ran addmm
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, starmap
from math import inf
from operator import attrgetter, ne, not_, or_
from typing import Any, NamedTuple

from torch.autograd import DeviceType  # type: ignore[attr-defined,unused-ignore]

from lflops.collect.attribution.frames import AutogradSegments
from lflops.collect.kineto.compiled_time import Region, RegionEvent
from lflops.collect.kineto.module_log import THREAD, LogEntry, Replay
from lflops.collect.model.module_tree import ModuleTree
from lflops.profile.records import Call, ModulePhase, TracedOperator
from lflops.profile.series import grouped
from lflops.traces.recorded import NODE, STEP

REGION = "## Call CompiledFxGraph "
"""Begins the names of the runs of compiled graphs; the graph's key follows."""

LAUNCHES = "c10d::"  # begins the names of the operators that launch collectives
MAX_TABLE_ROWS = 20  # operators of the table: those with the most self time on the device, and on the host

NO_OPERATORS = {
    *("[memory]", "[OutOfMemory]", "aten::is_leaf", "aten::output_nr", "aten::_version"),
    *(f"profiler::_record_function_{part}" for part in ("enter", "enter_new", "exit")),
}
"""What torch's own table leaves out as well."""


class Event(NamedTuple):
    """One of Kineto's, its times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int = 1
    number: int = -1  # of a node of backward: when it was built; of any other: -1, or the number of the next node
    built_on: int = 0  # of a node of backward: the thread that built it; 0 for any other
    is_named: bool = False  # whether somebody named a stretch of time, rather than that an operator ran
    spans_threads: bool = False  # whether it began on one thread and ended on another
    is_on_device: bool = False
    key: int = 0
    link: int = 0  # the `key` of the operator that it was done for, where it is the device's or the device's library's


def read(raw: Sequence[Any], *, device: bool, stack: bool) -> list[Event]:
    """The raw events as values; where no device or no Python stack was recorded, nothing is asked about it."""
    if not raw:
        return []
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
        map(or_, named, map(kind.is_python_function, raw)) if stack and hasattr(kind, "is_python_function") else named,
        map(or_, loose, map(kind.is_async, raw)),
    ]
    if device:
        columns += [(each.device_type() != DeviceType.CPU for each in raw), map(kind.correlation_id, raw)]
        columns += [map(kind.linked_correlation_id, raw)]
    events = list(starmap(Event, zip(*columns, strict=True)))
    return [*compress(events, map(not_, map(kind.is_hidden_event, raw)))] if stack and hasattr(kind, "is_hidden_event") else events


class Communicated(NamedTuple):
    """A collective: its kind, how long its kernel ran, and for how much of that nothing was computed, in nanoseconds."""

    kind: str
    nanoseconds: int
    exposed: int


@dataclass(slots=True)
class _Times:
    name: str
    is_node: bool
    calls: int = 0
    host: int = 0
    own_host: int = 0
    device: int = 0
    own_device: int = 0


@dataclass(slots=True)
class _Open:
    """An event that has begun."""

    start: int
    end: int
    key: int
    times: _Times
    device: int = 0
    children: int = 0
    region: Region | None = None


@dataclass(kw_only=True)
class Joined:
    """Kineto's events, joined with the log of modules."""

    # Nanoseconds of the device, by step, and by module and phase of the operator that launched it; other work is the root's.
    device: list[dict[ModulePhase, float]]
    calls: list[Call]  # of modules and named parts, on all threads, in steps
    operators: tuple[TracedOperator, ...]  # the table, over all steps. What is between them, as a validation, is in none of this
    # Nanoseconds of collectives and of these the exposed ones, by module and phase of what launched them, and by kind; over all steps.
    communication: dict[tuple[ModulePhase, str], tuple[int, int]]
    regions: list[Region]  # the runs of compiled graphs
    batch_at: Callable[[int], int]  # the index of the step at a moment within one


def join(
    events: Sequence[Event],
    logs: Mapping[int, Sequence[LogEntry]],
    home: int,
    tree: ModuleTree,
    communicated: Mapping[int, Sequence[Communicated]] | None = None,
    *,
    on_host: Mapping[int, Communicated] | None = None,
) -> Joined:
    """Tie each event to the module that ran. `home` is the thread that trains; `on_host` are collectives by the start of their launch."""
    begun = steps_of(events)
    pythons = {event.thread: int(event.name.removeprefix(THREAD)) for event in events if event.is_named and event.name.startswith(THREAD)}
    trainer = begun[0][2] if begun else None
    steps = _StepIntervals([(start, end) for start, end, _ in begun])
    if trainer is not None:
        pythons[trainer] = home
    kernels, unlaunched = _device_work(events)
    by_thread = _by_thread(event for event in events if event.start in steps)
    order = sorted(by_thread, key=lambda thread: (thread != trainer, thread))
    segments = {thread: AutogradSegments(0) for thread in order}
    walk = _Walk(steps, kernels, communicated or {}, on_host or {})
    for number, thread in enumerate(order):
        entries = logs.get(pythons.get(thread, 0), ())  # no thread of Python has the number 0
        walk.thread(by_thread[thread], Replay(tree, entries, thread=number, segments=segments, own=segments[thread]))
    without_events = sorted(logs.keys() - pythons.values(), key=lambda python: python != home)
    for number, python in enumerate(without_events, len(order)):
        walk.calls += Replay(tree, logs[python], thread=number, segments=segments, own=AutogradSegments(0)).finish()
    for event in unlaunched:
        if event.start in steps:
            walk.device[steps.index(event.start)][ModulePhase("", "other")] += event.end - event.start
    return walk.joined()


def steps_of(events: Iterable[Event]) -> list[tuple[int, int, int]]:
    """Beginning, end and thread of each step of the profiler, in their order."""
    return sorted((event.start, event.end, event.thread) for event in events if event.is_named and event.name.startswith(STEP))


def _device_work(events: Iterable[Event]) -> tuple[dict[int, list[Event]], list[Event]]:
    """The work of the device by the key of what asked for it, in the order of time, and what nothing asked for."""
    done = sorted((event for event in events if event.is_on_device and not event.is_named), key=lambda event: event.start)
    askers = {event.key for event in events if not event.is_on_device and not event.link and not event.spans_threads} if done else set()
    asked = grouped((event for event in done if event.link in askers), attrgetter("link"))
    return asked, [event for event in done if event.link not in askers]


def _by_thread(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The host's events, each in the order in which they begin, the outer ones first. A call of the device's library is its operator's."""
    on_host = [event for event in events if not event.is_on_device]
    threads = {event.key: event.thread for event in on_host if not event.link}
    events_of = grouped(on_host, lambda event: threads.get(event.link, event.thread) if event.link else event.thread)
    for each in events_of.values():
        each.sort(key=lambda event: (event.start, -event.end))
    return events_of


class _StepIntervals:
    """The recorded steps in time. Between two of them other things may happen, as a validation."""

    def __init__(self, steps: Iterable[tuple[int, int]]) -> None:
        self._changes = [moment for step in steps for moment in step]
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
        kernels: Mapping[int, Sequence[Event]],
        communicated: Mapping[int, Sequence[Communicated]],
        on_host: Mapping[int, Communicated],
    ) -> None:
        self.steps = steps
        self.asked = {key: sum(each.end - each.start for each in done) for key, done in kernels.items()}
        self.communicated, self.on_host = communicated, on_host
        self.communication: defaultdict[tuple[ModulePhase, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.times: dict[str, _Times] = {}
        self.named: dict[str, _Times] = {}
        self.device: list[defaultdict[ModulePhase, int]] = [defaultdict(int) for _ in range(steps.number)]
        self.calls: list[Call] = []
        self.regions: list[Region] = []
        self._kernels = kernels
        self._below: list[tuple[Region, _Open]] = []  # what ran right below regions of this thread
        self._doubles: list[tuple[_Open, _Open]] = []  # an operator that calls one of the same name, then that one

    def thread(self, events: Sequence[Event], replay: Replay) -> None:
        opened: list[_Open] = []
        running = replay.module_phase
        due: float = -1
        for name, start, end, _, number, built_on, is_named, spans_threads, _, key, link in events:
            if name in NO_OPERATORS:
                continue
            table = self.named if is_named else self.times
            times = table.get(name) or table.setdefault(name, _Times(name, name.startswith(NODE)))
            length = end - start
            times.calls += 1
            times.host += length
            if spans_threads:
                continue
            while (opened and end > opened[-1].end) or (opened and start >= opened[-1].end):
                opened.pop()
            if start >= due or times.is_node:
                replay.go_on(start)
                if times.is_node:
                    replay.begin_node(number, built_on, start, end)
                step = self.steps.index(start)
                due = min(replay.due, self.steps.change(start))
                running = replay.module_phase
            self._begin(_Open(start, end, key, times), opened, step, running)
            if not link and key in self.asked:
                self.device[step][running] += self.asked[key]
                self._communicate(running, self.communicated.get(key, ()))
                replay.on_device(self.asked[key])
                times.own_device += self.asked[key]
                for event in opened:
                    event.times.device += self.asked[key]
                    event.device += self.asked[key]
        for region, event in self._below:
            region.events.append(RegionEvent(event.times.name, event.start, event.end, event.device))
        self._below.clear()
        self.calls += replay.finish()

    def _communicate(self, running: ModulePhase, launched: Iterable[Communicated]) -> None:
        for kind, nanoseconds, exposed in launched:
            whole, alone = self.communication[running, kind]
            self.communication[running, kind] = whole + nanoseconds, alone + exposed

    def _begin(self, event: _Open, opened: list[_Open], step: int, running: ModulePhase) -> None:
        event.times.own_host += event.end - event.start
        if event.start in self.on_host and event.times.name.startswith(LAUNCHES):
            self._communicate(running, [self.on_host[event.start]])
        if opened:
            parent = opened[-1]
            parent.times.own_host -= event.end - event.start
            parent.children += 1
            if event.times is parent.times:
                self._doubles.append((parent, event))
            if parent.region is not None:
                self._below.append((parent.region, event))
        if event.times.name.startswith(REGION):
            graph = event.times.name.removeprefix(REGION).partition(" ")[0]
            kernels = [(each.name, each.end - each.start) for each in self._kernels.get(event.key, ())]
            event.region = Region(key=graph, start=event.start, end=event.end, batch=step, running=running, kernels=kernels)
            self.regions.append(event.region)
        opened.append(event)

    def joined(self) -> Joined:
        """Join what all threads did. An operator that only calls another of its name is one with it, as in torch's own table."""
        for outer, inner in self._doubles:
            if outer.children == 1:
                outer.times.calls -= 1
                outer.times.host -= inner.end - inner.start
                outer.times.device -= inner.device
        device: list[dict[ModulePhase, float]] = [{key: each for key, each in step.items() if each} for step in self.device]
        calls = [call for call in self.calls if call.start in self.steps]
        return Joined(
            device=device,
            calls=calls,
            operators=_table(self.times.values()),
            communication=dict(self.communication),
            regions=self.regions,
            batch_at=self.steps.index,
        )


def _table(times: Iterable[_Times]) -> tuple[TracedOperator, ...]:
    """Those with the most self time, on the device and on the host."""
    operators = [each for each in times if each.calls]
    on_device = sorted((each for each in operators if each.own_device), key=lambda each: -each.own_device)[:MAX_TABLE_ROWS]
    on_host = sorted(operators, key=lambda each: -each.own_host)[:MAX_TABLE_ROWS]
    chosen = {each.name: each for each in (*on_device, *on_host)}
    return tuple(
        TracedOperator(
            name=each.name,
            calls=each.calls,
            host_seconds=each.host / 1e9,
            own_host_seconds=max(each.own_host, 0) / 1e9,
            device_seconds=each.device / 1e9,
            own_device_seconds=each.own_device / 1e9,
        )
        for each in chosen.values()
    )

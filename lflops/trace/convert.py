"""Copy a trace for torch-tb-profiler 0.4.3, which supports only traces of old torch versions.

In the copy, names that torch-tb-profiler does not support are replaced with names that it supports.
Calls of modules are written as Python calls, which torch-tb-profiler reads as modules. Other
readers would misread the copy, so it is in a separate folder.

Traces that torch writes contain arrows from forward operators to their backward nodes. If a trace
has such arrows, the tables of torch-tb-profiler leave out all backward work that is outside
modules. Therefore, the calls in backward are also written as modules, inside a module named
`backward`.
"""

import importlib.util
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from lflops.profile.series import grouped
from lflops.trace.annotate import MODULE, TRACKS, threads_of_tracks
from lflops.trace.event_stream import TraceStream
from lflops.trace.files import DAMAGE, LeftOut, as_trace, write_head, written_whole
from lflops.trace.recorded import NODE, STEP, ZERO, extent, outer_first, span

MARKS = (b'"lflops_module"', b"ProfilerStep#", b"engine::evaluate_function")
"""Strings that every event of a module, a step or a backward node contains.

So these events are found without decoding all events. Other events can contain the strings as well.
"""

LOADERS = ("enumerate(DataLoader)#", "enumerate(DataPipe)#")
"""Prefixes of the names of data loader spans. The converted trace has operators instead."""

CATEGORIES = {
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    # With the original category, each step and each collective would appear twice.
    "gpu_user_annotation": "gpu_annotation",
    # The numbers of Python frames are not the numbers of the modules that lflops adds.
    "python_function": "python_frame",
}
"""Category of an event in the converted trace, keyed by the one that newer versions of torch write.

torch-tb-profiler draws `gpu_annotation` and `python_frame`, but leaves them out of its tables.
"""

NAMES = {
    "nccl:_all_gather_base": "nccl:all_gather",
    "nccl:_reduce_scatter_base": "nccl:reduce_scatter",
}
"""Name of a collective in the converted trace, keyed by the one that newer versions of torch write.

torch-tb-profiler leaves collectives with other names out of its tables.
"""

FINE = 1024
"""Number of time units per microsecond in the copy. It makes sums of times exact.

Times in the copy are multiples of 1/`FINE` microsecond. torch-tb-profiler computes the end of an
event as a sum of floats. If a rounding error makes an event end after the event around it,
torch-tb-profiler leaves the inner event out of all tables. Sums of multiples of 1/1024 µs have no
rounding error below 2^43 µs, which is 101 days. This is enough, because Kineto counts time from the
start of the quarter of the year. 1/1024 µs is shorter than a nanosecond, so different times stay
different.
"""

Thread = tuple[Any, Any]
"""The values `pid` and `tid` of an event, which identify its process and thread."""


class _Call(NamedTuple):
    """A call of a module, or a whole backward pass.

    For a whole backward pass, `phase` is empty. The pass ends with the last call in backward before
    the next step or the next call in forward.
    """

    start: int
    end: int
    thread: Thread
    phase: str
    name: str


class _Event(Struct):
    """The fields of an event that the conversion reads."""

    ph: str = ""
    name: str | None = None
    cat: str | None = None
    pid: int | str | None = None
    tid: Any = None
    ts: Raw = ZERO
    dur: Raw = ZERO
    args: dict[str, Any] = {}

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in units of 1/`FINE` microsecond.

        The conversion from nanoseconds keeps the order of times. Identical times stay identical.
        """
        start, end = span(self.ts, self.dur)
        return start * FINE // 1000, end * FINE // 1000

    @property
    def thread(self) -> Thread:
        return (self.pid, self.tid)

    @property
    def track(self) -> int:
        """Number that lflops gives to the thread, if the event is a call of a module."""
        return int(self.tid) // len(TRACKS)


def is_wanted() -> bool:
    """Return whether torch-tb-profiler is installed, so that a copy for it is useful."""
    return importlib.util.find_spec("torch_tb_profiler") is not None


def place(trace: Path) -> Path:
    """Return the path of the copy for torch-tb-profiler.

    The copies of all traces in a folder are in one folder, so that torch-tb-profiler reads them as
    one run. The name of this folder sorts before the names of the folders with traces.
    """
    folder = trace.absolute().parent
    return folder.with_name(f"compat-{folder.name}") / f"{trace.name.removesuffix('.gz')}.gz"


def convert_for_tb_profiler(trace: Path) -> tuple[Path, LeftOut]:
    """Write a compressed copy of a trace for torch-tb-profiler.

    The copy has modules if the trace is annotated. It appears only when it is complete.

    Returns:
        The path of the copy, and the events that are left out.

    Raises:
        ProfileError: No event of the trace can be read.
    """
    into = place(trace)
    left_out = LeftOut()
    with as_trace(trace):
        stream = TraceStream(trace, Raw)
        # The file is read twice, because its events may not fit into memory.
        marked, readable = _marked(_readable(stream, left_out))
        if left_out.number and not readable:
            raise ValueError(left_out.first)
        parts = msgspec.json.decode(stream.header_text, type=dict[str, Raw])
        parts.pop("traceEvents", None)
        # If the framework is Lightning, torch-tb-profiler shows no modules.
        parts.pop("Framework", None)
        again = _readable(TraceStream(trace, Raw), LeftOut())
        into.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(into) as file:
            # The events are last, because torch-tb-profiler adds events before the last bracket.
            write_head(file, parts)
            file.write(b"[\n")
            separator = b""
            # If two events have the same times, the first one is the outer event.
            for event in itertools.chain(_modules(marked), map(_relabelled, again)):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
            file.write(b"\n]}\n")
    return into, left_out


def _marked(events: Iterable[Raw]) -> tuple[list[Raw], int]:
    """Return the events of modules, steps and backward nodes, and the number of all events."""
    marked = []
    number = 0
    for raw in events:
        number += 1
        text = bytes(raw)
        if any(mark in text for mark in MARKS):
            # Copy the event, so that the memory of all other events can be freed.
            marked.append(raw.copy())
    return marked, number


def _readable(stream: TraceStream[Raw], left_out: LeftOut) -> Iterator[Raw]:
    """Yield the events that can be read. All other events are counted in `left_out`."""
    for raw in itertools.chain.from_iterable(stream.portions()):
        try:
            event = msgspec.json.decode(raw, type=_Event)
            lacks_times = event.ts is ZERO or event.dur is ZERO
            if not event.ph or (event.ph == "X" and lacks_times):
                raise ValueError("an event has no `ph`, `ts` or `dur`")
            span(event.ts, event.dur)
            hash(event.thread)
            if event.cat == MODULE:
                _call(event, {event.track: event.thread})
        except DAMAGE as error:
            left_out.add(error)
        else:
            yield raw


def _relabelled(raw: Raw) -> dict[str, Any]:
    """Decode an event and convert its name, category and times for torch-tb-profiler."""
    event: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    category = event.get("cat")
    name = event.get("name") or ""
    if category in CATEGORIES:
        event["cat"] = CATEGORIES[category]
    elif category == "user_annotation" and name.startswith(LOADERS):
        event["cat"] = "cpu_op"
    if name in NAMES:
        event["name"] = NAMES[name]
    if "ts" in event:
        start, end = msgspec.json.decode(raw, type=_Event).span
        event["ts"] = start / FINE
        if "dur" in event:
            event["dur"] = (end - start) / FINE
    return event


def _modules(events: Iterable[Raw]) -> Iterator[dict[str, Any]]:
    """Yield a `python_function` event for each call of a module. The outer calls come first.

    torch-tb-profiler reads these events as calls of modules, and identifies a module by a number.
    Calls with the same name inside the same module get the same number, so torch-tb-profiler shows
    them in one row of its table of modules.
    """
    calls, beginnings = _calls(events)
    calls += _backward_passes(calls, beginnings)
    numbers: dict[tuple[int, str], int] = {}
    number_of: dict[_Call, int] = {}
    for thread, called in grouped(calls, attrgetter("thread")).items():
        process, thread_id = thread
        around: list[_Call] = []
        # A whole backward pass has an empty phase, so it sorts before the calls inside it.
        for call in outer_first(sorted(called, key=attrgetter("phase")), around):
            if around and call.end > around[-1].end:
                continue
            above = number_of[around[-1]] if around else 0
            number = numbers.setdefault((above, call.name), len(numbers) + 1)
            number_of[call] = number
            around.append(call)
            yield {
                "ph": "X",
                "cat": "python_function",
                "name": f"nn.Module: {call.name}",
                "pid": process,
                "tid": thread_id,
                "ts": call.start / FINE,
                "dur": (call.end - call.start) / FINE,
                "args": {
                    "Python id": number,
                    "Python parent id": above,
                    "Python module id": number,
                },
            }


def _backward_passes(calls: Iterable[_Call], beginnings: list[int]) -> list[_Call]:
    """Return one call for each backward pass on each thread.

    `beginnings` are the sorted start times of steps and forward calls, which separate the passes.
    """
    backward = (call for call in calls if call.phase != "forward")
    parts = grouped(backward, lambda call: (call.thread, bisect_right(beginnings, call.start)))
    passes = []
    for (thread, _), part in parts.items():
        start, end = extent(part)
        passes.append(_Call(start, end, thread, "", "backward"))
    return passes


def _calls(events: Iterable[Raw]) -> tuple[list[_Call], list[int]]:
    """Return the calls of modules, and the sorted start times of steps and forward calls."""
    slices: list[_Event] = []
    slice_starts: list[tuple[int, int]] = []
    steps: dict[int, Thread] = {}
    nodes: dict[int, Thread] = {}
    for raw in events:
        event = msgspec.json.decode(raw, type=_Event)
        name = event.name or ""
        start, _ = event.span
        if event.cat == MODULE:
            slices.append(event)
            slice_starts.append((event.track, start))
        elif event.cat == "user_annotation" and name.startswith(STEP):
            steps[start] = event.thread
        elif event.cat == "cpu_op" and name.startswith(NODE):
            nodes[start] = event.thread
    threads = threads_of_tracks(slice_starts, nodes)
    # lflops gives the number 0 to the training thread, which runs the steps and forward.
    if steps:
        threads[0] = next(iter(steps.values()))
    calls = []
    beginnings = list(steps)
    for event in slices:
        if event.track in threads:
            call = _call(event, threads)
            calls.append(call)
            if call.phase == "forward":
                beginnings.append(call.start)
    beginnings.sort()
    return calls, beginnings


def _call(event: _Event, threads: dict[int, Thread]) -> _Call:
    phase = event.args["phase"]
    name = event.name or ""
    kind = event.args.get("kind")
    if kind:
        name += f" ({kind})"
    if phase != "forward":
        name += f" {phase}"
    start, end = event.span
    return _Call(start, end, threads[event.track], phase, name)

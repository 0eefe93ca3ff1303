"""A copy of a trace for torch-tb-profiler 0.4.3, which reads traces as torch wrote them years ago.

What it does not know is given the names that it knows, and modules become what it takes for
modules. To any other reader that would be wrong, so the copy lies in a separate folder.

torch's arrows from forward to backward stay unchanged: with them 0.4.3 takes all of backward that
is in no module out of its tables. Instead the stretches of backward are modules too, below one that
is called so.
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
from lflops.trace.files import DAMAGE, as_trace, read, write_head, written_whole
from lflops.trace.recorded import NODE, STEP, ZERO, outer_first, span

MARKS = b'"lflops_module"', b"ProfilerStep#", b"engine::evaluate_function"
LOADERS = "enumerate(DataLoader)#", "enumerate(DataPipe)#"

CATEGORIES = {
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    # each step and each collective would be there twice
    "gpu_user_annotation": "gpu_annotation",
    # their numbers are not those of our modules
    "python_function": "python_frame",
}
"""What 0.4.3 calls them. The last two names it does not know: it draws them, and that is all."""

NAMES = {
    "nccl:_all_gather_base": "nccl:all_gather",
    "nccl:_reduce_scatter_base": "nccl:reduce_scatter",
}
"""What it calls collectives: others than these and their namesakes are in none of its tables."""

FINE = 1024
"""Parts of a microsecond that its times are in. 0.4.3 adds floats, and leaves an event out of every table if it ends a rounding after the
one around it. Such parts are finer than nanoseconds, so no two times become one, and a sum of them
is exact below 2^43 µs, 101 days. Kineto's times begin with the quarter.
"""


# process and thread, as the trace calls them
Thread = tuple[Any, Any]


class _Call(NamedTuple):
    """A module's; without a phase it is all of backward between two beginnings, of a step or of a call of forward."""

    start: int
    end: int
    thread: Thread
    phase: str
    name: str


class _Event(Struct):
    """What is looked at in an event."""

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
        """Start and end in parts of a microsecond.

        What comes first still does, and what ends together too.
        """
        start, end = span(self.ts, self.dur)
        return start * FINE // 1000, end * FINE // 1000

    @property
    def thread(self) -> Thread:
        return self.pid, self.tid

    @property
    def track(self) -> int:
        """The thread of a call of a module, as `annotate` numbers them."""
        return int(self.tid) // len(TRACKS)


def is_wanted() -> bool:
    return importlib.util.find_spec("torch_tb_profiler") is not None


def place(trace: Path) -> Path:
    """Where the copy of a trace belongs.

    Of a folder's traces in one folder, so that they are one run, and before theirs in a list.
    """
    folder = trace.absolute().parent
    return folder.with_name(f"compat-{folder.name}") / f"{trace.name.removesuffix('.gz')}.gz"


def compat(trace: Path) -> tuple[Path, list[str]]:
    """Write the copy of one trace, packed or not, with the modules if it is annotated.

    Packed, whole or not at all.

    Returns its place, and what is wrong with each event that cannot be read, which is left out. A
    `ProfileError` names a trace of which nothing can be read.
    """
    parts: dict[str, Raw] = read(trace, dict[str, Raw])
    # a name of Lightning's here turns the modules off
    parts.pop("Framework", None)
    into = place(trace)
    with as_trace(trace):
        given, damage = (
            msgspec.json.decode(parts.pop("traceEvents", Raw(b"null")), type=list[Raw]),
            list[str](),
        )
        events = list(_readable(given, damage))
        if damage and not events:
            raise ValueError(damage[0])
        into.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(into) as file:
            # Behind all else, for 0.4.3 puts what it adds before the last bracket; the modules
            # first, for of two events with the same times the first is the outer one.
            write_head(file, parts)
            file.write(b"[\n")
            separator = b""
            for event in itertools.chain(_modules(events), map(_relabelled, events)):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
            file.write(b"\n]}\n")
    return into, damage


def _readable(events: Iterable[Raw], damage: list[str]) -> Iterator[Raw]:
    for raw in events:
        try:
            event = msgspec.json.decode(raw, type=_Event)
            if not event.ph or (event.ph == "X" and (event.ts is ZERO or event.dur is ZERO)):
                raise ValueError("an event has no `ph`, `ts` or `dur`")
            span(event.ts, event.dur)
            hash(event.thread)
            if event.cat == MODULE:
                _call(event, {event.track: event.thread})
        except DAMAGE as error:
            damage.append(str(error))
        else:
            yield raw


def _relabelled(raw: Raw) -> dict[str, Any]:
    event: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    category, name = event.get("cat"), event.get("name") or ""
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
    """The calls of modules as 0.4.3 takes them, the outer ones first.

    Calls at the same place have one number: there they are one row.
    """
    calls, begun = _calls(events)
    backward = (call for call in calls if call.phase != "forward")
    parts = grouped(backward, lambda call: (call.thread, bisect_right(begun, call.start)))
    for (thread, _), part in parts.items():
        calls.append(
            _Call(
                min(call.start for call in part),
                max(call.end for call in part),
                thread,
                "",
                "backward",
            )
        )
    numbers: dict[tuple[int, str], int] = {}
    number_of: dict[_Call, int] = {}
    for thread in dict.fromkeys(call.thread for call in calls):
        around: list[_Call] = []
        for call in outer_first(
            sorted((each for each in calls if each.thread == thread), key=attrgetter("phase")),
            around,
        ):
            if around and call.end > around[-1].end:
                continue
            above = number_of[around[-1]] if around else 0
            number = number_of[call] = numbers.setdefault((above, call.name), len(numbers) + 1)
            around.append(call)
            yield {
                "ph": "X",
                "cat": "python_function",
                "name": f"nn.Module: {call.name}",
                "pid": thread[0],
                "tid": thread[1],
                "ts": call.start / FINE,
                "dur": (call.end - call.start) / FINE,
                "args": {
                    "Python id": number,
                    "Python parent id": above,
                    "Python module id": number,
                },
            }


def _calls(events: Iterable[Raw]) -> tuple[list[_Call], list[int]]:
    """The calls of modules on the threads that they ran on, and where each step and each call of forward begins."""
    slices: list[_Event] = []
    steps: dict[int, Thread] = {}
    nodes: dict[int, Thread] = {}
    for raw in events:
        if not any(mark in bytes(raw) for mark in MARKS):
            continue
        event = msgspec.json.decode(raw, type=_Event)
        name = event.name or ""
        if event.cat == MODULE:
            slices.append(event)
        elif event.cat == "user_annotation" and name.startswith(STEP):
            steps[event.span[0]] = event.thread
        elif event.cat == "cpu_op" and name.startswith(NODE):
            nodes[event.span[0]] = event.thread
    threads = threads_of_tracks(((each.track, each.span[0]) for each in slices), nodes)
    threads |= dict.fromkeys([0] if steps else [], next(iter(steps.values()), ("", "")))
    calls = [_call(event, threads) for event in slices if event.track in threads]
    return calls, sorted([*steps, *(call.start for call in calls if call.phase == "forward")])


def _call(event: _Event, threads: dict[int, Thread]) -> _Call:
    kind, phase = event.args.get("kind"), event.args["phase"]
    name = " ".join(
        [
            event.name or "",
            *([f"({kind})"] if kind else []),
            *([] if phase == "forward" else [phase]),
        ]
    )
    return _Call(*event.span, threads[event.track], phase, name)

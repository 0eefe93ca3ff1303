"""Adds to a Chrome trace what torch does not write into it.

Each call of a module with its work, FLOP/s and memory as curves, the rank.

The trace is never parsed as a whole: what is added is put behind its last event, and all else stays
as it was, to the byte.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from lflops.profile.profile import Profile
from lflops.profile.records import Call, Phase
from lflops.profile.series import summed
from lflops.trace.files import DAMAGE, as_trace, decoded, write_head, written_whole
from lflops.trace.recorded import microseconds, span

# what the rows of modules are called in a viewer
PROCESS = "lflops modules"
# larger than any that Linux gives
PROCESS_ID = 10_000_000
# the category of their slices
MODULE = "lflops_module"
# the name of the events that say what is allocated
MEMORY = b'"[memory]"'

TRACKS: tuple[Phase, ...] = (
    "forward",
    "recompute",
    "backward",
    # one for each of these on each thread
)


Thread = TypeVar("Thread")


class Calls(Struct, frozen=True, kw_only=True):
    """What was called while the trace was recorded, in `batches` batches, on which of the ranks."""

    batches: int
    rank: int
    world_size: int
    calls: tuple[Call, ...]


class _MemoryArgs(Struct):
    kind: int | None = msgspec.field(default=None, name="Device Type")
    index: int = msgspec.field(default=-1, name="Device Id")
    allocated: int = msgspec.field(default=0, name="Total Allocated")


class _Memory(Struct):
    ts: Raw
    args: _MemoryArgs


def annotate(trace: Path, calls: Calls, into: Path, *, profile: Profile | None = None) -> list[str]:
    """Write the trace, which is as torch wrote it and unpacked, with the calls in it.

    Packed, whole or not at all.

    The profile says how much a call computes. Without it, or where a row is not in it, a slice has
    its name alone. A `ProfileError` names a trace that is not one of torch's. Returns what is wrong
    with each event that the curves of memory leave out.
    """
    damage: list[str] = []
    text = trace.read_bytes()
    with as_trace(trace):
        parts = decoded(text, dict[str, Raw])
        base = msgspec.json.decode(parts.get("baseTimeNanoseconds", Raw(b"0")), type=int)
        events = parts.pop("traceEvents", Raw(b"null"))
        count = len(msgspec.json.decode(events, type=list[Raw]))
        curves = list(_memory(events, damage)) if MEMORY in text else []
    added = msgspec.json.encode([*_names(calls.calls), *_slices(calls, base, profile), *curves])
    parts.setdefault(
        "distributedInfo",
        Raw(msgspec.json.encode({"rank": calls.rank, "world_size": calls.world_size})),
    )
    with written_whole(into) as file:
        write_head(file, parts)
        # without the bracket behind the last
        file.write(memoryview(events)[:-1])
        file.write((b",\n" if count else b"") + added[1:] + b"}\n")
    return damage


def pack(trace: Path, into: Path) -> None:
    """Write the packed trace, whole or not at all."""
    with trace.open("rb") as source, written_whole(into) as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _names(calls: Iterable[Call]) -> Iterator[dict[str, Any]]:
    yield about("process_name", PROCESS_ID, name=PROCESS)
    yield about("process_sort_index", PROCESS_ID, sort_index=-1)
    for thread, phase in sorted(
        {(call.thread, call.phase) for call in calls},
        key=lambda each: (each[0], TRACKS.index(each[1])),
    ):
        track = _track(thread, phase)
        yield about(
            "thread_name", PROCESS_ID, track, name=f"{phase} (thread {thread})" if thread else phase
        )
        yield about("thread_sort_index", PROCESS_ID, track, sort_index=track)


def about(what: str, process: int, track: int = 0, **values: Any) -> dict[str, Any]:
    """An event of the kind that names a process or a track, or gives its place in a viewer."""
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": values}


def _track(thread: int, phase: Phase) -> int:
    return len(TRACKS) * thread + TRACKS.index(phase)


def threads_of_tracks(
    slices: Iterable[tuple[int, int]], nodes: Mapping[int, Thread]
) -> dict[int, Thread]:
    """The threads by the tracks that the slices have.

    Where a stretch of backward begins, a node of backward does.
    """
    # Slices are tracks and moments, `nodes` the threads by the moments at which nodes begin.
    found = Counter((track, nodes[start]) for track, start in slices if start in nodes)
    return {track: thread for (track, thread), _ in reversed(found.most_common())}


def _slices(calls: Calls, base: int, profile: Profile | None) -> Iterator[dict[str, Any]]:
    known = {} if profile is None else profile.modules
    per_call = _work(calls, profile)
    curve: list[tuple[int, float]] = []
    for call in sorted(calls.calls, key=lambda call: (call.start, -call.end)):
        args: dict[str, Any] = {"module": call.fqn, "phase": call.phase}
        if call.fqn in known:
            args |= {"kind": known[call.fqn].class_name, "parameters": known[call.fqn].parameters}
        macs, rate = per_call(call)
        if macs is not None:
            args["MACs"] = round(macs)
        if rate is not None:
            args["FLOP/s"] = rate
            if call.innermost:
                curve += [(call.start, rate), (call.end, 0.0)]
        times = {"ts": microseconds(call.start - base), "dur": microseconds(call.end - call.start)}
        yield {
            "ph": "X",
            "cat": MODULE,
            "name": call.fqn or "(model)",
            "pid": PROCESS_ID,
            "tid": _track(call.thread, call.phase),
            **times,
            "args": args,
        }
    for moment, rate in sorted(curve, key=lambda point: point[0]):
        yield _point("FLOP/s", microseconds(moment - base), rate)


def _point(name: str, moment: Raw, value: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": name,
        "pid": PROCESS_ID,
        "tid": 0,
        "ts": moment,
        "args": {name: value},
    }


def _work(
    calls: Calls, profile: Profile | None
) -> Callable[[Call], tuple[float | None, float | None]]:
    """Make the function from a call to its MACs and its FLOP/s, `None` where these cannot be known."""
    # A step's work is taken to be the same for all calls of a row, and in backward in proportion to
    # time: there the rate is the row's. On a device time is the device's: what the host takes to
    # ask for the work says nothing.
    steps = calls.batches / ((profile.run.accumulation if profile else None) or 1)
    on_device = any(call.device for call in calls.calls)
    number = Counter((call.fqn, call.phase) for call in calls.calls)
    took = summed(
        ((call.fqn, call.phase), call.device if on_device else call.end - call.start)
        for call in calls.calls
    )

    def of(call: Call) -> tuple[float | None, float | None]:
        if profile is None or call.fqn not in profile.modules:
            return None, None
        work = profile.modules[call.fqn].work(call.phase)
        if call.phase == "backward":
            nanoseconds = took[call.fqn, call.phase]
            return None, 2e9 * work.self_macs * steps / nanoseconds if nanoseconds else None
        macs = work.macs * steps / number[call.fqn, call.phase]
        nanoseconds = call.device if on_device else call.end - call.start
        return macs, 2e9 * macs / nanoseconds if nanoseconds else None

    return of


def _memory(events: Raw, damage: list[str]) -> Iterator[dict[str, Any]]:
    for each in msgspec.json.decode(events, type=list[Raw]):
        if MEMORY not in bytes(each):
            continue
        try:
            told = msgspec.json.decode(each, type=_Memory)
            moment, args = microseconds(span(told.ts)[0]), told.args
        except DAMAGE as error:
            damage.append(str(error))
            continue
        device = "CPU" if args.kind == 0 else f"device {args.index}"
        yield _point(f"allocated bytes ({device})", moment, args.allocated)

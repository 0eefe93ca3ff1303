"""Add modules, FLOP/s, live memory and the rank to a Chrome trace that torch wrote.

The original events are copied byte for byte, and the new events are written after them.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from lflops.files import open_file, read
from lflops.profile.profile import Profile
from lflops.profile.records import Call, Phase
from lflops.trace.files import (
    DAMAGE,
    LARGEST_RAW,
    LeftOut,
    as_trace,
    decoded,
    write_head,
    written_whole,
)
from lflops.trace.recorded import microseconds, span

PROCESS = "lflops modules"
"""Name of the process under which a trace viewer shows the modules."""

PROCESS_ID = 10_000_000
"""Id that the process `PROCESS` has in the trace. It is larger than any process id on Linux."""

MODULE = "lflops_module"
"""Category of the events that lflops adds for calls of modules."""

MEMORY = b'"[memory]"'
"""Name of the events that record allocated memory."""

TRACKS: tuple[Phase, ...] = ("forward", "recompute", "backward")
"""Phases of module calls. In a trace viewer, each thread has one track for each phase."""

Thread = TypeVar("Thread")


class RecordedCalls(Struct, frozen=True, kw_only=True):
    """The calls of modules and scopes during the recording of a trace.

    Attributes:
        batches: Number of recorded batches.
        rank: The rank that recorded the trace.
        world_size: Number of ranks.
        calls: The calls.
    """

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


def annotate(
    trace: Path, recorded: RecordedCalls, into: Path, *, profile: Profile | None = None
) -> LeftOut:
    """Write a compressed copy of a trace, annotated with the recorded calls.

    Args:
        trace: The uncompressed trace that torch wrote.
        recorded: The recorded calls.
        into: The new file, which appears only when it is complete.
        profile: Profile with the work of the modules. Without a profile, or if the profile does not
            contain a module, the calls of the module have no FLOP/s.

    Returns:
        The damaged events, which the memory curves leave out.

    Raises:
        ProfileError: The file is not a trace that torch wrote.
    """
    left_out = LeftOut()
    text = read(trace, LARGEST_RAW)
    with as_trace(trace):
        parts = decoded(text, dict[str, Raw])
        base = msgspec.json.decode(parts.get("baseTimeNanoseconds", Raw(b"0")), type=int)
        events = parts.pop("traceEvents", Raw(b"null"))
        is_empty = not msgspec.json.decode(events, type=list[Raw])
        memory = list(_memory(events, left_out)) if MEMORY in text else []
    slices = _slices(recorded, base, profile)
    added = msgspec.json.encode([*_names(recorded.calls), *slices, *memory])
    distributed = {"rank": recorded.rank, "world_size": recorded.world_size}
    parts.setdefault("distributedInfo", Raw(msgspec.json.encode(distributed)))
    with written_whole(into) as file:
        write_head(file, parts)
        # The new events follow the old events in the same list.
        file.write(memoryview(events)[:-1])
        if not is_empty:
            file.write(b",\n")
        file.write(added[1:] + b"}\n")
    return left_out


def pack(trace: Path, into: Path) -> None:
    """Write a compressed copy of a trace, which appears only when it is complete."""
    with open_file(trace) as source, written_whole(into) as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _names(calls: Iterable[Call]) -> Iterator[dict[str, Any]]:
    """Yield the events that name the process of the modules and its tracks."""
    yield metadata_event("process_name", PROCESS_ID, name=PROCESS)
    yield metadata_event("process_sort_index", PROCESS_ID, sort_index=-1)
    tracks = {}
    for call in calls:
        tracks[_track(call.thread, call.phase)] = (call.thread, call.phase)
    for track, (thread, phase) in sorted(tracks.items()):
        name = f"{phase} (thread {thread})" if thread else phase
        yield metadata_event("thread_name", PROCESS_ID, track, name=name)
        yield metadata_event("thread_sort_index", PROCESS_ID, track, sort_index=track)


def metadata_event(kind: str, process: int, track: int = 0, **values: Any) -> dict[str, Any]:
    """Return an event with the name or the position of a process or a track."""
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": values}


def _track(thread: int, phase: Phase) -> int:
    return len(TRACKS) * thread + TRACKS.index(phase)


def threads_of_tracks(
    slices: Iterable[tuple[int, int]], nodes: Mapping[int, Thread]
) -> dict[int, Thread]:
    """Return the thread to which each track of backward slices belongs.

    A slice shows when a module ran. lflops numbers the tracks itself, so the number of a track does
    not show the thread. But each backward slice begins at the same time as a backward node, whose
    thread is known. A track belongs to the thread on which most of these nodes run. A track without
    such nodes is left out.

    Args:
        slices: Track and start time of each slice.
        nodes: Thread of each backward node, keyed by the start time of the node.
    """
    found: Counter[tuple[int, Thread]] = Counter()
    for track, start in slices:
        if start in nodes:
            found[track, nodes[start]] += 1
    threads: dict[int, Thread] = {}
    for (track, thread), _ in found.most_common():
        threads.setdefault(track, thread)
    return threads


def _slices(
    recorded: RecordedCalls, base: int, profile: Profile | None
) -> Iterator[dict[str, Any]]:
    """Yield an event for each call of a module or scope, and the points of the FLOP/s curve."""
    modules = {} if profile is None else profile.modules
    work = _Work(recorded, profile)
    curve: list[tuple[int, float]] = []
    for call in sorted(recorded.calls, key=lambda call: (call.start, -call.end)):
        args: dict[str, Any] = {"module": call.fqn, "phase": call.phase}
        if call.fqn in modules:
            module = modules[call.fqn]
            args |= {"kind": module.class_name, "parameters": module.parameters}
        macs = work.macs(call)
        if macs is not None:
            args["MACs"] = round(macs)
        rate = work.flops_per_second(call)
        if rate is not None:
            args["FLOP/s"] = rate
            if call.innermost:
                curve += [(call.start, rate), (call.end, 0.0)]
        yield {
            "ph": "X",
            "cat": MODULE,
            "name": call.fqn or "(model)",
            "pid": PROCESS_ID,
            "tid": _track(call.thread, call.phase),
            "ts": microseconds(call.start - base),
            "dur": microseconds(call.end - call.start),
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


class _Work:
    """Computes the MACs and FLOP/s of each call from the work of its module in a profile.

    All calls of a module are assumed to do the same work. In backward, a recorded call is only a
    part of a module's backward work, so its MACs are unknown, and its FLOP/s are the average of the
    module. With a device, FLOP/s are based on device time, because the host only launches the work.
    """

    def __init__(self, recorded: RecordedCalls, profile: Profile | None) -> None:
        self._modules = {} if profile is None else profile.modules
        accumulation = (profile.run.accumulation if profile else None) or 1
        self._steps = recorded.batches / accumulation
        self._on_device = any(call.device for call in recorded.calls)
        self._numbers: Counter[tuple[str, Phase]] = Counter()
        self._nanoseconds: Counter[tuple[str, Phase]] = Counter()
        for call in recorded.calls:
            self._numbers[call.fqn, call.phase] += 1
            self._nanoseconds[call.fqn, call.phase] += self._time(call)

    def macs(self, call: Call) -> float | None:
        """Return the MACs of a call; `None` in backward, or if they are unknown."""
        if call.fqn not in self._modules or call.phase == "backward":
            return None
        macs = self._modules[call.fqn].work(call.phase).macs
        return macs * self._steps / self._numbers[call.fqn, call.phase]

    def flops_per_second(self, call: Call) -> float | None:
        """Return the FLOP/s of a call, or `None` if the rate is unknown."""
        if call.fqn not in self._modules:
            return None
        macs = self.macs(call)
        nanoseconds = self._time(call)
        if macs is None:
            macs = self._modules[call.fqn].work(call.phase).self_macs * self._steps
            nanoseconds = self._nanoseconds[call.fqn, call.phase]
        if not nanoseconds:
            return None
        return 2e9 * macs / nanoseconds

    def _time(self, call: Call) -> int:
        return call.device if self._on_device else call.end - call.start


def _memory(events: Raw, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Yield the points of the memory curves. Damaged events are skipped and added to `left_out`."""
    for each in msgspec.json.decode(events, type=list[Raw]):
        if MEMORY not in bytes(each):
            continue
        try:
            event = msgspec.json.decode(each, type=_Memory)
            start, _ = span(event.ts)
        except DAMAGE as error:
            left_out.add(error)
            continue
        args = event.args
        device = "CPU" if args.kind == 0 else f"device {args.index}"
        yield _point(f"allocated bytes ({device})", microseconds(start), args.allocated)

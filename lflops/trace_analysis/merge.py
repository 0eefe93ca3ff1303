"""Several ranks' Chrome traces as one: each rank's processes under its name, all on one clock.

One trace is held at a time: first what was recorded, to set its clock, then its text. What is written goes to the file event by event.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lflops.trace_analysis.collectives import Key, numbered, occurrences
from lflops.trace_analysis.event_stream import Header
from lflops.trace_analysis.host_walk import walk
from lflops.trace_analysis.read_trace import read_trace
from lflops.traces.files import read, traces_in, written_whole
from lflops.traces.recorded import ZERO, microseconds, span

MERGED = "merged.trace.json.gz"  # its name is none that readers of single traces look for

_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that no rank leaves before all have come, so that they end at about the same moment everywhere."""

_NUMBERS = {"correlation": 1, "External id": 1, "Sequence number": 0, "wait_on_cuda_event_record_corr_id": 0}
"""Arguments by which the events of one rank refer to each other, with the first that is a number; less is none."""


class Clock(Struct, frozen=True, kw_only=True):
    """How a rank was brought on the common clock."""

    rank: int | None  # `None` where neither the trace nor its name tells it
    moved: int | None  # nanoseconds that its times were moved by; `None` where it has no collective in common with those before it
    collectives: int  # how many in common tell so; the move is their median


class MergedTraces(Struct, frozen=True, kw_only=True):
    """What was written where. A rank is `None` where neither the trace nor its name tells it."""

    file: str
    ranks: tuple[int | None, ...]
    events: int
    damaged: int  # how many events are left out because they cannot be read
    clocks: tuple[Clock, ...]  # of each rank but the first, whose clock is the common one


class _Source(NamedTuple):
    path: Path
    rank: int | None
    base: int


class _Event(Struct):
    """What is looked at in an event. All else stays as it is written."""

    ph: str | None = None
    name: str | None = None
    pid: int | str | None = None
    id: Any = UNSET
    bind_id: Any = UNSET
    ts: Raw | UnsetType = UNSET
    dur: Raw | UnsetType = UNSET
    args: dict[str, Raw] | None = None


class _Content(Struct):
    events: list[Raw] = msgspec.field(name="traceEvents")
    devices: list[dict[str, Any]] = msgspec.field(default_factory=list, name="deviceProperties")


def merge(folder: Path, into: Path | None = None) -> MergedTraces:
    """Write the traces of a folder, which are of one window, as one, packed, whole or not at all; `None` writes it next to them.

    A rank's clock is set by the collectives that it has in common with the ranks before it. Without any it is not moved: between machines
    clocks differ by milliseconds. A `ProfileError` names a trace that cannot be read, or the folder without any.
    """
    headers = [(path, read(path, Header)) for path in traces_in(folder)]
    sources = [_Source(path, header.rank(path), header.base) for path, header in headers]
    sources.sort(key=lambda source: (source.rank is None, source.rank or 0, source.path.name))
    into = folder / MERGED if into is None else into
    base = min(source.base for source in sources)
    clocks = _clocks(sources)
    merger = _Merger()
    events = 0
    with written_whole(into) as file:
        file.write(b'{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": %d,\n"traceEvents": [\n' % base)
        for index, (source, clock) in enumerate(zip(sources, clocks, strict=True)):
            for event in merger.moved(source, index, source.base - base + (clock.moved or 0)):
                file.write((b",\n" if events else b"") + event)
                events += 1
        file.write(b'\n],\n"deviceProperties": %b}\n' % msgspec.json.encode(merger.properties))
    ranks = tuple(source.rank for source in sources)
    return MergedTraces(file=str(into), ranks=ranks, events=events, damaged=merger.damaged, clocks=tuple(clocks[1:]))


def _clocks(sources: Iterable[_Source]) -> list[Clock]:
    known: dict[Key, int] = {}
    clocks = []
    for source in sources:
        ends = _ends(source)
        moves = [known[key] - end for key, end in ends.items() if key in known]
        clocks.append(Clock(rank=source.rank, moved=round(median(moves)) if moves else None, collectives=len(moves)))
        known = {key: end + (clocks[-1].moved or 0) for key, end in ends.items()} | known
    return clocks


def _ends(source: _Source) -> dict[Key, int]:
    """When the collectives ended that all ranks of a group leave together."""
    trace = read_trace(source.path)
    calls = numbered(occurrences(trace.work, walk(trace, trace.work, lambda _: False), trace))
    return {key: source.base + call.end for key, call in calls.items() if call.kind in _TOGETHER}


class _Merger:
    """Gives processes, devices, arrows and launches numbers that no other trace has."""

    def __init__(self) -> None:
        self.properties: list[dict[str, Any]] = []  # of the devices that worked
        self.damaged = 0
        self._processes = itertools.count(1)
        self._devices: dict[tuple[int, int], int] = {}

    def moved(self, source: _Source, index: int, shift: int) -> Iterator[bytes]:
        """The events of one trace in the common time."""
        label = source.path.name if source.rank is None else f"rank {source.rank}"
        processes: dict[Any, int] = {}
        names: dict[Any, str] = {}
        content = read(source.path, _Content)
        for raw in content.events:
            try:
                event = msgspec.json.decode(raw, type=_Event)
                whole = msgspec.json.decode(raw, type=dict[str, Raw])
                changed: dict[str, Any] = _times(event, shift)
                arguments = self._renumbered(event.args or {}, index)
            except (msgspec.MsgspecError, ValueError):
                self.damaged += 1
                continue
            process = event.pid
            if process not in processes:
                processes[process] = next(self._processes)
            if event.ph == "M" and event.name in {"process_name", "process_sort_index"}:
                names |= {process: name} if (name := msgspec.json.decode((event.args or {}).get("name", b'""'))) else {}
                continue
            changed["pid"] = processes[process]
            for arrow, number in (("id", event.id), ("bind_id", event.bind_id)):
                if number is not UNSET:
                    changed[arrow] = number + (index << 32) if isinstance(number, int) else f"{index}.{number}"
            if arguments:
                changed["args"] = (event.args or {}) | arguments
            yield msgspec.json.encode(whole | changed)
        for process, number in processes.items():
            yield _about("process_name", number, name=f"{label}: {names.get(process, process) or 'all of it'}")
            yield _about("process_sort_index", number, sort_index=number)
        rows = {row.get("id"): row for row in content.devices}
        only = content.devices[0] if len({row.get("name") for row in content.devices}) == 1 else None
        used = {number: rows.get(device, only) for (place, device), number in self._devices.items() if place == index}
        self.properties += [row | {"id": number} for number, row in used.items() if row is not None]

    def _renumbered(self, arguments: dict[str, Raw], index: int) -> dict[str, int]:
        """The arguments that are numbers of this trace alone, as the merged trace has them."""
        changed = {}
        for name, first in _NUMBERS.items() if index else ():
            if name in arguments and (number := msgspec.json.decode(arguments[name], type=int)) >= first:
                changed[name] = number + (index << 32)
        for name in ("device", "Device Id"):
            if name in arguments and (number := msgspec.json.decode(arguments[name], type=int)) >= 0:
                taken = self._devices.values()
                changed[name] = self._devices.setdefault((index, number), max(taken) + 1 if number in taken else number)
        return changed


def _times(event: _Event, shift: int) -> dict[str, Raw]:
    if not shift or event.ts is UNSET:
        return {}
    start, end = span(event.ts, ZERO if event.dur is UNSET else event.dur)
    return {"ts": microseconds(start + shift)} | ({} if event.dur is UNSET else {"dur": microseconds(end - start)})


def _about(what: str, process: int, **values: Any) -> bytes:
    return msgspec.json.encode({"ph": "M", "name": what, "pid": process, "tid": 0, "args": values})

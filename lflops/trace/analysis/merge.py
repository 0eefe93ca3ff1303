"""Merge the traces of several ranks into one trace.

The clocks of different ranks are aligned by collectives that end at the same time on all ranks.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lflops.trace.analysis.collectives import Key, numbered, occurrences
from lflops.trace.analysis.host_walk import walk
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.annotate import metadata_event
from lflops.trace.event_stream import TraceStream
from lflops.trace.files import as_trace, traces_in, written_whole
from lflops.trace.recorded import ZERO, microseconds, span

MERGED = "merged.trace.json.gz"
"""Name of the merged file. When lflops looks for the traces of ranks, it ignores this name."""

_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end at almost the same time on all ranks: each rank waits for all others."""

_SMALLEST_NUMBERS = {
    "correlation": 1,
    "External id": 1,
    "Sequence number": 0,
    "wait_on_cuda_event_record_corr_id": 0,
}
"""Smallest valid value of each event argument that connects events, such as `correlation`.

The traces of different ranks use the same numbers, so merging replaces them with unique numbers. A
number below the smallest valid value connects no events, and is not replaced.
"""

_DEVICE_ARGUMENTS = ("device", "Device Id")


class Clock(Struct, frozen=True, kw_only=True):
    """The clock of one rank, and how its times are shifted to the common clock.

    Attributes:
        rank: The rank, or `None` if neither the trace nor its file name has it.
        moved: Nanoseconds added to the rank's times, or `None` if the rank shares no collective
            with the ranks that are already aligned.
        collectives: Number of collectives that the rank shares with the ranks that are already
            aligned. Each collective needs a slightly different shift; `moved` is the median.
    """

    rank: int | None
    moved: int | None
    collectives: int


class MergedTraces(Struct, frozen=True, kw_only=True):
    """The merged trace, and how the clocks of the ranks were shifted.

    Attributes:
        file: Path of the merged trace.
        ranks: The rank of each trace. An entry is `None` if neither the trace nor its file name has
            the rank.
        events: Number of events in the merged trace.
        damaged: Number of events left out because they cannot be read.
        clocks: Clock of each rank except the first, whose clock is the common clock.
    """

    file: str
    ranks: tuple[int | None, ...]
    events: int
    damaged: int
    clocks: tuple[Clock, ...]


class _Source(NamedTuple):
    """A trace to merge. The times in its file are relative to `base`, in nanoseconds since 1970."""

    path: Path
    rank: int | None
    base: int


class _Event(Struct):
    """The fields of an event that merging reads. All other fields stay as they are."""

    pid: int | str
    ph: str | None = None
    name: str | None = None
    id: Any = UNSET
    bind_id: Any = UNSET
    ts: Raw | UnsetType = UNSET
    dur: Raw | UnsetType = UNSET
    args: dict[str, Raw] | None = None


class _Properties(Struct):
    devices: list[dict[str, Any]] = msgspec.field(default_factory=list, name="deviceProperties")


def merge(folder: Path, into: Path | None = None) -> MergedTraces:
    """Merge the traces in a folder, which cover the same steps, into one compressed file.

    The ranks are aligned one after another. The clock of each rank is shifted so that the
    collectives that it shares with the ranks that are already aligned end at the same time. If a
    rank shares no collective with these ranks, its clock is not shifted, and can differ by
    milliseconds from the clocks of other machines.

    Args:
        folder: Folder with the traces.
        into: File to write, which appears only when it is complete. By default, it is next to the
            traces.

    Raises:
        ProfileError: A trace cannot be read, or the folder contains no trace.
    """
    if into is None:
        into = folder / MERGED
    sources = _sources(folder)
    base = min(source.base for source in sources)
    clocks = _clocks(sources)
    merger = _Merger()
    head = (
        b'{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": %d,\n'
        b'"traceEvents": [\n' % base
    )
    events = 0
    with written_whole(into) as file:
        file.write(head)
        for index, source in enumerate(sources):
            shift = source.base - base + (clocks[index].moved or 0)
            for event in merger.rewritten(source, index, shift):
                if events:
                    file.write(b",\n")
                file.write(event)
                events += 1
        file.write(b'\n],\n"deviceProperties": %b}\n' % msgspec.json.encode(merger.properties))
    return MergedTraces(
        file=str(into),
        ranks=tuple(source.rank for source in sources),
        events=events,
        damaged=merger.damaged,
        clocks=tuple(clocks[1:]),
    )


def _sources(folder: Path) -> list[_Source]:
    """Return the traces of a folder, sorted by rank. Traces of unknown rank come last."""
    sources = []
    for path in traces_in(folder):
        stream = TraceStream(path, Raw)
        # The header may be at the end of the file.
        for _ in stream.portions():
            pass
        sources.append(_Source(path, stream.header.rank(path), stream.header.base))
    sources.sort(key=lambda source: (source.rank is None, source.rank or 0, source.path.name))
    return sources


def _clocks(sources: Iterable[_Source]) -> list[Clock]:
    """Return the clock of each rank. Each rank is compared with the ranks before it."""
    known: dict[Key, int] = {}
    clocks = []
    for source in sources:
        ends = _ends(source)
        shifts = []
        for key, end in ends.items():
            if key in known:
                shifts.append(known[key] - end)
        shift = None
        if shifts:
            shift = round(statistics.median(shifts))
        clocks.append(Clock(rank=source.rank, moved=shift, collectives=len(shifts)))
        for key, end in ends.items():
            known.setdefault(key, end + (shift or 0))
    return clocks


def _ends(source: _Source) -> dict[Key, int]:
    """Return the end times of the collectives by which the clocks of ranks are aligned.

    These collectives (`_TOGETHER`) end at almost the same time on all ranks.
    """
    trace = read_trace(source.path)
    host = walk(trace, trace.work, lambda _: False)
    calls = numbered(occurrences(trace.work, host, trace))
    ends = {}
    for key, call in calls.items():
        if call.kind in _TOGETHER:
            ends[key] = source.base + call.end
    return ends


class _Merger:
    """Rewrites the events of several traces so that they can be in one file.

    Different traces use the same numbers for processes, devices and launches, so these get new
    numbers.

    Attributes:
        properties: Properties of the devices that have events, with the new device numbers.
        damaged: Number of events left out because they cannot be read.
    """

    def __init__(self) -> None:
        self.properties: list[dict[str, Any]] = []
        self.damaged = 0
        self._processes = itertools.count(1)
        self._devices: dict[tuple[int, int], int] = {}

    def rewritten(self, source: _Source, index: int, shift: int) -> Iterator[bytes]:
        """Yield the events of one trace with new numbers, and with times on the common clock.

        Args:
            source: The trace.
            index: Index of the trace, which makes its numbers unique.
            shift: Nanoseconds to add to all times.
        """
        stream = TraceStream(source.path, Raw)
        processes: dict[int | str, int] = {}
        names: dict[int | str, str] = {}
        for raw in itertools.chain.from_iterable(stream.portions()):
            try:
                event = msgspec.json.decode(raw, type=_Event)
                whole = msgspec.json.decode(raw, type=dict[str, Raw])
                changed: dict[str, Any] = _shifted_times(event, shift)
                arguments = self._renumbered(event.args or {}, index)
            except (msgspec.MsgspecError, ValueError):
                self.damaged += 1
                continue
            if event.pid not in processes:
                processes[event.pid] = next(self._processes)
            if event.ph == "M" and event.name in {"process_name", "process_sort_index"}:
                name = msgspec.json.decode((event.args or {}).get("name", b'""'))
                if name:
                    names[event.pid] = name
                continue
            changed["pid"] = processes[event.pid]
            if event.id is not UNSET:
                changed["id"] = _unique(event.id, index)
            if event.bind_id is not UNSET:
                changed["bind_id"] = _unique(event.bind_id, index)
            if arguments:
                changed["args"] = (event.args or {}) | arguments
            yield msgspec.json.encode(whole | changed)
        label = source.path.name if source.rank is None else f"rank {source.rank}"
        for process, number in processes.items():
            name = names.get(process, process) or "all"
            yield msgspec.json.encode(
                metadata_event("process_name", number, name=f"{label}: {name}")
            )
            yield msgspec.json.encode(
                metadata_event("process_sort_index", number, sort_index=number)
            )
        with as_trace(source.path):
            properties = msgspec.json.decode(stream.header_text, type=_Properties)
        self._add_properties(properties.devices, index)

    def _add_properties(self, devices: list[dict[str, Any]], index: int) -> None:
        by_number = {}
        names = set()
        for properties in devices:
            by_number[properties.get("id")] = properties
            names.add(properties.get("name"))
        # Events may use other device numbers than the list of devices. That does not matter if all
        # devices have the same name.
        default = devices[0] if len(names) == 1 else None
        for (place, device), number in self._devices.items():
            row = by_number.get(device, default)
            if place == index and row is not None:
                self.properties.append(row | {"id": number})

    def _renumbered(self, arguments: dict[str, Raw], index: int) -> dict[str, int]:
        """Return new values for the arguments that must be unique in the merged trace."""
        changed = {}
        # The numbers of the first trace stay the same.
        if index:
            for name, smallest in _SMALLEST_NUMBERS.items():
                number = _number(arguments, name)
                if number is not None and number >= smallest:
                    changed[name] = number + (index << 32)
        for name in _DEVICE_ARGUMENTS:
            number = _number(arguments, name)
            if number is not None and number >= 0:
                changed[name] = self._device(index, number)
        return changed

    def _device(self, index: int, number: int) -> int:
        """Return the number that identifies a device of a trace in the merged file.

        The device keeps its original number if no other device has this number.
        """
        key = index, number
        if key not in self._devices:
            taken = self._devices.values()
            self._devices[key] = max(taken) + 1 if number in taken else number
        return self._devices[key]


def _number(arguments: dict[str, Raw], name: str) -> int | None:
    if name not in arguments:
        return None
    return msgspec.json.decode(arguments[name], type=int)


def _unique(number: Any, index: int) -> int | str:
    return number + (index << 32) if isinstance(number, int) else f"{index}.{number}"


def _shifted_times(event: _Event, shift: int) -> dict[str, Raw]:
    if not shift or event.ts is UNSET:
        return {}
    if event.dur is UNSET:
        start, _ = span(event.ts, ZERO)
        return {"ts": microseconds(start + shift)}
    start, end = span(event.ts, event.dur)
    return {"ts": microseconds(start + shift), "dur": microseconds(end - start)}

"""Several ranks' Chrome traces as one: each rank's processes under its name, all on one clock.

One trace is held at a time, and of that only the text and where its events are; what is written goes to the file event by event.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lflops.trace_analysis.event_stream import Header
from lflops.traces.files import as_trace, read, traces_in, written_whole
from lflops.traces.timestamps import ZERO, microseconds, span

MERGED = "merged.trace.json.gz"  # its name is none that readers of single traces look for


class MergedTraces(Struct, frozen=True, kw_only=True):
    """What was written where. A rank is `None` where neither the trace nor its name tells it."""

    file: str
    ranks: tuple[int | None, ...]
    events: int


class _Source(NamedTuple):
    path: Path
    rank: int | None
    base: int


class _Event(Struct):
    """What is looked at in an event. All else stays as it is written."""

    ph: Any = None
    name: Any = None
    pid: Any = None
    id: Any = UNSET
    bind_id: Any = UNSET
    ts: Raw | UnsetType = UNSET
    dur: Raw | UnsetType = UNSET
    args: Any = None


class _Content(Struct):
    events: list[Raw] = msgspec.field(name="traceEvents")


def merge(folder: Path, into: Path | None = None) -> MergedTraces:
    """Write the traces of a folder, which are of one window, as one, packed, whole or not at all; `None` writes it next to them.

    Times are those of each rank's clock: between machines they differ as much as these clocks do. A `ProfileError` names a trace that
    cannot be read, or the folder without any.
    """
    headers = [(path, read(path, Header)) for path in traces_in(folder)]
    sources = [_Source(path, header.rank(path), header.base) for path, header in headers]
    sources.sort(key=lambda source: (source.rank is None, source.rank or 0, source.path.name))
    into = folder / MERGED if into is None else into
    base = min(source.base for source in sources)
    numbers = itertools.count(1)
    events = 0
    with written_whole(into) as file:
        file.write(b'{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": %d,\n"traceEvents": [\n' % base)
        for index, source in enumerate(sources):
            for event in _moved(source, index, base, numbers):
                file.write((b",\n" if events else b"") + event)
                events += 1
        file.write(b"\n]}\n")
    return MergedTraces(file=str(into), ranks=tuple(source.rank for source in sources), events=events)


def _moved(source: _Source, index: int, base: int, numbers: Iterator[int]) -> Iterator[bytes]:
    """The events of one trace in the common time, with numbers of processes and arrows that no other trace has."""
    label = source.path.name if source.rank is None else f"rank {source.rank}"
    processes: dict[Any, int] = {}
    names: dict[Any, str] = {}
    for raw in read(source.path, _Content).events:
        with as_trace(source.path):
            event = msgspec.json.decode(raw, type=_Event)
            whole = msgspec.json.decode(raw, type=dict[str, Raw])
            times = _times(event, source.base - base)
        process = event.pid
        if process not in processes:
            processes[process] = next(numbers)
        if event.ph == "M" and event.name in {"process_name", "process_sort_index"}:
            names |= {process: name} if (name := (event.args or {}).get("name")) else {}
            continue
        changed: dict[str, Any] = {"pid": processes[process], **times}
        for arrow, number in (("id", event.id), ("bind_id", event.bind_id)):
            if number is not UNSET:
                changed[arrow] = number + (index << 32) if isinstance(number, int) else f"{index}.{number}"
        yield msgspec.json.encode(whole | changed)
    for process, number in processes.items():
        yield _about("process_name", number, name=f"{label}: {names.get(process, process) or 'all of it'}")
        yield _about("process_sort_index", number, sort_index=number)


def _times(event: _Event, shift: int) -> dict[str, Raw]:
    if not shift or event.ts is UNSET:
        return {}
    start, end = span(event.ts, ZERO if event.dur is UNSET else event.dur)
    return {"ts": microseconds(start + shift)} | ({} if event.dur is UNSET else {"dur": microseconds(end - start)})


def _about(what: str, process: int, **values: Any) -> bytes:
    return msgspec.json.encode({"ph": "M", "name": what, "pid": process, "tid": 0, "args": values})

"""Collectives by kind and group.

Calls, bytes, time, bandwidth; and traces of several ranks as one, on the clock that collectives
set.

Algorithmic bandwidth is the message over the time. Bus bandwidth is that times a factor, so that it
can be compared with a link's, as in NVIDIA's nccl-tests. With n ranks the factor of an all-reduce
is 2 (n - 1) / n. That of an all-gather, a reduce-scatter and an all-to-all is (n - 1) / n, all
others have 1.

The kernel of a collective runs from a rank's own arrival until all are done. So the rank that
arrives last has the shortest kernel, which is the transfer; what the others take longer they
waited. This needs no common clock.

    rank 0    ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    rank 1            ▇▇▇▇▇▇▇▇     last: rank 1; rank 0 waited half of its time
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lflops.intervals import Intervals, joined, length, outside
from lflops.profile.collective_names import bus_factor, collective_kind
from lflops.profile.series import grouped, sum_known
from lflops.trace.analysis.event_stream import Header
from lflops.trace.analysis.host_walk import HostWalk, walk
from lflops.trace.analysis.operator_cost import BYTES
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.annotate import about
from lflops.trace.device_states import communicates
from lflops.trace.files import read, traces_in, written_whole
from lflops.trace.recorded import ZERO, Collective, DeviceEvent, RecordedTrace, microseconds, span

_OF_RESULT = frozenset({"all_gather", "gather"})


class Occurrence(NamedTuple):
    """One call of a collective, as one rank ran it."""

    kind: str
    group: str
    group_size: int | None
    # the step that launched it; empty where there is none
    step: str
    start: int
    end: int
    bytes: (
        int | None
        # of the message: of the larger of input and result, over all ranks; `None` is unknown
    )


class CollectiveTimes(Struct, frozen=True, kw_only=True):
    """All calls of one kind in one group; nanoseconds. `None` is unknown."""

    kind: str
    # the ranks, or else the group's name; empty where the trace does not tell
    group: str
    group_size: int | None
    calls: int
    device: int
    # time in which nothing was computed. What runs at the same time as another collective is in
    # both rows.
    exposed: int
    # of all messages
    bytes: int | None
    # `bytes` over the time
    algorithmic_bytes_per_second: float | None
    # what a link carried for that
    bus_bytes_per_second: float | None


def occurrences(
    work: Iterable[DeviceEvent], walk: HostWalk, trace: RecordedTrace
) -> tuple[Occurrence, ...]:
    """Every collective, in the order of their beginnings."""
    steps = sorted((span.start, span.end, span.name) for span in trace.spans if span.kind == "step")
    of_all = trace.world_size if trace.groups == 1 else None
    found = [_occurrence(each, walk, steps, of_all) for each in work if communicates(each)]
    return tuple(sorted(found, key=lambda each: each.start))


def _occurrence(
    work: DeviceEvent, walk: HostWalk, steps: Sequence[tuple[int, int, str]], of_all: int | None
) -> Occurrence:
    launch = walk.launch(work)
    about, call = work.collective or launch.collective, launch.call
    kind = collective_kind(about.name if about is not None and about.name else work.name)
    size = about.group_size if about is not None else None
    return Occurrence(
        kind=kind,
        group=(about.ranks or about.group) if about is not None else "",
        group_size=of_all if size is None else size,
        step=next(
            (name for start, end, name in steps if call is not None and start <= call.start < end),
            "",
        ),
        start=work.start,
        end=work.end,
        bytes=_bytes(kind, about),
    )


def _bytes(kind: str, about: Collective | None) -> int | None:
    if about is None:
        return None
    size = BYTES.get(about.dtype.lower(), BYTES.get(about.dtype))
    known = [each for each in (about.in_elements, about.out_elements) if each is not None]
    if size is None or not known or (kind in _OF_RESULT and about.out_elements is None):
        return None
    return max(known) * size


def collectives(found: Sequence[Occurrence], computing: Intervals) -> tuple[CollectiveTimes, ...]:
    """Sum the collectives by kind and group, the most time first."""
    groups: dict[tuple[str, str, int | None], list[Occurrence]] = grouped(
        found, attrgetter("kind", "group", "group_size")
    )
    rows = []
    for (kind, group, size), calls in groups.items():
        device = sum(each.end - each.start for each in calls)
        moved = sum_known(each.bytes for each in calls)
        rate = moved / (device / 1e9) if moved is not None and device else None
        factor = bus_factor(kind, size)
        rows.append(
            CollectiveTimes(
                kind=kind,
                group=group,
                group_size=size,
                calls=len(calls),
                device=device,
                exposed=length(
                    outside(joined((each.start, each.end) for each in calls), computing)
                ),
                bytes=moved,
                algorithmic_bytes_per_second=rate,
                bus_bytes_per_second=None if rate is None or factor is None else rate * factor,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.device, row.kind, row.group)))


class CollectiveSkew(Struct, frozen=True, kw_only=True):
    """All calls of one kind in one group that at least two of the ranks recorded; nanoseconds."""

    kind: str
    group: str
    calls: int
    # the shortest kernels of all calls
    transfer: int
    # what each rank waited in addition
    waiting: Mapping[int, int]
    # between the first and the last arrival at a call
    skew_median: int
    skew_longest: int
    # how often each rank came last
    last: Mapping[int, int]


class RankSkew(Struct, frozen=True, kw_only=True):
    """The same over all collectives; only one rank recorded the `unmatched` calls."""

    ranks: tuple[int, ...]
    collectives: tuple[CollectiveSkew, ...]
    transfer: int
    waiting: Mapping[int, int]
    last: Mapping[int, int]
    unmatched: int


Key = tuple[str, str, str, int]


def numbered(found: Sequence[Occurrence]) -> dict[Key, Occurrence]:
    """The collectives of a rank by what other ranks have for the same one.

    Kind, group and step, and which of these it is.
    """
    numbers: Counter[tuple[str, str, str]] = Counter()
    calls = {}
    for each in found:
        place = each.kind, each.group, each.step
        calls[*place, numbers[place]] = each
        numbers[place] += 1
    return calls


def rank_skew(by_rank: Mapping[int, Sequence[Occurrence]]) -> RankSkew | None:
    """Match the collectives of several ranks: the n-th of its kind and group in its step.

    `None` with fewer than two ranks.
    """
    if len(by_rank) < 2:
        return None
    calls: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    for rank, found in by_rank.items():
        for key, each in numbered(found).items():
            calls[key][rank] = each.end - each.start
    matched = [(key, times) for key, times in calls.items() if len(times) > 1]
    skews = (
        _skew(*place, [times for _, times in found])
        for place, found in grouped(matched, lambda each: each[0][:2]).items()
    )
    rows = tuple(sorted(skews, key=lambda row: -sum(row.waiting.values())))
    ranks = tuple(sorted(by_rank))
    return RankSkew(
        ranks=ranks,
        collectives=rows,
        transfer=sum(row.transfer for row in rows),
        waiting={rank: sum(row.waiting.get(rank, 0) for row in rows) for rank in ranks},
        last={rank: sum(row.last.get(rank, 0) for row in rows) for rank in ranks},
        unmatched=len(calls) - len(matched),
    )


def _skew(kind: str, group: str, calls: Sequence[Mapping[int, int]]) -> CollectiveSkew:
    waiting: Counter[int] = Counter()
    last: Counter[int] = Counter()
    skews = []
    for times in calls:
        shortest = min(times.values())
        skews.append(max(times.values()) - shortest)
        last[min(times, key=lambda rank: (times[rank], rank))] += 1
        for rank, took in times.items():
            waiting[rank] += took - shortest
    return CollectiveSkew(
        kind=kind,
        group=group,
        calls=len(calls),
        transfer=sum(min(times.values()) for times in calls),
        waiting=dict(sorted(waiting.items())),
        skew_median=round(statistics.median(skews)),
        skew_longest=max(skews),
        last=dict(sorted(last.items())),
    )


# its name is none that readers of single traces look for
MERGED = "merged.trace.json.gz"

_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that no rank leaves before all have come, so that they end at about the same moment everywhere."""

_NUMBERS = {
    "correlation": 1,
    "External id": 1,
    "Sequence number": 0,
    "wait_on_cuda_event_record_corr_id": 0,
}
"""Arguments by which the events of one rank refer to each other, with the first that is a number.

Less is none.
"""


class Clock(Struct, frozen=True, kw_only=True):
    """How a rank was brought on the common clock."""

    # `None` where neither the trace nor its name tells it
    rank: int | None
    moved: (
        int | None
        # nanoseconds that its times were moved by; `None` where it has no collective in common with
        # those before it
    )
    # how many in common tell so; the move is their median
    collectives: int


class MergedTraces(Struct, frozen=True, kw_only=True):
    """What was written where. A rank is `None` where neither the trace nor its name tells it."""

    file: str
    ranks: tuple[int | None, ...]
    events: int
    # how many events are left out because they cannot be read
    damaged: int
    # of each rank but the first, whose clock is the common one
    clocks: tuple[Clock, ...]


class _Source(NamedTuple):
    path: Path
    rank: int | None
    base: int


class _Event(Struct):
    """What is looked at in an event. All else stays as it is written."""

    pid: int | str
    ph: str | None = None
    name: str | None = None
    id: Any = UNSET
    bind_id: Any = UNSET
    ts: Raw | UnsetType = UNSET
    dur: Raw | UnsetType = UNSET
    args: dict[str, Raw] | None = None


class _Content(Struct):
    events: list[Raw] = msgspec.field(name="traceEvents")
    devices: list[dict[str, Any]] = msgspec.field(default_factory=list, name="deviceProperties")


def merge(folder: Path, into: Path | None = None) -> MergedTraces:
    """Write the traces of a folder, which are of one window, as one, packed, whole or not at all.

    `None` writes it next to them.

    A rank's clock is set by the collectives that it has in common with the ranks before it. Without
    any it is not moved: between machines clocks differ by milliseconds. A `ProfileError` names a
    trace that cannot be read, or the folder without any.
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
        file.write(
            b'{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": %d,\n"traceEvents": [\n'
            % base
        )
        for index, (source, clock) in enumerate(zip(sources, clocks, strict=True)):
            for event in merger.moved(source, index, source.base - base + (clock.moved or 0)):
                file.write((b",\n" if events else b"") + event)
                events += 1
        file.write(b'\n],\n"deviceProperties": %b}\n' % msgspec.json.encode(merger.properties))
    ranks = tuple(source.rank for source in sources)
    return MergedTraces(
        file=str(into), ranks=ranks, events=events, damaged=merger.damaged, clocks=tuple(clocks[1:])
    )


def _clocks(sources: Iterable[_Source]) -> list[Clock]:
    known: dict[Key, int] = {}
    clocks = []
    for source in sources:
        ends = _ends(source)
        moves = [known[key] - end for key, end in ends.items() if key in known]
        clocks.append(
            Clock(
                rank=source.rank,
                moved=round(statistics.median(moves)) if moves else None,
                collectives=len(moves),
            )
        )
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
        # of the devices that worked
        self.properties: list[dict[str, Any]] = []
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
                names |= (
                    {process: name}
                    if (name := msgspec.json.decode((event.args or {}).get("name", b'""')))
                    else {}
                )
                continue
            changed["pid"] = processes[process]
            for arrow, number in (("id", event.id), ("bind_id", event.bind_id)):
                if number is not UNSET:
                    changed[arrow] = (
                        number + (index << 32) if isinstance(number, int) else f"{index}.{number}"
                    )
            if arguments:
                changed["args"] = (event.args or {}) | arguments
            yield msgspec.json.encode(whole | changed)
        for process, number in processes.items():
            yield msgspec.json.encode(
                about(
                    "process_name",
                    number,
                    name=f"{label}: {names.get(process, process) or 'all of it'}",
                )
            )
            yield msgspec.json.encode(about("process_sort_index", number, sort_index=number))
        rows = {row.get("id"): row for row in content.devices}
        only = (
            content.devices[0] if len({row.get("name") for row in content.devices}) == 1 else None
        )
        used = {
            number: rows.get(device, only)
            for (place, device), number in self._devices.items()
            if place == index
        }
        self.properties += [row | {"id": number} for number, row in used.items() if row is not None]

    def _renumbered(self, arguments: dict[str, Raw], index: int) -> dict[str, int]:
        """The arguments that are numbers of this trace alone, as the merged trace has them."""
        changed = {}
        for name, first in _NUMBERS.items() if index else ():
            if (
                name in arguments
                and (number := msgspec.json.decode(arguments[name], type=int)) >= first
            ):
                changed[name] = number + (index << 32)
        for name in ("device", "Device Id"):
            if (
                name in arguments
                and (number := msgspec.json.decode(arguments[name], type=int)) >= 0
            ):
                taken = self._devices.values()
                changed[name] = self._devices.setdefault(
                    (index, number), max(taken) + 1 if number in taken else number
                )
        return changed


def _times(event: _Event, shift: int) -> dict[str, Raw]:
    if not shift or event.ts is UNSET:
        return {}
    start, end = span(event.ts, ZERO if event.dur is UNSET else event.dur)
    return {"ts": microseconds(start + shift)} | (
        {} if event.dur is UNSET else {"dur": microseconds(end - start)}
    )

"""Collectives by kind and group: calls, bytes, time, and the bandwidth that they reached.

Algorithmic bandwidth is the message over the time. Bus bandwidth is that times a factor, so that it can be compared with a link's, as in
NVIDIA's nccl-tests. With n ranks the factor of an all-reduce is 2 (n - 1) / n. That of an all-gather, a reduce-scatter and an all-to-all is
(n - 1) / n, all others have 1.

The kernel of a collective runs from a rank's own arrival until all are done. So the rank that arrives last has the shortest kernel, which
is the transfer; what the others take longer they waited. This needs no common clock.

    rank 0    ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    rank 1            ▇▇▇▇▇▇▇▇     last: rank 1; rank 0 waited half of its time
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.profile.collective_names import bus_factor, collective_kind
from lflops.profile.series import grouped, sum_known
from lflops.stretches import Stretches, joined, length, outside
from lflops.trace_analysis.host_walk import HostWalk
from lflops.trace_analysis.operator_cost import BYTES
from lflops.traces.device_states import communicates
from lflops.traces.recorded import Collective, DeviceWork, RecordedTrace

_SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2} | dict.fromkeys(
    ("char", "byte", "bool", "float8_e4m3fn", "float8_e5m2"), 1
)
"""Bytes of an element, by the names that collectives have for types."""

_OF_RESULT = frozenset({"all_gather", "gather"})


class Occurrence(NamedTuple):
    """One call of a collective, as one rank ran it."""

    kind: str
    group: str
    group_size: int | None
    step: str  # the step that launched it; empty where there is none
    start: int
    end: int
    bytes: int | None  # of the message: of the larger of input and result, over all ranks; `None` is unknown


class CollectiveTimes(Struct, frozen=True, kw_only=True):
    """All calls of one kind in one group; nanoseconds. `None` is unknown."""

    kind: str
    group: str  # the ranks, or else the group's name; empty where the trace does not tell
    group_size: int | None
    calls: int
    device: int
    exposed: int  # time in which nothing was computed. What runs at the same time as another collective is in both rows.
    bytes: int | None  # of all messages
    algorithmic_bytes_per_second: float | None  # `bytes` over the time
    bus_bytes_per_second: float | None  # what a link carried for that


def occurrences(work: Iterable[DeviceWork], walk: HostWalk, trace: RecordedTrace) -> tuple[Occurrence, ...]:
    """Every collective, in the order of their beginnings."""
    steps = sorted((span.start, span.end, span.name) for span in trace.spans if span.kind == "step")
    of_all = trace.world_size if trace.groups == 1 else None
    found = [_occurrence(each, walk, steps, of_all) for each in work if communicates(each)]
    return tuple(sorted(found, key=lambda each: each.start))


def _occurrence(work: DeviceWork, walk: HostWalk, steps: Sequence[tuple[int, int, str]], of_all: int | None) -> Occurrence:
    launch = walk.launch(work)
    about, call = work.collective or launch.collective, launch.call
    kind = collective_kind(about.name if about is not None and about.name else work.name)
    size = about.group_size if about is not None else None
    return Occurrence(
        kind=kind,
        group=(about.ranks or about.group) if about is not None else "",
        group_size=of_all if size is None else size,
        step=next((name for start, end, name in steps if call is not None and start <= call.start < end), ""),
        start=work.start,
        end=work.end,
        bytes=_bytes(kind, about),
    )


def _bytes(kind: str, about: Collective | None) -> int | None:
    if about is None:
        return None
    size = _SIZES.get(about.dtype.lower(), BYTES.get(about.dtype))
    known = [each for each in (about.in_elements, about.out_elements) if each is not None]
    if size is None or not known:
        return None
    if kind in _OF_RESULT and about.out_elements is None:
        return None
    return max(known) * size


def collectives(found: Sequence[Occurrence], computing: Stretches) -> tuple[CollectiveTimes, ...]:
    """Sum the collectives by kind and group, the most time first."""
    groups: dict[tuple[str, str, int | None], list[Occurrence]] = grouped(found, attrgetter("kind", "group", "group_size"))
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
                exposed=length(outside(joined((each.start, each.end) for each in calls), computing)),
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
    transfer: int  # the shortest kernels of all calls
    waiting: Mapping[int, int]  # what each rank waited in addition
    skew_median: int  # between the first and the last arrival at a call
    skew_longest: int
    last: Mapping[int, int]  # how often each rank came last


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
    """The collectives of a rank by what other ranks have for the same one: kind, group and step, and which of these it is."""
    numbers: Counter[tuple[str, str, str]] = Counter()
    calls = {}
    for each in found:
        place = each.kind, each.group, each.step
        calls[*place, numbers[place]] = each
        numbers[place] += 1
    return calls


def rank_skew(by_rank: Mapping[int, Sequence[Occurrence]]) -> RankSkew | None:
    """Match the collectives of several ranks: the n-th of its kind and group in its step. `None` with fewer than two ranks."""
    if len(by_rank) < 2:
        return None
    calls: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    for rank, found in by_rank.items():
        for key, each in numbered(found).items():
            calls[key][rank] = each.end - each.start
    matched = [(key, times) for key, times in calls.items() if len(times) > 1]
    skews = (_skew(*place, [times for _, times in found]) for place, found in grouped(matched, lambda each: each[0][:2]).items())
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

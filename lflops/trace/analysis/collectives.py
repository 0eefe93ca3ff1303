"""Sum the times of collectives, and find out how long ranks wait for each other.

Algorithmic bandwidth is the message size divided by the time. Bus bandwidth is algorithmic
bandwidth times a factor that makes it comparable to the bandwidth of a link, as in NVIDIA's
nccl-tests. With n ranks, the factor is 2 (n - 1) / n for an all-reduce; (n - 1) / n for an
all-gather, a reduce-scatter and an all-to-all; and 1 for all other collectives.

On each rank, a collective's kernel runs from the rank's arrival until all ranks are done. So the
rank that arrives last has the shortest kernel, and the time of this kernel is the transfer time.
The other ranks waited for the rest of their kernel time. This comparison needs no common clock.

    rank 0    ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    rank 1            ▇▇▇▇▇▇▇▇     last: rank 1; rank 0 waited half of its time
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.intervals import Intervals, length, outside
from lflops.profile.collective_names import bus_factor, collective_kind
from lflops.profile.series import grouped, largest_known, ratio, sum_known
from lflops.trace.analysis.host_walk import HostWalk
from lflops.trace.analysis.operator_cost import BYTES
from lflops.trace.device_states import communicates
from lflops.trace.recorded import Collective, DeviceEvent, RecordedTrace, Span, covered

_RESULT_IS_LARGER = frozenset({"all_gather", "gather"})


class Occurrence(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        step: Name of the step in which the call was launched; empty if it was launched outside all
            steps, or if the launch is unknown.
        bytes: Size of the input or of the result, whichever is larger; `None` if unknown.
    """

    kind: str
    group: str
    group_size: int | None
    step: str
    start: int
    end: int
    bytes: int | None

    @property
    def duration(self) -> int:
        return self.end - self.start


class CollectiveTimes(Struct, frozen=True, kw_only=True):
    """Times and sizes of all calls of one kind of collective in one process group.

    Times are in nanoseconds; `None` means unknown.

    Attributes:
        group: The ranks, or the group's name if the ranks are unknown; empty if both are unknown.
        exposed: Time in which the device runs at least one of these collectives, but computes
            nothing.
        bytes: Total size of all messages.
        algorithmic_bytes_per_second: `bytes` divided by the time.
        bus_bytes_per_second: `algorithmic_bytes_per_second`, converted to a rate that is comparable
            to the bandwidth of a link.
    """

    kind: str
    group: str
    group_size: int | None
    calls: int
    device: int
    exposed: int
    bytes: int | None
    algorithmic_bytes_per_second: float | None
    bus_bytes_per_second: float | None


def occurrences(
    work: Iterable[DeviceEvent], walk: HostWalk, trace: RecordedTrace
) -> tuple[Occurrence, ...]:
    """Return every call of a collective on this rank, sorted by start."""
    steps = sorted(trace.steps(), key=attrgetter("start", "end", "name"))
    world_size = None
    if trace.groups == 1:
        world_size = trace.world_size
    found = []
    for each in work:
        if communicates(each):
            found.append(_occurrence(each, walk, steps, world_size))
    return tuple(sorted(found, key=attrgetter("start")))


def _occurrence(
    work: DeviceEvent, walk: HostWalk, steps: Sequence[Span], world_size: int | None
) -> Occurrence:
    launch = walk.launch(work)
    message = work.collective or launch.collective
    step = ""
    if launch.call is not None:
        step = _step_at(launch.call.start, steps)
    if message is None:
        kind = collective_kind(work.name)
        return Occurrence(kind, "", world_size, step, work.start, work.end, None)
    kind = collective_kind(message.name or work.name)
    return Occurrence(
        kind=kind,
        group=message.ranks or message.group,
        group_size=world_size if message.group_size is None else message.group_size,
        step=step,
        start=work.start,
        end=work.end,
        bytes=_bytes(kind, message),
    )


def _step_at(moment: int, steps: Iterable[Span]) -> str:
    for step in steps:
        if step.start <= moment < step.end:
            return step.name
    return ""


def _bytes(kind: str, message: Collective) -> int | None:
    element_size = BYTES.get(message.dtype.lower(), BYTES.get(message.dtype))
    if element_size is None:
        return None
    if kind in _RESULT_IS_LARGER and message.out_elements is None:
        return None
    elements = largest_known([message.in_elements, message.out_elements])
    if elements is None:
        return None
    return elements * element_size


def collectives(found: Sequence[Occurrence], computing: Intervals) -> tuple[CollectiveTimes, ...]:
    """Return the total times of collectives by kind and process group, the longest first.

    `computing` are the intervals in which the device computes.
    """
    groups: dict[tuple[str, str, int | None], list[Occurrence]] = grouped(
        found, attrgetter("kind", "group", "group_size")
    )
    rows = []
    for (kind, group, size), calls in groups.items():
        device = sum(each.duration for each in calls)
        exposed = outside(covered(calls), computing)
        moved = sum_known(each.bytes for each in calls)
        rate = ratio(moved, device / 1e9)
        factor = bus_factor(kind, size)
        bus_rate = None
        if rate is not None and factor is not None:
            bus_rate = rate * factor
        row = CollectiveTimes(
            kind=kind,
            group=group,
            group_size=size,
            calls=len(calls),
            device=device,
            exposed=length(exposed),
            bytes=moved,
            algorithmic_bytes_per_second=rate,
            bus_bytes_per_second=bus_rate,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.device, row.kind, row.group)))


class CollectiveSkew(Struct, frozen=True, kw_only=True):
    """How long ranks wait for each other in the collectives of one kind and process group.

    Only calls that at least two ranks recorded are included. Times are in nanoseconds.

    Attributes:
        transfer: Time of the shortest kernel of each call, summed over the calls.
        waiting: For each rank, the total time that it waited for the last rank.
        skew_median: Median time between the first and the last arrival at a call.
        skew_longest: Longest time between the first and the last arrival at a call.
        last: For each rank, the number of calls at which it arrived last.
    """

    kind: str
    group: str
    calls: int
    transfer: int
    waiting: Mapping[int, int]
    skew_median: int
    skew_longest: int
    last: Mapping[int, int]


class RankSkew(Struct, frozen=True, kw_only=True):
    """How long ranks wait for each other in all collectives together. Times are in nanoseconds.

    Attributes:
        collectives: The values for each kind of collective and process group.
        transfer: Time of the shortest kernel of each call, summed over all calls.
        waiting: For each rank, the total time that it waited for the last rank.
        last: For each rank, the number of calls at which it arrived last.
        unmatched: Number of calls that only one rank recorded.
    """

    ranks: tuple[int, ...]
    collectives: tuple[CollectiveSkew, ...]
    transfer: int
    waiting: Mapping[int, int]
    last: Mapping[int, int]
    unmatched: int

    @property
    def calls(self) -> int:
        """Number of calls that at least two ranks recorded."""
        return sum(row.calls for row in self.collectives)


Key = tuple[str, str, str, int]
"""Identifies a call of a collective: kind, group, step, and number of the call.

The number counts the calls of the same kind and group in the step. The same call has the same key
on all ranks.
"""


def numbered(found: Sequence[Occurrence]) -> dict[Key, Occurrence]:
    """Return the collectives of one rank, keyed so that a call has the same key on all ranks."""
    numbers: Counter[tuple[str, str, str]] = Counter()
    calls = {}
    for each in found:
        place = each.kind, each.group, each.step
        calls[*place, numbers[place]] = each
        numbers[place] += 1
    return calls


def rank_skew(by_rank: Mapping[int, Sequence[Occurrence]]) -> RankSkew | None:
    """Compute how long ranks wait for each other in collectives; `None` for fewer than two ranks.

    The n-th call of a kind and group in a step counts as the same call on all ranks.
    """
    if len(by_rank) < 2:
        return None
    calls: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    for rank, found in by_rank.items():
        for key, call in numbered(found).items():
            calls[key][rank] = call.duration
    groups: defaultdict[tuple[str, str], list[dict[int, int]]] = defaultdict(list)
    unmatched = 0
    for (kind, group, _, _), times in calls.items():
        if len(times) > 1:
            groups[kind, group].append(times)
        else:
            unmatched += 1
    rows = []
    for (kind, group), matched in groups.items():
        rows.append(_skew(kind, group, matched))
    rows.sort(key=lambda row: -sum(row.waiting.values()))
    ranks = tuple(sorted(by_rank))
    waiting = dict.fromkeys(ranks, 0)
    last = dict.fromkeys(ranks, 0)
    transfer = 0
    for row in rows:
        transfer += row.transfer
        for rank in row.waiting:
            waiting[rank] += row.waiting[rank]
            last[rank] += row.last.get(rank, 0)
    return RankSkew(
        ranks=ranks,
        collectives=tuple(rows),
        transfer=transfer,
        waiting=waiting,
        last=last,
        unmatched=unmatched,
    )


def _skew(kind: str, group: str, calls: Sequence[Mapping[int, int]]) -> CollectiveSkew:
    """Compute how long ranks wait for each other in the calls of one kind and group.

    For each call, `calls` has the kernel time of each rank in nanoseconds.
    """
    waiting: Counter[int] = Counter()
    last: Counter[int] = Counter()
    skews = []
    transfer = 0
    for times in calls:
        last_rank = min(times, key=lambda rank: (times[rank], rank))
        last[last_rank] += 1
        shortest = times[last_rank]
        transfer += shortest
        skews.append(max(times.values()) - shortest)
        for rank, took in times.items():
            waiting[rank] += took - shortest
    return CollectiveSkew(
        kind=kind,
        group=group,
        calls=len(calls),
        transfer=transfer,
        waiting=dict(sorted(waiting.items())),
        skew_median=round(statistics.median(skews)),
        skew_longest=max(skews),
        last=dict(sorted(last.items())),
    )

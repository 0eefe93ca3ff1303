"""Traces of several ranks: who comes last to the collectives, and how long the others wait.

The kernel of a collective runs from a rank's own arrival until all are done. So the rank that arrives last has the shortest kernel, which
is the transfer; what the others take longer they waited. This needs no common clock.

    rank 0    ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    rank 1            ▇▇▇▇▇▇▇▇     last: rank 1; rank 0 waited half of its time
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from lflops.profile.series import grouped
from lflops.trace_analysis.collectives import Occurrence


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

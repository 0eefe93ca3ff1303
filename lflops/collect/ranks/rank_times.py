"""The times of all ranks as one table. Of a large model only the places that can tell who is slow leave torch; the others are summed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lflops.collect.ranks.report import PlacesOfTable, RankHeader
from lflops.merging.rank_comparison import CANDIDATES
from lflops.merging.rank_stats import known_waits
from lflops.merging.rank_table import Place, RankTable, Repeated, Series, intervals_of, median_step, repeated_places

__all__ = ["RankTimes"]

AT_ONCE = 1 << 18
"""Values that are compared together."""

MOST_VALUES = 400_000
"""Of all ranks, steps and places together: places beyond that are summed."""

FEWEST_PLACES = 64

MOST_INTERVALS = 64

RANKS_AT_ONCE = 32
"""Ranks whose times are summed together."""


@dataclass(kw_only=True)
class _Group:
    """The ranks that have the same places and steps. Their times are ranks x (steps and one row more) x places."""

    at: tuple[int, ...]
    places: PlacesOfTable
    ranks: list[int]
    times: Tensor
    columns: dict[Place, int] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = {place: column for column, place in enumerate(self.places.places)}

    def steps(self, common: AbstractSet[int]) -> Tensor:
        """The times in these steps; where those are all, without a copy."""
        if common >= set(self.at):
            return self.times[:, :-1]
        return self.times[:, [index for index, at in enumerate(self.at) if at in common]]


class RankTimes:
    """Takes each rank's times once."""

    def __init__(self, heads: Sequence[RankHeader], tables: Mapping[str, PlacesOfTable]) -> None:
        members: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for head in heads:
            if head.at:
                members[head.brief.table, head.at].append(head.brief.rank)
        self.groups = [
            _Group(at=at, places=tables[table], ranks=ranks, times=torch.zeros(len(ranks), len(at) + 1, len(tables[table].places)))
            for (table, at), ranks in members.items()
        ]
        self._homes = {rank: (group, row) for group in self.groups for row, rank in enumerate(group.ranks)}
        self.waits = {wait for places in tables.values() for wait in places.waits}  # where ranks wait for each other
        # Where collectives begin that are awaited elsewhere.
        self.begins = {begun for places in tables.values() for begun in places.begins}
        self.disturbed = {step for head in heads for step in head.disturbed}  # steps that are no measure of one of the ranks
        # Exposed seconds of collectives, by rank, in the places where all ranks know them.
        self.known = known_waits(
            {
                head.brief.rank: {tables[head.brief.table].places[number]: seconds for number, seconds in head.waiting.items()}
                for head in heads
            }
        )

    def add(self, rank: int, times: bytes) -> None:
        """Take a rank's, as they were packed."""
        if rank in self._homes and times:
            group, row = self._homes[rank]
            group.times[row] = torch.frombuffer(bytearray(times), dtype=torch.float32).view(len(group.at) + 1, -1)

    def of(self, rank: int) -> list[list[float]]:
        """The times of one rank, as its profile has them: of each step, in each place."""
        if rank not in self._homes:
            return []
        group, row = self._homes[rank]
        times: list[list[float]] = (group.times[row, :-1].double() * group.times[row, -1].double()).tolist()
        return times

    def table(self, patterns: Mapping[str, str]) -> RankTable | None:
        """All ranks in the steps that they have in common, without disturbed ones if there are others; `None` where there are none."""
        common = set.intersection(*(set(group.at) for group in self.groups)) if self.groups else set()
        if not common or len(self._homes) < 2:
            return None
        common = common - self.disturbed or common
        return _Selection(self, [group.steps(common) for group in self.groups], patterns).table()


class _Selection:
    """Makes the table of those places that can tell who is slow."""

    def __init__(self, times: RankTimes, steps: Sequence[Tensor], patterns: Mapping[str, str]) -> None:
        self._groups, self._known, self._begins = times.groups, times.known, times.begins
        self._steps, self._patterns = steps, patterns
        self._waits = times.waits
        self._ranks = sorted(rank for group in self._groups for rank in group.ranks)
        self._having: dict[Place, tuple[int, ...]] = {}
        for index, group in enumerate(self._groups):
            for place in group.columns:
                self._having[place] = (*self._having.get(place, ()), index)
        self._intervals = _few(intervals_of(self._having, self._waits))

    def table(self) -> RankTable:
        number = max(self._intervals.values(), default=0) + 1
        sums = [self._summed(group, times, number) for group, times in zip(self._groups, self._steps, strict=True)]
        busy = torch.cat(sums)[:, :, :number]
        late = (busy - busy.median(0).values).clamp(min=0).mean(1).sum(1)
        slowest = set(late.topk(min(CANDIDATES, len(late))).indices.tolist())
        ranks = [rank for group in self._groups for rank in group.ranks]
        candidates = {ranks[row] for row in slowest}
        chosen = self._chosen(candidates)
        waiting = self._series(torch.cat(sums)[:, :, number:], ranks)
        of_intervals = {interval: self._series(busy[:, :, interval : interval + 1], ranks) for interval in range(number)}
        staged = any(
            place.row and sum(len(self._groups[index].ranks) for index in having) < len(ranks) for place, having in self._having.items()
        )
        return RankTable(
            seconds={place: self._of(place) for place in self._having if place in chosen},
            repeated=self._repeated(candidates),
            busy=of_intervals,
            waiting=waiting,
            intervals=self._intervals,
            waits=frozenset(self._waits),
            begins=frozenset(self._begins - self._waits),
            step_seconds=median_step([waiting, *of_intervals.values()]),
            staged=staged,
            known_waits=self._known,
            patterns=self._patterns,
        )

    def _summed(self, group: _Group, times: Tensor, intervals: int) -> Tensor:
        """Ranks x steps x intervals, and all waiting after the last interval."""
        columns = torch.tensor([self._intervals.get(place, intervals) for place in group.columns])
        sums = torch.zeros(*times.shape[:2], intervals + 1, dtype=torch.float64)
        for start in range(0, len(times), RANKS_AT_ONCE):
            some = slice(start, start + RANKS_AT_ONCE)
            sums[some].index_add_(2, columns, times[some].double())
        return sums

    def _series(self, sums: Tensor, ranks: Sequence[int]) -> Series:
        by_rank = dict(zip(ranks, sums[:, :, 0].tolist(), strict=True))
        return {rank: by_rank[rank] for rank in self._ranks}

    def _of(self, place: Place) -> Series:
        found: dict[int, list[float]] = {}
        for index in self._having[place]:
            group = self._groups[index]
            found |= zip(group.ranks, self._steps[index][:, :, group.columns[place]].double().tolist(), strict=True)
        return {rank: found[rank] for rank in sorted(found)}

    def _chosen(self, candidates: set[int]) -> set[Place]:
        """The places in which a candidate takes longest beyond the others, and those that take longest, as many as there is room for."""
        steps = self._steps[0].shape[1]
        room = max(MOST_VALUES // (len(self._ranks) * steps), FEWEST_PLACES)
        if len(self._having) <= room:
            return set(self._having)
        beyond: dict[Place, float] = {}
        longest: dict[Place, float] = {}
        shared: dict[tuple[int, ...], list[Place]] = defaultdict(list)
        for place, having in self._having.items():
            shared[having].append(place)
        for having, places in shared.items():
            number = sum(len(self._groups[index].ranks) for index in having)
            width = max(AT_ONCE // (number * steps), 1)
            for start in range(0, len(places), width):
                some = places[start : start + width]
                excess, usual = self._excess(having, some, candidates)
                beyond |= zip(some, excess, strict=True)
                longest |= zip(some, usual, strict=True)
        by_excess = sorted(beyond, key=beyond.__getitem__, reverse=True)[: room // 2]
        return {*by_excess, *sorted(longest, key=longest.__getitem__, reverse=True)[: room // 2]}

    def _excess(self, having: tuple[int, ...], places: Sequence[Place], candidates: set[int]) -> tuple[list[float], list[float]]:
        """Of each place the largest mean excess of a candidate, and the median rank's mean time."""
        groups = [self._groups[index] for index in having]
        times = torch.cat(
            [self._steps[index][:, :, [group.columns[place] for place in places]] for index, group in zip(having, groups, strict=True)]
        )
        rows = [row for row, rank in enumerate(rank for group in groups for rank in group.ranks) if rank in candidates]
        usual = times.median(0).values
        excess = (times[rows] - usual).clamp(min=0).mean(1).amax(0) if rows else torch.zeros(len(places))
        return excess.tolist(), usual.mean(0).tolist()

    def _repeated(self, candidates: set[int]) -> dict[Place, Repeated]:
        """Modules that repeat, each kind summed: those kinds in which a candidate takes longest beyond the others."""
        found: dict[Place, Repeated] = {}
        for pattern, members in repeated_places(self._intervals, self._patterns).items():
            having = set.intersection(*(set(self._having[member]) for member in members))
            sums: dict[int, list[float]] = {}
            for index in having:
                group = self._groups[index]
                columns = [group.columns[member] for member in members]
                sums |= zip(group.ranks, _sum_of(self._steps[index], columns).tolist(), strict=True)
            if len(sums) > 1 and (candidates & sums.keys()):
                intervals = tuple({self._intervals[member] for member in members})
                found[pattern] = Repeated(len(members), intervals, {rank: sums[rank] for rank in sorted(sums)})
        return found


def _sum_of(times: Tensor, columns: Sequence[int]) -> Tensor:
    """Ranks x steps, over some of the places; some ranks after the other, so that few are copied at once."""
    return torch.cat([some[:, :, columns].double().sum(2) for some in times.split(RANKS_AT_ONCE)])


def _few(intervals: Mapping[Place, int]) -> dict[Place, int]:
    """The same, neighbours together where there are too many."""
    number = max(intervals.values(), default=0) + 1
    return {place: interval * MOST_INTERVALS // number if number > MOST_INTERVALS else interval for place, interval in intervals.items()}

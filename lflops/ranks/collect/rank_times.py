"""Store the times of modules on all ranks as tensors, and make a table for straggler detection.

A place is a module in a phase, such as `layers.3.mlp` in backward. There may be thousands of ranks,
steps and places, so the times are summed and compared as tensors. The resulting `RankTable`
consists of Python numbers, so it has only the most important places.
"""

from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from itertools import chain

import torch
from torch import Tensor

from lflops.profile.records import ModulePhase
from lflops.profile.series import grouped, positions
from lflops.ranks.collect.report import PlacesOfTable, RankHeader
from lflops.ranks.merge.rank_comparison import CANDIDATES
from lflops.ranks.merge.rank_series import RankSeries
from lflops.ranks.merge.rank_table import (
    RankTable,
    Repeated,
    exposed_on_all_ranks,
    few_intervals,
    intervals_of,
    repeated_places,
)

# Approximate maximum number of values that are compared at once, to limit the memory.
AT_ONCE = 1 << 18
# Number of ranks whose times are summed at once.
RANKS_AT_ONCE = 32
# Maximum number of values in a table, over all ranks, steps and places.
MOST_VALUES = 400_000
# Number of places (modules in a phase) that a table may always have, even if it then has more than
# MOST_VALUES values.
FEWEST_PLACES = 64


class _Group:
    """Stores the times of ranks that have the same places and the same steps, in one tensor.

    A place is a module in a phase.

    Attributes:
        at: The index of each step, as in `Step.index`.
        columns: The column of each place in the tensor.
        rows: The row of each rank in the tensor.
    """

    def __init__(self, at: tuple[int, ...], places: PlacesOfTable, ranks: Sequence[int]) -> None:
        self.at = at
        self.columns = positions(places.places)
        self.rows = positions(ranks)
        # Shape: [ranks, steps + 1, places]. After the steps of a rank, there is a row with the
        # factors that remove hook overhead from the times of each place.
        self._times = torch.zeros(len(ranks), len(at) + 1, len(self.columns))

    def set(self, rank: int, times: bytes) -> None:
        """Store the times of a rank in the format of `Packed.times`."""
        by_step = torch.frombuffer(bytearray(times), dtype=torch.float32)
        self._times[self.rows[rank]] = by_step.view(len(self.at) + 1, -1)

    def scaled(self, row: int) -> list[list[float]]:
        """Return the times of one rank without hook overhead: one list for each step.

        A list has the time in each place (a module in a phase), in the order of `columns`. `row` is
        the rank's row in the tensor.
        """
        times = self._times[row].double()
        scaled: list[list[float]] = (times[:-1] * times[-1]).tolist()
        return scaled

    def steps(self, chosen: AbstractSet[int]) -> Tensor:
        """Return the times of all ranks in the steps with the given indices.

        The shape is [ranks, steps, places]. A place is a module in a phase. The times include hook
        overhead.
        """
        rows = [row for row, at in enumerate(self.at) if at in chosen]
        if len(rows) == len(self.at):
            return self._times[:, :-1]
        return self._times[:, rows]


class RankTimes:
    """Collects the times of modules on all ranks, and makes the `RankTable` that compares them.

    Args:
        heads: The headers of the reports of all ranks.
        tables: The places (modules in a phase) in each shared table, by `RankSummary.table`.
    """

    def __init__(self, heads: Sequence[RankHeader], tables: Mapping[str, PlacesOfTable]) -> None:
        self._table_of_rank: dict[int, str] = {}
        self._world = 1
        self._groups_of_table: dict[str, list[_Group]] = {}
        self._group_of_rank: dict[int, _Group] = {}
        ranks_alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for head in heads:
            summary = head.summary
            self._table_of_rank[summary.rank] = summary.table
            self._world = max(self._world, summary.run.world_size)
            if head.at:
                key = (summary.table, head.at)
                ranks_alike.setdefault(key, []).append(summary.rank)
        for (table, at), ranks in ranks_alike.items():
            group = _Group(at, tables[table], ranks)
            self._groups_of_table.setdefault(table, []).append(group)
            self._group_of_rank.update(dict.fromkeys(ranks, group))
        self._waits: set[ModulePhase] = set()
        self._async_starts: set[ModulePhase] = set()
        for places in tables.values():
            self._waits.update(places.waits)
            self._async_starts.update(places.async_starts)
        self._disturbed: set[int] = set()
        waiting = {}
        for head in heads:
            self._disturbed.update(head.disturbed)
            places = tables[head.summary.table]
            exposed = {}
            for number, seconds in head.waiting.items():
                exposed[places.places[number]] = seconds
            waiting[head.summary.rank] = exposed
        self._exposed_on_all_ranks = exposed_on_all_ranks(waiting)

    def add(self, rank: int, times: bytes) -> None:
        """Store the packed times of a rank. Does nothing if the rank has sent no times."""
        if rank in self._group_of_rank and times:
            self._group_of_rank[rank].set(rank, times)

    def of(self, rank: int) -> list[list[float]]:
        """Return the times of a rank without hook overhead: one list for each step.

        A list has the time in each place (a module in a phase). If the rank has sent no times,
        returns the times of another rank that did the same work, or an empty list if there is no
        such rank.
        """
        if rank in self._group_of_rank:
            group = self._group_of_rank[rank]
            return group.scaled(group.rows[rank])
        groups = self._groups_of_table.get(self._table_of_rank[rank], [])
        if not groups:
            return []
        return groups[0].scaled(0)

    def table(self, patterns: Mapping[str, str]) -> RankTable | None:
        """Make a table of the ranks that have sent times, over the steps that all of them have.

        Steps whose duration was not typical on some rank, for example because of warmup, are left
        out unless all steps are like this. Returns `None` if the ranks have no step in common, or
        if fewer than two ranks have sent times. `patterns` is described in `RankTable`.
        """
        if len(self._group_of_rank) < 2:
            return None
        groups = list(chain.from_iterable(self._groups_of_table.values()))
        common = set(groups[0].at)
        for group in groups:
            common.intersection_update(group.at)
        if not common:
            return None
        undisturbed = common - self._disturbed
        chosen = undisturbed or common
        selection = _Selection(groups, chosen, self._waits, patterns, self._world)
        return selection.table(self._async_starts, self._exposed_on_all_ranks)


class _Selection:
    """Makes a `RankTable` with only the places that best show which rank is slow.

    A place is a module in a phase. The ranks are divided into groups (see `_Group`). This class
    refers to a group by the index of the group in the argument `groups`. The tensors of this class
    have the ranks of the first group first, then the ranks of the second group, and so on.
    """

    def __init__(
        self,
        groups: Sequence[_Group],
        steps: AbstractSet[int],
        waits: AbstractSet[ModulePhase],
        patterns: Mapping[str, str],
        world: int,
    ) -> None:
        self._groups = groups
        self._patterns = patterns
        self._waits = waits
        self._times = [group.steps(steps) for group in groups]
        # All ranks in the order of the tensors: group by group.
        self._ranks = self._ranks_of(range(len(groups)))
        # For each place, the indices of the groups that have it.
        self._having: dict[ModulePhase, tuple[int, ...]] = {}
        for number, group in enumerate(groups):
            for place in group.columns:
                self._having[place] = (*self._having.get(place, ()), number)
        self._is_staged = False
        for place, having in self._having.items():
            if place.fqn and len(having) < len(groups):
                self._is_staged = True
        self._intervals = few_intervals(intervals_of(self._having, waits), world)
        self._number_of_intervals = max(self._intervals.values(), default=0) + 1
        # Shape: [ranks, steps, intervals + 1]. The last column has the time in places where ranks
        # wait for each other.
        sums = torch.cat(list(map(self._summed, groups, self._times)))
        self._busy = sums[:, :, :-1]
        self._waiting = sums[:, :, -1]
        self._candidates = self._latest_ranks()

    def table(
        self,
        async_starts: AbstractSet[ModulePhase],
        known: Mapping[ModulePhase, Mapping[int, float]],
    ) -> RankTable:
        """Build the table of the selected places. A place is a module in a phase.

        Args:
            async_starts: The places that start a collective whose result is awaited in another
                place. If ranks also wait in one of these places, the table leaves it out of
                `RankTable.async_starts`.
            known: See `RankTable.exposed_on_all_ranks`.
        """
        chosen = self._chosen_places()
        seconds = {}
        for place in self._having:
            if place in chosen:
                seconds[place] = self._series(place)
        busy = {}
        for interval in range(self._number_of_intervals):
            busy[interval] = _sorted_series(self._ranks, self._busy[:, :, interval])
        return RankTable(
            seconds=seconds,
            repeated=self._repeated(),
            busy=busy,
            waiting=_sorted_series(self._ranks, self._waiting),
            intervals=self._intervals,
            waits=frozenset(self._waits),
            async_starts=frozenset(async_starts - self._waits),
            staged=self._is_staged,
            exposed_on_all_ranks=known,
            patterns=self._patterns,
        )

    def _ranks_of(self, having: Iterable[int]) -> list[int]:
        """Return the ranks of the groups with the indices `having`, one group after another."""
        ranks: list[int] = []
        for number in having:
            ranks += self._groups[number].rows
        return ranks

    def _summed(self, group: _Group, times: Tensor) -> Tensor:
        """Add up the times of each rank within each interval.

        An interval is the part of a step between two collectives, and usually contains many places
        (modules in a phase). The shape of the result is [ranks, steps, intervals + 1]. The last
        column is the total time in the places where ranks wait for each other, which are in no
        interval.
        """
        after_all = self._number_of_intervals
        intervals = [self._intervals.get(place, after_all) for place in group.columns]
        columns = torch.tensor(intervals, dtype=torch.long)
        ranks, steps, _ = times.shape
        sums = torch.zeros(ranks, steps, after_all + 1, dtype=torch.float64)
        for start in range(0, ranks, RANKS_AT_ONCE):
            some = slice(start, start + RANKS_AT_ONCE)
            sums[some].index_add_(2, columns, times[some].double())
        return sums

    def _latest_ranks(self) -> set[int]:
        """Return the ranks that are latest, on average over the steps, at most `CANDIDATES` ranks.

        A rank is late if, before a collective, it computes longer than the median rank. If ranks
        have different modules, their times cannot be compared in this way. In this case, the ranks
        that wait least are returned.
        """
        if self._is_staged:
            late = -self._waiting.mean(1)
        else:
            beyond = self._busy - self._busy.median(0).values
            late = beyond.clamp(min=0).mean(1).sum(1)
        rows = late.topk(min(CANDIDATES, len(late))).indices.tolist()
        return {self._ranks[row] for row in rows}

    def _series(self, place: ModulePhase) -> RankSeries:
        """Return the times of all ranks that have this place (a module in a phase)."""
        having = self._having[place]
        seconds = self._stacked(having, [place])[:, :, 0].double()
        return _sorted_series(self._ranks_of(having), seconds)

    def _stacked(self, having: Sequence[int], places: Sequence[ModulePhase]) -> Tensor:
        """Join the times of several groups in the given places (modules in a phase).

        `having` has the indices of the groups. The shape of the result is [ranks, steps, places].
        """
        parts = []
        for number in having:
            parts.append(self._times[number][:, :, self._columns(number, places)])
        return torch.cat(parts)

    def _columns(self, number: int, places: Iterable[ModulePhase]) -> list[int]:
        """Return the columns of the given places (modules in a phase) in the tensor of one group.

        `number` is the index of the group.
        """
        columns = self._groups[number].columns
        return [columns[place] for place in places]

    def _chosen_places(self) -> set[ModulePhase]:
        """Select as many places (modules in a phase) as fit into a table.

        If not all places fit, one half of the selected places are the places in which a late rank
        takes longest compared with the other ranks. The other half are the places that usually take
        longest.
        """
        values_of_place = len(self._ranks) * self._times[0].shape[1]
        room = max(MOST_VALUES // values_of_place, FEWEST_PLACES)
        if len(self._having) <= room:
            return set(self._having)
        excess: dict[ModulePhase, float] = {}
        usual: dict[ModulePhase, float] = {}
        for having, places in grouped(self._having, self._having.__getitem__).items():
            values = len(self._ranks_of(having)) * self._times[0].shape[1]
            width = max(AT_ONCE // values, 1)
            for start in range(0, len(places), width):
                some = places[start : start + width]
                excess_of_some, usual_of_some = self._excess(having, some)
                excess.update(zip(some, excess_of_some, strict=True))
                usual.update(zip(some, usual_of_some, strict=True))
        most_excess = sorted(excess, key=excess.__getitem__, reverse=True)
        longest = sorted(usual, key=usual.__getitem__, reverse=True)
        return {*most_excess[: room // 2], *longest[: room // 2]}

    def _excess(
        self, having: Sequence[int], places: Sequence[ModulePhase]
    ) -> tuple[list[float], list[float]]:
        """Return, for each place, the largest extra time of a late rank, and the usual time.

        A place is a module in a phase. The usual time is the median over the ranks that have the
        place. The extra time of a rank is its time beyond this median. Both are means over the
        steps. `having` has the indices of the groups whose ranks have the places.
        """
        times = self._stacked(having, places)
        ranks = self._ranks_of(having)
        rows = [row for row, rank in enumerate(ranks) if rank in self._candidates]
        usual = times.median(0).values
        excess = torch.zeros(len(places))
        if rows:
            excess = (times[rows] - usual).clamp(min=0).mean(1).amax(0)
        return excess.tolist(), usual.mean(0).tolist()

    def _repeated(self) -> dict[ModulePhase, Repeated]:
        """Return the summed times of repeated modules, such as all `layers.*.mlp`, on each rank.

        A key of the result is a place (a module in a phase) with the pattern as the name of the
        module, such as `layers.*.mlp` in backward. A pattern is left out if fewer than two ranks
        have all of its modules, or if none of these ranks is late.
        """
        repeated = {}
        for pattern, members in repeated_places(self._intervals, self._patterns).items():
            having_all = set(self._having[members[0]])
            intervals = set()
            for member in members:
                having_all.intersection_update(self._having[member])
                intervals.add(self._intervals[member])
            having = sorted(having_all)
            ranks = self._ranks_of(having)
            if len(ranks) < 2 or self._candidates.isdisjoint(ranks):
                continue
            sums = [self._sum_of_places(number, members) for number in having]
            repeated[pattern] = Repeated(
                modules=len(members),
                intervals=tuple(sorted(intervals)),
                seconds=_sorted_series(ranks, torch.cat(sums)),
            )
        return repeated

    def _sum_of_places(self, number: int, places: Sequence[ModulePhase]) -> Tensor:
        """Return the times of one group of ranks, summed over the given places.

        A place is a module in a phase. `number` is the index of the group. The shape of the result
        is [ranks, steps].
        """
        columns = self._columns(number, places)
        sums = []
        # Only a few ranks are copied at once.
        for times in self._times[number].split(RANKS_AT_ONCE):
            sums.append(times[:, :, columns].double().sum(2))
        return torch.cat(sums)


def _sorted_series(ranks: Sequence[int], seconds: Tensor) -> RankSeries:
    """Convert a tensor of shape [ranks, steps] to a series in ascending order of ranks.

    `ranks` has the rank of each row of the tensor.
    """
    by_rank = dict(zip(ranks, map(tuple, seconds.tolist()), strict=True))
    return RankSeries(sorted(by_rank.items()))

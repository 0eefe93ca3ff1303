"""One window's reports: what a rank hands in, and what rank 0 makes of those that are there.

The times of modules are the large part. If they are too many, all ranks but some that are drawn by
lot keep them until rank 0 has seen who is late, and asks. So nothing grows with ranks times
modules, and a host that is lost takes no other's report with it.
"""

import functools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from lflops.profile.profile import Memory, Profile
from lflops.profile.records import ModulePhase, Rank
from lflops.profile.series import grouped
from lflops.ranks.collect.report import (
    Packed,
    PlacesOfTable,
    RankHeader,
    RankReport,
    Table,
    intervals_in,
    pack,
    rows_in,
    unpacked,
)
from lflops.ranks.collect.store import RankStore, poll
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.merge import merged
from lflops.ranks.merge.rank_comparison import CANDIDATES
from lflops.ranks.merge.rank_table import (
    RankTable,
    Repeated,
    Series,
    few_intervals,
    intervals_of,
    known_waits,
    median_step,
    repeated_places,
)

# values that are compared together
AT_ONCE = 1 << 18
# of all ranks, steps and places together: places beyond that are summed
MOST_VALUES = 400_000

FEWEST_PLACES = 64

ASKED = CANDIDATES + 2
"""Ranks at most that are asked for their times.

The late ones, the one whose rows are shown, and the one whose times are.
"""

# ranks whose times are summed together
RANKS_AT_ONCE = 32


@dataclass(kw_only=True)
class _Group:
    """The ranks that have the same places and steps.

    Their times are ranks x (steps and one row more) x places.
    """

    at: tuple[int, ...]
    places: PlacesOfTable
    ranks: list[int]
    # of the ranks that keep their times
    sums: dict[int, bytes]
    times: Tensor = field(init=False)
    # of each rank whose times are there or to come
    rows: dict[int, int] = field(init=False)
    columns: dict[ModulePhase, int] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = {place: column for column, place in enumerate(self.places.places)}
        self.rows = {
            rank: row
            for row, rank in enumerate(rank for rank in self.ranks if rank not in self.sums)
        }
        room = len(self.rows) + min(len(self.sums), ASKED)
        self.times = torch.zeros(room, len(self.at) + 1, len(self.columns))

    def steps(self, common: AbstractSet[int]) -> Tensor:
        """The times in these steps; where those are all, without a copy."""
        times = self.times[: len(self.rows)]
        return times[:, :-1] if common >= set(self.at) else times[:, self._indices(common)]

    def sums_of(self, rank: int, common: AbstractSet[int]) -> Tensor:
        """What a rank that keeps its times has handed in of these steps.

        Steps x (intervals and waiting).
        """
        sums = torch.frombuffer(bytearray(self.sums[rank]), dtype=torch.float64).view(
            len(self.at), -1
        )
        return sums if common >= set(self.at) else sums[self._indices(common)]

    def _indices(self, common: AbstractSet[int]) -> list[int]:
        return [index for index, at in enumerate(self.at) if at in common]


class RankTimes:
    """Takes each rank's times once."""

    def __init__(self, heads: Sequence[RankHeader], tables: Mapping[str, PlacesOfTable]) -> None:
        members = grouped(
            (head for head in heads if head.at), lambda head: (head.summary.table, head.at)
        )
        self.groups = [
            _Group(
                at=at,
                places=tables[table],
                ranks=[head.summary.rank for head in of_group],
                sums={head.summary.rank: head.sums for head in of_group if head.sums},
            )
            for (table, at), of_group in members.items()
        ]
        self._homes = {rank: group for group in self.groups for rank in group.ranks}
        self.world = max((head.summary.run.world_size for head in heads), default=1)
        self.waits = {
            wait
            for places in tables.values()
            for wait in places.waits
            # where ranks wait for each other
        }
        # Where collectives begin that are awaited elsewhere.
        self.begins = {begun for places in tables.values() for begun in places.begins}
        self.disturbed = {
            step
            for head in heads
            for step in head.disturbed
            # steps that are no measure of one of the ranks
        }
        # Exposed seconds of collectives, by rank, in the places where all ranks know them.
        self.known = known_waits(
            {
                head.summary.rank: {
                    tables[head.summary.table].places[number]: seconds
                    for number, seconds in head.waiting.items()
                }
                for head in heads
            }
        )

    def add(self, rank: int, times: bytes) -> None:
        if rank in self._homes and times:
            group = self._homes[rank]
            by_step = torch.frombuffer(bytearray(times), dtype=torch.float32).view(
                len(group.at) + 1, -1
            )
            group.times[group.rows.setdefault(rank, len(group.rows))] = by_step

    def has(self, rank: int) -> bool:
        """Whether its times are there, or to come unasked."""
        return rank in self._homes and rank in self._homes[rank].rows

    def of(self, rank: int) -> list[list[float]]:
        """The times of one rank, as its profile has them: of each step, in each place.

        If it keeps them, those of one that did the same.
        """
        group = self._homes.get(rank)
        if group is None or not group.rows:
            return []
        row = group.rows.get(rank, 0)
        times: list[list[float]] = (
            group.times[row, :-1].double() * group.times[row, -1].double()
        ).tolist()
        return times

    def wanted(self) -> list[int]:
        """The ranks to ask for their times.

        Of those that keep them the late ones, and where rows or times may be shown of one.
        """
        if (
            not any(group.sums for group in self.groups)
            or (selection := self._selection({})) is None
        ):
            return []
        shown = [group.ranks[0] for group in self.groups]
        return [
            rank
            for rank in dict.fromkeys([*selection.candidates, *shown])
            if rank in self._homes[rank].sums
        ][:ASKED]

    def table(self, patterns: Mapping[str, str]) -> RankTable | None:
        """All ranks in the steps that they have in common, without disturbed ones if there are others.

        `None` where there are none.
        """
        selection = self._selection(patterns)
        return None if selection is None else selection.table()

    def _selection(self, patterns: Mapping[str, str]) -> "_Selection | None":
        common = (
            set.intersection(*(set(group.at) for group in self.groups)) if self.groups else set()
        )
        if not common or len(self._homes) < 2:
            return None
        return _Selection(self, common - self.disturbed or common, patterns)


class _Selection:
    """Makes the table of those places that can tell who is slow."""

    def __init__(
        self, times: RankTimes, common: AbstractSet[int], patterns: Mapping[str, str]
    ) -> None:
        self._groups, self._known, self._begins = times.groups, times.known, times.begins
        self._steps, self._patterns = [group.steps(common) for group in self._groups], patterns
        self._waits = times.waits
        self._ranks = sorted(rank for group in self._groups for rank in group.ranks)
        self._having: dict[ModulePhase, tuple[int, ...]] = {}
        for index, group in enumerate(self._groups):
            for place in group.columns:
                self._having[place] = (*self._having.get(place, ()), index)
        self._number = {
            place: sum(len(self._groups[index].ranks) for index in having)
            for place, having in self._having.items()
        }
        self._staged = any(
            place.fqn and number < len(self._ranks) for place, number in self._number.items()
        )
        self._intervals = few_intervals(intervals_of(self._having, self._waits), times.world)
        if any(group.sums and not self._sums_as(group, times.world) for group in self._groups):
            self._intervals = dict.fromkeys(self._intervals, 0)
        number = max(self._intervals.values(), default=0) + 1
        self._rows = [rank for group in self._groups for rank in group.ranks]
        sums = torch.cat(
            [
                self._summed(group, steps, number, common)
                for group, steps in zip(self._groups, self._steps, strict=True)
            ]
        )
        self._busy, self._waiting = sums[:, :, :number], sums[:, :, number]
        late = (self._busy - self._busy.median(0).values).clamp(min=0).mean(1).sum(1)
        # ranks have different modules: the late one is the one that waits least
        if self._staged:
            late = -self._waiting.mean(1)
        self.candidates = [
            self._rows[row] for row in late.topk(min(CANDIDATES, len(late))).indices.tolist()
        ]

    def table(self) -> RankTable:
        candidates = set(self.candidates)
        self._having = {
            place: there
            for place, having in self._having.items()
            if (there := tuple(each for each in having if self._groups[each].rows))
        }
        chosen = self._chosen(candidates)
        waiting = self._series(self._waiting)
        of_intervals = {
            interval: self._series(self._busy[:, :, interval])
            for interval in range(self._busy.shape[2])
        }
        return RankTable(
            seconds={place: self._of(place) for place in self._having if place in chosen},
            repeated=self._repeated(candidates),
            busy=of_intervals,
            waiting=waiting,
            intervals=self._intervals,
            waits=frozenset(self._waits),
            begins=frozenset(self._begins - self._waits),
            step_seconds=median_step([waiting, *of_intervals.values()]),
            staged=self._staged,
            known_waits=self._known,
            patterns=self._patterns,
            having={place: self._number[place] for place in chosen}
            if any(group.sums for group in self._groups)
            else {},
        )

    def _sums_as(self, group: _Group, world: int) -> bool:
        """Whether the intervals that the group's ranks have summed are those of all."""
        own = intervals_in(group.places, world)
        return all(own.get(place) == self._intervals.get(place) for place in group.columns) and (
            max(own.values(), default=0) == max(self._intervals.values(), default=0)
        )

    def _summed(
        self, group: _Group, times: Tensor, intervals: int, common: AbstractSet[int]
    ) -> Tensor:
        """Ranks x steps x intervals, and all waiting after the last interval."""
        columns = torch.tensor(
            [self._intervals.get(place, intervals) for place in group.columns], dtype=torch.long
        )
        sums = torch.zeros(len(group.ranks), times.shape[1], intervals + 1, dtype=torch.float64)
        whole = [
            row
            for row, rank in enumerate(group.ranks)
            if rank not in group.sums
            # in the order of their times
        ]
        for start in range(0, len(whole), RANKS_AT_ONCE):
            some = whole[start : start + RANKS_AT_ONCE]
            of_some = torch.zeros(len(some), times.shape[1], intervals + 1, dtype=torch.float64)
            sums[some] = of_some.index_add_(2, columns, times[start : start + len(some)].double())
        for row, rank in enumerate(group.ranks):
            if rank in group.sums:
                handed_in = group.sums_of(rank, common)
                sums[row, :, intervals] = handed_in[:, -1]
                if handed_in.shape[1] == intervals + 1:
                    sums[row, :, :intervals] = handed_in[:, :-1]
                else:
                    # other intervals than the others': all of them together
                    sums[row, :, 0] = handed_in[:, :-1].sum(1)
        return sums

    def _series(self, sums: Tensor) -> Series:
        by_rank = dict(zip(self._rows, map(tuple, sums.tolist()), strict=True))
        return {rank: by_rank[rank] for rank in self._ranks}

    def _of(self, place: ModulePhase) -> Series:
        found: dict[int, tuple[float, ...]] = {}
        for index in self._having[place]:
            group = self._groups[index]
            found |= zip(
                group.rows,
                map(tuple, self._steps[index][:, :, group.columns[place]].double().tolist()),
                strict=True,
            )
        return {rank: found[rank] for rank in sorted(found)}

    def _chosen(self, candidates: set[int]) -> set[ModulePhase]:
        """The places in which a candidate takes longest beyond the others, and those that take longest, as many as there is room for."""
        steps = self._steps[0].shape[1]
        room = max(MOST_VALUES // (sum(map(len, self._steps)) * steps), FEWEST_PLACES)
        if len(self._having) <= room:
            return set(self._having)
        beyond: dict[ModulePhase, float] = {}
        longest: dict[ModulePhase, float] = {}
        for having, places in grouped(self._having, self._having.__getitem__).items():
            number = sum(len(self._steps[index]) for index in having)
            width = max(AT_ONCE // (number * steps), 1)
            for start in range(0, len(places), width):
                some = places[start : start + width]
                excess, usual = self._excess(having, some, candidates)
                beyond |= zip(some, excess, strict=True)
                longest |= zip(some, usual, strict=True)
        by_excess = sorted(beyond, key=beyond.__getitem__, reverse=True)[: room // 2]
        return {*by_excess, *sorted(longest, key=longest.__getitem__, reverse=True)[: room // 2]}

    def _excess(
        self, having: tuple[int, ...], places: Sequence[ModulePhase], candidates: set[int]
    ) -> tuple[list[float], list[float]]:
        """Return the largest mean excess of a candidate in each place, and the median rank's mean time there."""
        groups = [self._groups[index] for index in having]
        times = torch.cat(
            [
                self._steps[at][:, :, [group.columns[p] for p in places]]
                for at, group in zip(having, groups, strict=True)
            ]
        )
        rows = [
            row
            for row, rank in enumerate(rank for group in groups for rank in group.rows)
            if rank in candidates
        ]
        usual = times.median(0).values
        excess = (
            (times[rows] - usual).clamp(min=0).mean(1).amax(0) if rows else torch.zeros(len(places))
        )
        return excess.tolist(), usual.mean(0).tolist()

    def _repeated(self, candidates: set[int]) -> dict[ModulePhase, Repeated]:
        """Modules that repeat, each kind summed.

        Those kinds in which a candidate takes longest beyond the others.
        """
        found: dict[ModulePhase, Repeated] = {}
        for pattern, members in repeated_places(self._intervals, self._patterns).items():
            having = set.intersection(*(set(self._having.get(member, ())) for member in members))
            sums: dict[int, tuple[float, ...]] = {}
            for index in having:
                group = self._groups[index]
                columns = [group.columns[member] for member in members]
                some_ranks = self._steps[index].split(
                    RANKS_AT_ONCE
                    # so that few are copied at once
                )
                of_ranks = torch.cat([times[:, :, columns].double().sum(2) for times in some_ranks])
                sums |= zip(group.rows, map(tuple, of_ranks.tolist()), strict=True)
            if len(sums) > 1 and (candidates & sums.keys()):
                intervals = tuple({self._intervals[member] for member in members})
                found[pattern] = Repeated(
                    len(members), intervals, {rank: sums[rank] for rank in sorted(sums)}
                )
        return found


COPIES = (
    # so many ranks hand in what all of them have, for the first may be killed before it is done
    2
)

# of all ranks' times together: up to here all of them are handed in
MOST_BYTES = 1 << 27
# ranks whose times are handed in anyway, for the others to be compared with
BY_LOT = 128
LONGEST_UNASKED = (
    # seconds between two looks whether this rank is asked: thousands of ranks look
    4.0
)


class RankWindow:
    """The keys of one window."""

    def __init__(self, store: RankStore, name: str, topology: Topology) -> None:
        self._store = store
        self._name = name
        self._topology = topology

    def hand_in(self, report: RankReport) -> bytes | None:
        """Leave a report for rank 0. Returns the times, where they are kept for `answer`."""
        if self._store.has(self._key("closed")) or self._store.has("left/0"):
            raise ConnectionError("the first rank does not wait for it any more")
        self._store.put(self._key("begun", report.rank), b"")
        world = self._topology.world_size
        of_lot = report.rank in by_lot(world)
        packed = pack(report, ranks=world, most_bytes=None if of_lot else MOST_BYTES // world)
        self.deliver(report.rank, packed)
        return packed.times if packed.keeps_times else None

    def deliver(self, rank: int, packed: Packed) -> None:
        """Upload the packed report; the completion counter is written last."""
        store = self._store
        for name, blob in packed.shared.items():
            if store.add(self._key("copies", name)) <= COPIES:
                store.put(self._key("shared", name), blob)
        if not packed.keeps_times:
            store.put(self._key("times", rank), packed.times)
        store.put(self._key("head", rank), packed.head)
        store.add(self._key("told"))

    def answer(
        self, rank: int, times: bytes, pause: Callable[[float], object], is_over: Callable[[], bool]
    ) -> None:
        """Wait until rank 0 says whose times it asks for, and hand in this rank's if it is one of them."""
        asked, store = self._key("asked"), self._store
        is_asked = poll(
            lambda: store.has(asked),
            pause,
            lambda: is_over() or store.has("left/0"),
            LONGEST_UNASKED,
        )
        if is_asked and rank in array("i", store.get(asked)) and not store.has(self._key("closed")):
            store.put(self._key("times", rank), times)

    def wait_for_all(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Wait until every rank has reported or left, or until the timeout."""
        others = self._topology.world_size - 1

        def are_done() -> bool:
            told, left = self._store.number(self._key("told")), self._store.number("left")
            are_over = (
                self._store.has(self._key("head", rank)) or self._store.has(f"left/{rank}")
                for rank in range(1, others + 1)
            )
            return told >= others or (told + left >= others and all(are_over))

        poll(are_done, pause, is_over)

    def collected(
        self, report: RankReport, pause: Callable[[float], object], is_over: Callable[[], bool]
    ) -> Profile:
        """Merge the reports that are there with rank 0's own.

        Ranks that are asked for their times are waited for until `is_over`.
        """
        packed = pack(report)

        def blob(name: str) -> bytes:
            return packed.shared.get(name) or self._store.get(self._key("shared", name))

        heads = self._heads(unpacked(packed.head, RankHeader), packed.shared.keys())
        tables = {
            name: unpacked(blob(name), PlacesOfTable)
            for name in {each.summary.table for each in heads.values()}
        }
        times = RankTimes(list(heads.values()), tables)
        waits = {place for places in tables.values() for place in places.waits}
        times.add(report.rank, packed.times)
        for rank, head in heads.items():
            if rank != report.rank and not head.sums:
                times.add(rank, self._store.take(self._key("times", rank)))
        self._ask(times, pause, is_over)

        def rows_of(rank: int) -> Profile:
            return (
                rows_in(
                    unpacked(blob(heads[rank].summary.table), Table), heads[rank], times.of(rank)
                )
                if rank
                else report.profile
            )

        def memory_of(rank: int) -> Memory | None:
            name = heads[rank].memory
            return (
                report.profile.memory if rank == 0 or name is None else unpacked(blob(name), Memory)
            )

        absent = {
            rank: self._absent(rank)
            for rank in range(self._topology.world_size)
            if rank not in heads
        }
        summaries = (
            unpacked(
                self._store.take(self._key("head", rank)) if rank else packed.head, RankHeader
            ).summary
            for rank in heads
        )
        profile = merged(summaries, rows_of, memory_of, times.table, waits, absent=absent)
        self._close(heads, packed.shared.keys())
        return profile

    def _ask(
        self, times: RankTimes, pause: Callable[[float], object], is_over: Callable[[], bool]
    ) -> None:
        """Ask late ranks for the times that they keep, and take what comes."""
        asked = times.wanted()
        self._store.put(self._key("asked"), array("i", asked).tobytes())

        def are_there() -> bool:
            for rank in asked:
                if self._store.has(self._key("times", rank)):
                    times.add(rank, self._store.take(self._key("times", rank)))
            asked[:] = [
                rank
                for rank in asked
                if not times.has(rank) and not self._store.has(f"left/{rank}")
            ]
            return not asked

        poll(are_there, pause, is_over)

    def _heads(self, own: RankHeader, at_hand: AbstractSet[str]) -> dict[int, RankHeader]:
        """Read the heads of the ranks whose reports are complete.

        Their steps, of which there are many, are left for later.
        """
        heads = {own.summary.rank: own}
        is_there = functools.cache(
            lambda name: name in at_hand or self._store.has(self._key("shared", name))
        )
        for rank in range(1, self._topology.world_size):
            if self._store.has(self._key("head", rank)):
                head = unpacked(self._store.get(self._key("head", rank)), RankHeader)
                if all(
                    is_there(name) for name in (head.summary.table, head.memory) if name is not None
                ):
                    heads[rank] = replace(head, summary=replace(head.summary, steps=()))
        return heads

    def _absent(self, rank: int) -> Rank:
        """Describe a rank whose report is not there, or not all of it."""
        coordinates = self._topology.coordinates.get(rank, {})
        nothing = Rank(
            rank=rank, node=None, host=None, device=None, coordinates=coordinates, status="missing"
        )
        if self._store.has(f"left/{rank}") and self._store.get(f"left/{rank}") == b"failed":
            return replace(nothing, status="failed")
        return (
            replace(nothing, status="late")
            if self._store.has(self._key("begun", rank))
            else nothing
        )

    def _close(self, heads: dict[int, RankHeader], at_hand: AbstractSet[str]) -> None:
        """Take away what was looked at: a store has no end of room."""
        self._store.put(self._key("closed"), b"")
        for rank in heads:
            self._store.drop(self._key("begun", rank))
        for name in {
            name
            for head in heads.values()
            for name in (head.summary.table, head.memory)
            if name is not None
        }:
            if name not in at_hand or self._store.has(self._key("shared", name)):
                self._store.take(self._key("shared", name))

    def _key(self, what: str, whose: object = "") -> str:
        return f"{self._name}/{what}/{whose}"


def by_lot(ranks: int) -> frozenset[int]:
    """The ranks that hand in their times anyway, the same on all ranks.

    No part of a host or of a mesh is preferred.
    """
    return frozenset(random.Random(ranks).sample(range(ranks), min(BY_LOT, ranks)))  # noqa: S311 - nothing is secret

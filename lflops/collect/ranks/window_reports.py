"""One window's reports: what a rank hands in, and what rank 0 makes of those that are there.

The times of modules are the large part. If they are too many, all ranks but some that are drawn by lot keep them until rank 0 has seen who
is late, and asks. So nothing grows with ranks times modules, and a host that is lost takes no other's report with it.
"""

import functools
import random
from array import array
from collections.abc import Callable, Set as AbstractSet

from msgspec.structs import replace

from lflops.collect.ranks.rank_times import RankTimes
from lflops.collect.ranks.report import Packed, PlacesOfTable, RankHeader, RankReport, Table, pack, rows_in, unpacked
from lflops.collect.ranks.store import RankStore, poll
from lflops.collect.ranks.topology import Topology
from lflops.merging.merge import merged
from lflops.profile.model import Memory, Profile
from lflops.profile.records import Rank

COPIES = 2  # so many ranks hand in what all of them have, for the first may be killed before it is done

MOST_BYTES = 1 << 27  # of all ranks' times together: up to here all of them are handed in
BY_LOT = 128  # ranks whose times are handed in anyway, for the others to be compared with
LONGEST_UNASKED = 4.0  # seconds between two looks whether this rank is asked: thousands of ranks look


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

    def answer(self, rank: int, times: bytes, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Wait until rank 0 says whose times it asks for, and hand in this rank's if it is one of them."""
        asked, store = self._key("asked"), self._store
        is_asked = poll(lambda: store.has(asked), pause, lambda: is_over() or store.has("left/0"), LONGEST_UNASKED)
        if is_asked and rank in array("i", store.get(asked)) and not store.has(self._key("closed")):
            store.put(self._key("times", rank), times)

    def wait_for_all(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Wait until every rank has reported or left, or until the timeout."""
        others = self._topology.world_size - 1

        def are_done() -> bool:
            told, left = self._store.number(self._key("told")), self._store.number("left")
            are_over = (self._store.has(self._key("head", rank)) or self._store.has(f"left/{rank}") for rank in range(1, others + 1))
            return told >= others or (told + left >= others and all(are_over))

        poll(are_done, pause, is_over)

    def collected(self, report: RankReport, pause: Callable[[float], object], is_over: Callable[[], bool]) -> Profile:
        """Merge the reports that are there with rank 0's own. Ranks that are asked for their times are waited for until `is_over`."""
        packed = pack(report)

        def blob(name: str) -> bytes:
            return packed.shared.get(name) or self._store.get(self._key("shared", name))

        heads = self._heads(unpacked(packed.head, RankHeader), packed.shared.keys())
        tables = {name: unpacked(blob(name), PlacesOfTable) for name in {each.summary.table for each in heads.values()}}
        times = RankTimes(list(heads.values()), tables)
        waits = {place for places in tables.values() for place in places.waits}
        times.add(report.rank, packed.times)
        for rank, head in heads.items():
            if rank != report.rank and not head.sums:
                times.add(rank, self._store.take(self._key("times", rank)))
        self._ask(times, pause, is_over)

        def rows_of(rank: int) -> Profile:
            return rows_in(unpacked(blob(heads[rank].summary.table), Table), heads[rank], times.of(rank)) if rank else report.profile

        def memory_of(rank: int) -> Memory | None:
            name = heads[rank].memory
            return report.profile.memory if rank == 0 or name is None else unpacked(blob(name), Memory)

        absent = {rank: self._absent(rank) for rank in range(self._topology.world_size) if rank not in heads}
        summaries = (unpacked(self._store.take(self._key("head", rank)) if rank else packed.head, RankHeader).summary for rank in heads)
        profile = merged(summaries, rows_of, memory_of, times.table, waits, absent=absent)
        self._close(heads, packed.shared.keys())
        return profile

    def _ask(self, times: RankTimes, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Ask late ranks for the times that they keep, and take what comes."""
        asked = times.wanted()
        self._store.put(self._key("asked"), array("i", asked).tobytes())

        def are_there() -> bool:
            for rank in asked:
                if self._store.has(self._key("times", rank)):
                    times.add(rank, self._store.take(self._key("times", rank)))
            asked[:] = [rank for rank in asked if not times.has(rank) and not self._store.has(f"left/{rank}")]
            return not asked

        poll(are_there, pause, is_over)

    def _heads(self, own: RankHeader, at_hand: AbstractSet[str]) -> dict[int, RankHeader]:
        """Read the heads of the ranks whose reports are complete. Their steps, of which there are many, are left for later."""
        heads = {own.summary.rank: own}
        is_there = functools.cache(lambda name: name in at_hand or self._store.has(self._key("shared", name)))
        for rank in range(1, self._topology.world_size):
            if self._store.has(self._key("head", rank)):
                head = unpacked(self._store.get(self._key("head", rank)), RankHeader)
                if all(is_there(name) for name in (head.summary.table, head.memory) if name is not None):
                    heads[rank] = replace(head, summary=replace(head.summary, steps=()))
        return heads

    def _absent(self, rank: int) -> Rank:
        """Describe a rank whose report is not there, or not all of it."""
        coordinates = self._topology.coordinates.get(rank, {})
        nothing = Rank(rank=rank, node=None, host=None, device=None, coordinates=coordinates, status="missing")
        if self._store.has(f"left/{rank}") and self._store.get(f"left/{rank}") == b"failed":
            return replace(nothing, status="failed")
        return replace(nothing, status="late") if self._store.has(self._key("begun", rank)) else nothing

    def _close(self, heads: dict[int, RankHeader], at_hand: AbstractSet[str]) -> None:
        """Take away what was looked at: a store has no end of room."""
        self._store.put(self._key("closed"), b"")
        for rank in heads:
            self._store.drop(self._key("begun", rank))
        for name in {name for head in heads.values() for name in (head.summary.table, head.memory) if name is not None}:
            if name not in at_hand or self._store.has(self._key("shared", name)):
                self._store.take(self._key("shared", name))

    def _key(self, what: str, whose: object = "") -> str:
        return f"{self._name}/{what}/{whose}"


def by_lot(ranks: int) -> frozenset[int]:
    """The ranks that hand in their times anyway, the same on all ranks: no part of a host or of a mesh is preferred."""
    return frozenset(random.Random(ranks).sample(range(ranks), min(BY_LOT, ranks)))  # noqa: S311 - nothing is secret

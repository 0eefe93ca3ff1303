"""Send the report of each rank on one window to rank 0, which merges the reports.

A window is a few consecutive steps. A report consists of a header and of module times, and refers
to shared blobs: packed data that is identical on several ranks, and that only a few of them upload.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet

from msgspec.structs import replace

from lflops.profile.profile import Memory, Profile
from lflops.profile.records import ModulePhase, Rank
from lflops.ranks.collect.rank_times import RankTimes
from lflops.ranks.collect.report import (
    Packed,
    PlacesOfTable,
    RankHeader,
    RankReport,
    Table,
    pack,
    profile_of_rank,
    unpacked,
)
from lflops.ranks.collect.store import RankStore, poll
from lflops.ranks.collect.topology import Topology
from lflops.ranks.merge.merge import RankSummary, merged

# Number of ranks that upload the same shared blob. One is not enough, because a process may be
# killed during its upload.
COPIES = 2


class RankWindow:
    """Sends or collects the reports of the ranks on one window, through a key-value store.

    All keys in the store start with `name`, which differs between windows.
    """

    def __init__(self, store: RankStore, name: str, topology: Topology) -> None:
        self._store = store
        self._name = name
        self._topology = topology

    def hand_in(self, report: RankReport) -> None:
        """Put the report of this rank into the store, from which rank 0 reads it.

        Raises:
            ConnectionError: Rank 0 no longer waits for the report.
        """
        if self._store.has(self._key("closed")) or self._store.has("left/0"):
            raise ConnectionError("rank 0 no longer waits for the report of this rank")
        self._store.put(self._key("begun", report.rank), b"")
        self.deliver(report.rank, pack(report, ranks=self._topology.world_size))

    def deliver(self, rank: int, packed: Packed) -> None:
        """Upload a packed report.

        The counter of complete reports is incremented last, so that it never includes an incomplete
        report.
        """
        store = self._store
        for name, blob in packed.shared.items():
            if store.add(self._key("copies", name)) <= COPIES:
                store.put(self._key("shared", name), blob)
        store.put(self._key("times", rank), packed.times)
        store.put(self._key("head", rank), packed.head)
        store.add(self._key("reported"))

    def wait_for_all(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """Wait until every rank has reported or ended its run, or until `is_over` returns True."""
        others = range(1, self._topology.world_size)

        def has_reported_or_left(rank: int) -> bool:
            return self._store.has(self._key("head", rank)) or self._store.has(f"left/{rank}")

        def is_complete() -> bool:
            reported = self._store.number(self._key("reported"))
            if reported >= len(others):
                return True
            if reported + self._store.number("left") < len(others):
                return False
            return all(map(has_reported_or_left, others))

        poll(is_complete, pause, is_over)

    def collected(self, report: RankReport) -> Profile:
        """Merge the report of rank 0 with all complete reports in the store.

        The reports are then deleted from the store, and later reports on this window are refused.
        """
        packed = pack(report)
        heads = self._heads(unpacked(packed.head, RankHeader), packed.shared.keys())

        def blob(name: str) -> bytes:
            return packed.shared.get(name) or self._store.get(self._key("shared", name))

        tables: dict[str, PlacesOfTable] = {}
        waits: set[ModulePhase] = set()
        for head in heads.values():
            name = head.summary.table
            if name not in tables:
                tables[name] = unpacked(blob(name), PlacesOfTable)
                waits.update(tables[name].waits)
        times = RankTimes(list(heads.values()), tables)
        times.add(report.rank, packed.times)
        for rank in heads:
            if rank != report.rank:
                times.add(rank, self._store.take(self._key("times", rank)))

        def rows_of(rank: int) -> Profile:
            if rank == report.rank:
                return report.profile
            head = heads[rank]
            return profile_of_rank(unpacked(blob(head.summary.table), Table), head, times.of(rank))

        def memory_of(rank: int) -> Memory | None:
            name = heads[rank].memory
            if rank == report.rank or name is None:
                return report.profile.memory
            return unpacked(blob(name), Memory)

        profile = merged(
            map(functools.partial(self._summary, report.rank, packed), heads),
            rows_of,
            memory_of,
            times.table,
            waits,
            absent=self._absent_ranks(heads),
        )
        self._close(heads, packed.shared.keys())
        return profile

    def _summary(self, own_rank: int, packed: Packed, rank: int) -> RankSummary:
        """Return the summary of a rank, including the rank's steps.

        The summary is read from the rank's header, which is then deleted from the store. `_heads`
        has already read all headers, but without the steps, to save memory.
        """
        head = packed.head if rank == own_rank else self._store.take(self._key("head", rank))
        return unpacked(head, RankHeader).summary

    def _heads(self, own: RankHeader, at_hand: AbstractSet[str]) -> dict[int, RankHeader]:
        """Return the headers of all ranks whose reports are complete, without the ranks' steps.

        Args:
            own: The header of rank 0.
            at_hand: The names of the shared blobs (the packed table and memory) that rank 0 has
                packed itself.
        """
        heads = {own.summary.rank: own}
        available: dict[str, bool] = dict.fromkeys(at_hand, True)
        for rank in range(1, self._topology.world_size):
            if not self._store.has(self._key("head", rank)):
                continue
            head = unpacked(self._store.get(self._key("head", rank)), RankHeader)
            for name in _blobs(head):
                if name not in available:
                    available[name] = self._store.has(self._key("shared", name))
            if all(available[name] for name in _blobs(head)):
                heads[rank] = replace(head, summary=replace(head.summary, steps=()))
        return heads

    def _absent_ranks(self, heads: Mapping[int, RankHeader]) -> dict[int, Rank]:
        """Describe the ranks whose reports are missing or incomplete."""
        absent = {}
        for rank in range(self._topology.world_size):
            if rank not in heads:
                absent[rank] = self._absent(rank)
        return absent

    def _absent(self, rank: int) -> Rank:
        absent = Rank(
            rank=rank,
            node=None,
            host=None,
            device=None,
            coordinates=self._topology.coordinates.get(rank, {}),
            status="missing",
        )
        if self._store.has(f"left/{rank}") and self._store.get(f"left/{rank}") == b"failed":
            return replace(absent, status="failed")
        if self._store.has(self._key("begun", rank)):
            return replace(absent, status="late")
        return absent

    def _close(self, heads: Mapping[int, RankHeader], at_hand: AbstractSet[str]) -> None:
        """Mark the window as closed, and delete its reports to free the memory of the store."""
        self._store.put(self._key("closed"), b"")
        for rank in heads:
            self._store.drop(self._key("begun", rank))
        names: set[str] = set()
        for head in heads.values():
            names.update(_blobs(head))
        for name in names:
            if name not in at_hand or self._store.has(self._key("shared", name)):
                self._store.take(self._key("shared", name))

    def _key(self, kind: str, name: object = "") -> str:
        return f"{self._name}/{kind}/{name}"


def _blobs(head: RankHeader) -> Iterable[str]:
    """Return the names of the shared blobs (the packed table and memory) of a rank's report."""
    if head.memory is None:
        return (head.summary.table,)
    return (head.summary.table, head.memory)

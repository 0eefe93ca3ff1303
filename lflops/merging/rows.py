"""The rows of a run of several ranks: each as one rank has it, whole, and added to the rows above it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from lflops.profile.model import COUNTS, Cell, Communication, DtypeShare, ModuleProfile, Profile, Uncounted, Work
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, ModulePhase
from lflops.profile.series import gathered, grouped, sum_known, sums

_LISTED = 12

_HELD = tuple(f"{of}{field}" for of in ("", "trainable_", "local_") for field in ("parameters", "parameter_bytes"))


class MergedRows:
    """Takes one rank after the other, in the order in which they lead: a row is that of the first that has it.

    Of a rank that is taken only what no other had is kept, so that a thousand ranks take no more room than their rows.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}  # of each row the rank that it is of
        self.differ = False  # whether a rank did other work than the first
        self._leading: Profile | None = None
        self._rows: dict[str, ModuleProfile] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._having: dict[str, int] = defaultdict(int)  # the ranks as bits, in the order in which they were added
        self._added: list[int] = []
        self._peaks: dict[str, int] = {}
        self._cells: dict[int, list[Cell]] = {}
        self._communication: dict[int, list[Communication]] = {}
        self.waits: set[ModulePhase] = set()  # where any rank waits for others
        self.ledger: dict[tuple[str, str, str], Uncounted] = {}  # what any rank ran without a formula

    def add(self, rank: int, profile: Profile, lowest: int) -> None:
        """Take the next rank. `lowest` is the lowest rank that has the same rows: theirs is the order in which they are shown."""
        if self._leading is None:
            self._leading = profile
        self.differ = self.differ or _differ(self._leading, profile)
        bit = 1 << len(self._added)
        self._added.append(rank)
        for index, (row, module) in enumerate(profile.modules.items()):
            self._having[row] |= bit
            if self.sources.setdefault(row, rank) == rank:
                self._rows[row] = module
            self._places[row] = min(self._places.get(row, (lowest, index)), (lowest, index))
            if module.peak_bytes is not None:
                self._peaks[row] = max(module.peak_bytes, self._peaks.get(row, 0))
        self.waits.update(profile.waits)
        self._cells[rank] = [cell for cell in profile.cells if self.sources[cell.module] == rank]
        self._communication[rank] = [each for each in profile.communication if self.sources[each.module] == rank]
        for each in profile.uncounted:  # a total that leaves something out on one rank only is not whole either
            self.ledger.setdefault((each.module, each.operator, each.phase), each)

    def modules(self) -> dict[str, ModuleProfile]:
        """Every row as its source has it; what other ranks have below it is added."""
        grafted = (row for row in self._rows if row and self.sources[ancestry(row)[1]] != self.sources[row])
        grafts = gathered((above, self._rows[row]) for row in grafted for above in ancestry(row)[1:])
        return {
            row: replace(_grown(self._rows[row], grafts.get(row, [])), peak_bytes=self._peaks.get(row))
            for row in sorted(self._rows, key=self._places.__getitem__)
        }

    def only_on(self) -> Iterator[tuple[list[int], list[str]]]:
        """Group the rows that not all ranks have: the ranks that have the same ones, and the uppermost of these."""
        everybody = (1 << len(self._added)) - 1
        uppermost = (row for row in self._rows if not row or self._having[ancestry(row)[1]] != self._having[row])
        groups = grouped(sorted(uppermost, key=self._places.__getitem__), self._having.__getitem__)
        for having, rows in groups.items():
            if having != everybody:
                yield [rank for index, rank in enumerate(self._added) if having >> index & 1], rows

    def cells(self) -> Iterator[Cell]:
        """Those of each row's source."""
        return (cell for rank in sorted(self._cells) for cell in self._cells[rank])

    def communication(self) -> Iterator[Communication]:
        """The communication of each row's source."""
        return (each for rank in sorted(self._communication) for each in self._communication[rank])


def ranges(ranks: Iterable[int]) -> str:
    """Ranks in rising order as text, `0, 4-7`; of more than there is room for, the first."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    named = ["-".join(map(str, sorted({run[0], run[-1]}))) for run in runs[:_LISTED]]
    return ", ".join([*named, *(["…"] if len(runs) > _LISTED else [])])


def _grown(row: ModuleProfile, grafts: list[ModuleProfile]) -> ModuleProfile:
    if not grafts:
        return row
    figures: dict[str, Any] = sums((row, *grafts), *_HELD)
    figures |= {phase: _added(row.work(phase), [graft.work(phase) for graft in grafts]) for phase in PHASES}
    shares = gathered(share for each in (row, *grafts) for share in each.dtypes.items())
    return replace(row, **figures, dtypes={dtype: DtypeShare(**sums(each, "parameters", "bytes")) for dtype, each in shares.items()})


def _added(work: Work, grafts: list[Work]) -> Work:
    """Inclusive work with more of it below. Times of several ranks have no sum."""
    more = sums(grafts, *COUNTS)
    if not any(more.values()):
        return work
    return replace(
        work,
        **{count: getattr(work, count) + added for count, added in more.items()},
        logical_macs=sum_known(each.logical_macs for each in (work, *grafts)),
        seconds=None,
        device_seconds=None,
    )


def _differ(one: Profile, other: Profile) -> bool:
    """Whether two ranks did different work. What one of them did in another order is the same."""
    if one is other:
        return False
    if one.cells != other.cells and set(one.cells) != set(other.cells):
        return True
    return _beside_cells(one) != _beside_cells(other)


def _beside_cells(profile: Profile) -> tuple[object, ...]:
    """The rows and their calls, the ledger and the collectives; not the groups' names, of which each rank has its own."""
    rows = {row: (module.kind, module.calls) for row, module in profile.modules.items()}
    return rows, *(Counter(map(_counts, table)) for table in (profile.uncounted, profile.communication))


def _counts(each: Uncounted | Communication) -> tuple[object, ...]:
    what = (each.operator, None) if isinstance(each, Uncounted) else (each.collective, each.group_size)
    return each.module, each.phase, *what, each.calls, each.bytes

"""The running sums of a count, one set for each thread so that threads need no lock."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lflops.formulas.table import Cost
from lflops.profile.records import ModulePhase, Phase

__all__ = ["CellKey", "CollectiveKey", "Totals", "UncountedKey"]

CellKey = tuple[str, str, Phase, "torch.dtype | None"]
"""Row, operator, phase, dtype."""
UncountedKey = tuple[str, str, Phase]
CollectiveKey = tuple[str, Phase, str, str, "int | None"]
"""Row, phase, collective, group, its size."""


@dataclass
class Totals:
    """Sums by what they belong to.

    Attributes:
        cells: Calls, MACs, executed MACs, FLOPs, bytes moved.
        uncounted: Calls, bytes.
        collectives: Calls, bytes.
        failures: Operator to what went wrong in its formula.
        beyond: MACs of the whole model that are not among these, by row and phase; below 0 where several ranks do the same. `None` where
            nobody knows. What is not in it is as it is here.
    """

    cells: dict[CellKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 5))
    uncounted: dict[UncountedKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 2))
    collectives: dict[CollectiveKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 2))
    failures: dict[str, str] = field(default_factory=dict)
    beyond: dict[ModulePhase, int | None] = field(default_factory=dict)

    def add(self, key: CellKey, cost: Cost, moved: int) -> None:
        """Add one call."""
        cell = self.cells[key]
        cell[0] += 1
        cell[1] += cost.macs
        cell[2] += cost.macs if cost.executed_macs is None else cost.executed_macs
        cell[3] += 2 * cost.macs + cost.other_flops
        cell[4] += moved

    def tell_whole(self, part: "Totals", place: ModulePhase, whole: Cost | None) -> None:
        """Say that what `part` has was this rank's share of so much; `None` where that is not known."""
        here: dict[ModulePhase, int] = defaultdict(int)
        for (row, _, phase, _), sums in part.cells.items():
            here[ModulePhase(row, phase)] += sums[1]
        told = {}
        if whole is not None:
            told = {place: whole.macs} | ({} if whole.recompute is None else {ModulePhase(place.row, "recompute"): whole.recompute.macs})
        for each in here.keys() | told.keys():
            known = whole is not None or not here[each]
            self._add_beyond(each, told.get(each, 0) - here[each] if known else None)

    def whole_is_unknown(self, row: str, phase: Phase, cost: Cost) -> None:
        """Say that of an operator that has this cost here nobody knows what it is part of."""
        for each in (phase,) if cost.recompute is None else (phase, "recompute"):
            self._add_beyond(ModulePhase(row, each), None)

    def _add_beyond(self, place: ModulePhase, macs: int | None) -> None:
        before = self.beyond.get(place, 0)
        self.beyond[place] = None if before is None or macs is None else before + macs

    def merge(self, other: "Totals") -> None:
        """Add another thread's sums."""
        _merge(self.cells, other.cells)
        _merge(self.uncounted, other.uncounted)
        _merge(self.collectives, other.collectives)
        self.failures.update(other.failures)
        for place, macs in other.beyond.items():
            self._add_beyond(place, macs)

    def rows(self) -> Iterator[str]:
        """Every row that has something, with repetitions."""
        yield from (key[0] for key in self.cells)
        yield from (key[0] for key in self.uncounted)
        yield from (key[0] for key in self.collectives)


def _merge(mine: dict[Any, list[int]], theirs: dict[Any, list[int]]) -> None:
    for key, sums in theirs.items():
        mine[key] = [a + b for a, b in zip(mine[key], sums, strict=True)]

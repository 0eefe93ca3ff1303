"""The running sums of a count, one set for each thread so that threads need no lock."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lflops.collect.counting.formulas.table import Cost
from lflops.observations import Phase

__all__ = ["CellKey", "CollectiveKey", "Tally", "UncountedKey"]

CellKey = tuple[str, str, Phase, "torch.dtype | None"]
"""Row, operator, phase, dtype."""
UncountedKey = tuple[str, str, Phase]
CollectiveKey = tuple[str, Phase, str, str, "int | None"]
"""Row, phase, collective, group, its size."""


@dataclass
class Tally:
    """Sums by what they belong to.

    Attributes:
        cells: Calls, MACs, executed MACs, FLOPs, bytes moved.
        uncounted: Calls, bytes.
        collectives: Calls, bytes.
        failures: Operator to what went wrong in its formula.
    """

    cells: dict[CellKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 5))
    uncounted: dict[UncountedKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 2))
    collectives: dict[CollectiveKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 2))
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, key: CellKey, cost: Cost, moved: int) -> None:
        """Add one call."""
        cell = self.cells[key]
        cell[0] += 1
        cell[1] += cost.macs
        cell[2] += cost.macs if cost.executed_macs is None else cost.executed_macs
        cell[3] += 2 * cost.macs + cost.other_flops
        cell[4] += moved

    def merge(self, other: "Tally") -> None:
        """Add another thread's sums."""
        _merge(self.cells, other.cells)
        _merge(self.uncounted, other.uncounted)
        _merge(self.collectives, other.collectives)
        self.failures.update(other.failures)

    def rows(self) -> Iterator[str]:
        """Every row that has something, with repetitions."""
        yield from (key[0] for key in self.cells)
        yield from (key[0] for key in self.uncounted)
        yield from (key[0] for key in self.collectives)


def _merge(mine: dict[Any, list[int]], theirs: dict[Any, list[int]]) -> None:
    for key, sums in theirs.items():
        mine[key] = [a + b for a, b in zip(mine[key], sums, strict=True)]

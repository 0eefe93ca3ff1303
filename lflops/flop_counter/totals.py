"""The running sums of a count. Each thread has its own, so that threads need no lock."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from msgspec import Struct

from lflops.formulas.table import Cost
from lflops.profile.notes import Note
from lflops.profile.records import ModulePhase, Phase
from lflops.profile.series import sum_known, summed

# row, operator, phase, dtype
CellKey = tuple[str, str, Phase, "torch.dtype | None"]
# row, operator, phase
UncountedKey = tuple[str, str, Phase]
CollectiveKey = tuple[
    str, Phase, str, str, "int | None"
    # row, phase, collective, process group, the group's size
]


class Sums(Struct, gc=False):
    """The sums of several calls."""

    def add(self, other: Self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counts(Sums, gc=False):
    """The work of several calls; the fields are the `COUNTS` of a profile."""

    calls: int = 0
    macs: int = 0
    executed_macs: int = 0
    flops: int = 0
    bytes_moved: int = 0
    comm_bytes: int = 0


class Transfers(Sums, gc=False):
    """Calls and their bytes: the payload of a collective, the tensors of an unsupported operator."""

    calls: int = 0
    bytes: int = 0


class DenseMasks(Sums, gc=False):
    """Calls of attention whose dense mask separates sequences.

    The scores computed, and those within a sequence.
    """

    calls: int = 0
    computed: int = 0
    within: int = 0


@dataclass
class Totals:
    """Sums by row and phase."""

    op_counts: defaultdict[CellKey, Counts] = field(default_factory=lambda: defaultdict(Counts))
    unsupported: defaultdict[UncountedKey, Transfers] = field(
        default_factory=lambda: defaultdict(Transfers)
    )
    collectives: defaultdict[CollectiveKey, Transfers] = field(
        default_factory=lambda: defaultdict(Transfers)
    )
    waits: set[ModulePhase] = field(default_factory=set)
    failures: dict[str, str] = field(
        default_factory=dict
        # the error of each formula that failed, by operator
    )
    upper_bounds: Counter[str] = field(
        default_factory=Counter
        # operator to calls whose cost is the most that it can be
    )
    # Operator to its calls with a dense mask that separates packed sequences
    dense_masks: defaultdict[str, DenseMasks] = field(
        default_factory=lambda: defaultdict(DenseMasks)
    )
    counted_inside: Counter[str] = field(
        default_factory=Counter
        # operator to calls that were counted by the operators inside of it
    )
    # operator calls in communication hooks
    calls_in_hooks: int = 0
    # Logical MACs less the MACs counted here; negative where several ranks compute the same. `None`
    # where the logical MACs are unknown. A row and phase that is not in it has no difference.
    logical_difference: dict[ModulePhase, int | None] = field(default_factory=dict)

    def add(self, key: CellKey, cost: Cost, moved: int) -> None:
        cell = self.op_counts[key]
        cell.calls += 1
        cell.macs += cost.macs
        cell.executed_macs += cost.macs if cost.executed_macs is None else cost.executed_macs
        cell.flops += 2 * cost.macs + cost.other_flops
        cell.bytes_moved += moved

    def add_logical(self, local: "Totals", key: ModulePhase, logical: Cost | None) -> None:
        """Add the logical work of an operator on sharded tensors.

        `local` is what this rank ran; `None` is an unknown cost.
        """
        local_macs = summed(
            (ModulePhase(row, phase), counts.macs)
            for (row, _, phase, _), counts in local.op_counts.items()
        )
        logical_macs: dict[ModulePhase, int] = {}
        if logical is not None:
            logical_macs[key] = logical.macs
            if logical.recompute is not None:
                logical_macs[ModulePhase(key.fqn, "recompute")] = logical.recompute.macs
        for each in local_macs.keys() | logical_macs.keys():
            macs = local_macs.get(each, 0)
            self.add_difference(
                each, logical_macs.get(each, 0) - macs if logical is not None or not macs else None
            )

    def add_unknown_logical(self, row: str, phase: Phase, cost: Cost) -> None:
        """Note that the logical work of an operator is unknown, which costs this much here."""
        self.add_difference(ModulePhase(row, phase), None)
        if cost.recompute is not None:
            self.add_difference(ModulePhase(row, "recompute"), None)

    def add_difference(self, key: ModulePhase, macs: int | None) -> None:
        self.logical_difference[key] = sum_known((self.logical_difference.get(key, 0), macs))

    def merge(self, other: "Totals") -> None:
        self.merge_rowless(other)
        other.add_to(lambda row, phase: (self, row, phase))

    def merge_rowless(self, other: "Totals") -> None:
        """Add what belongs to no row."""
        self.failures.update(other.failures)
        self.upper_bounds.update(other.upper_bounds)
        for operator, masks in other.dense_masks.items():
            self.dense_masks[operator].add(masks)
        self.counted_inside.update(other.counted_inside)
        self.calls_in_hooks += other.calls_in_hooks

    def add_to(self, to: Callable[[str, Phase], tuple["Totals", str, Phase]]) -> None:
        """Add what belongs to a row to the totals, the row and the phase that `to` returns for its row and phase."""
        for (row, operator, phase, dtype), counts in self.op_counts.items():
            totals, new_row, new_phase = to(row, phase)
            totals.op_counts[new_row, operator, new_phase, dtype].add(counts)
        for (row, operator, phase), sums in self.unsupported.items():
            totals, new_row, new_phase = to(row, phase)
            totals.unsupported[new_row, operator, new_phase].add(sums)
        for (row, phase, *collective), sums in self.collectives.items():
            totals, *there = to(row, phase)
            totals.collectives[*there, *collective].add(sums)  # type: ignore[index]
        for wait in self.waits:
            totals, *there = to(*wait)  # type: ignore[arg-type]
            totals.waits.add(ModulePhase(*there))
        for key, macs in self.logical_difference.items():
            totals, *there = to(*key)  # type: ignore[arg-type]
            totals.add_difference(ModulePhase(*there), macs)

    def moved(self, to: Callable[[str, Phase], tuple[str, Phase]]) -> "Totals":
        """The same sums, each in another row and phase."""
        found = Totals()
        found.merge_rowless(self)
        self.add_to(lambda row, phase: (found, *to(row, phase)))
        return found

    def rows(self) -> Iterator[str]:
        """Every row that has any sum, with repetitions."""
        yield from (
            key[0] for keys in (self.op_counts, self.unsupported, self.collectives) for key in keys
        )


@dataclass
class Resolved:
    """A step with its compiled graphs."""

    totals: Totals
    # calls of modules inside of the graphs
    calls: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    # whether every allocation of the step was seen
    is_memory_known: bool = True

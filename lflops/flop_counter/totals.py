"""Define the running sums of a count: the work of all operators so far, by module and phase.

Each thread has separate sums, so that threads need no lock.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from msgspec import Struct

from lflops.formulas.table import Cost
from lflops.profile.notes import Note
from lflops.profile.records import ModulePhase, Phase
from lflops.profile.series import sum_known

OpKey = tuple[str, str, Phase, "torch.dtype | None"]
"""Key of the work of an operator: module, operator, phase, and dtype."""

UnsupportedKey = tuple[str, str, Phase]
"""Key of an unsupported operator: module, operator, and phase."""

CollectiveKey = tuple[str, Phase, str, str, "int | None"]
"""Key of a collective: module, phase, collective, process group, and the size of the group."""


class Sums(Struct, gc=False):
    """Base class of sums over several calls. `add` adds each field of another object."""

    def add(self, other: Self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counts(Sums, gc=False):
    """The total work of several calls.

    The fields have the names in `lflops.profile.profile.COUNTS`, as in a profile.
    """

    calls: int = 0
    macs: int = 0
    executed_macs: int = 0
    flops: int = 0
    bytes_moved: int = 0
    comm_bytes: int = 0


class Transfers(Sums, gc=False):
    """The number of calls of a collective or an unsupported operator, and their total bytes.

    The bytes of a collective are its payload. The bytes of an unsupported operator are the sizes of
    its arguments and results.
    """

    calls: int = 0
    bytes: int = 0


class DenseMasks(Sums, gc=False):
    """The scores of attention calls whose dense mask separates packed sequences.

    Attributes:
        calls: The number of calls.
        computed: The number of scores that the kernel computes, including masked scores.
        within: The number of scores between two tokens of the same sequence.
    """

    calls: int = 0
    computed: int = 0
    within: int = 0


@dataclass
class Totals:
    """The sums of a count, by module and phase.

    Attributes:
        op_counts: The work of supported operators.
        unsupported: The calls of operators without a formula.
        collectives: The calls of collectives.
        waits: The modules and phases in which ranks wait for each other.
        failures: The error of each formula that failed, keyed by operator.
        upper_bounds: The number of calls of each operator for which the cost is an upper bound.
        dense_masks: Attention calls whose dense mask separates packed sequences, keyed by operator.
        counted_inside: The number of calls of each operator that has no formula, but whose kernel
            called other operators that were counted instead.
        calls_in_hooks: The number of operator calls in DDP's communication hooks.
        logical_difference: The MACs of the whole sharded model minus the MACs that this rank
            counted, keyed by module and phase. A difference is negative if several ranks compute
            the same, and `None` if the MACs of the whole model are unknown. A missing entry means
            that there is no difference.
    """

    op_counts: defaultdict[OpKey, Counts] = field(default_factory=lambda: defaultdict(Counts))
    unsupported: defaultdict[UnsupportedKey, Transfers] = field(
        default_factory=lambda: defaultdict(Transfers)
    )
    collectives: defaultdict[CollectiveKey, Transfers] = field(
        default_factory=lambda: defaultdict(Transfers)
    )
    waits: set[ModulePhase] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    upper_bounds: Counter[str] = field(default_factory=Counter)
    dense_masks: defaultdict[str, DenseMasks] = field(
        default_factory=lambda: defaultdict(DenseMasks)
    )
    counted_inside: Counter[str] = field(default_factory=Counter)
    calls_in_hooks: int = 0
    logical_difference: dict[ModulePhase, int | None] = field(default_factory=dict)

    def add(self, key: OpKey, cost: Cost, moved: int) -> None:
        """Add the cost of one call of an operator. `moved` is the number of bytes that it moves."""
        counts = self.op_counts[key]
        counts.calls += 1
        counts.macs += cost.macs
        counts.executed_macs += cost.macs_left
        counts.flops += 2 * cost.macs + cost.other_flops
        counts.bytes_moved += moved

    def add_logical(self, local: "Totals", key: ModulePhase, logical: Cost | None) -> None:
        """Add the logical minus the local MACs of an operator to `logical_difference`.

        The operator runs on sharded tensors. Its local MACs are the MACs on this rank. Its logical
        MACs are the MACs of the same operator on the whole tensors.

        Args:
            local: The work that this rank did for the operator.
            key: The module and phase of the operator.
            logical: The cost of the operator on the whole tensors, or `None` if it is unknown.
        """
        local_macs: Counter[ModulePhase] = Counter()
        for (fqn, _, phase, _), counts in local.op_counts.items():
            local_macs[ModulePhase(fqn, phase)] += counts.macs
        if logical is None:
            for place, macs in local_macs.items():
                self.add_difference(place, None if macs else 0)
            return
        logical_macs = {key: logical.macs}
        if logical.recompute is not None:
            logical_macs[ModulePhase(key.fqn, "recompute")] = logical.recompute.macs
        for place in local_macs.keys() | logical_macs.keys():
            self.add_difference(place, logical_macs.get(place, 0) - local_macs[place])

    def add_unknown_logical(self, fqn: str, phase: Phase, cost: Cost) -> None:
        """Record that the logical MACs of one call are unknown.

        The difference between the logical MACs (those of whole tensors) and the MACs of this rank
        becomes unknown for the module and phase. `cost` is the cost of the call on this rank. If
        the call includes recomputation, the difference of the phase `recompute` becomes unknown,
        too.
        """
        self.add_difference(ModulePhase(fqn, phase), None)
        if cost.recompute is not None:
            self.add_difference(ModulePhase(fqn, "recompute"), None)

    def add_difference(self, key: ModulePhase, macs: int | None) -> None:
        """Add to the logical minus local MACs of a module and phase.

        If `macs` is `None`, the difference becomes unknown.
        """
        self.logical_difference[key] = sum_known((self.logical_difference.get(key, 0), macs))

    def merge(self, other: "Totals") -> None:
        """Add all sums of `other`, for example the sums of another thread."""
        self.merge_without_modules(other)
        other.add_to(lambda fqn, phase: (self, fqn, phase))

    def merge_without_modules(self, other: "Totals") -> None:
        """Add only those sums of `other` that are not kept by module, such as `upper_bounds`."""
        self.failures.update(other.failures)
        self.upper_bounds.update(other.upper_bounds)
        for operator, masks in other.dense_masks.items():
            self.dense_masks[operator].add(masks)
        self.counted_inside.update(other.counted_inside)
        self.calls_in_hooks += other.calls_in_hooks

    def add_to(self, target_of: Callable[[str, Phase], tuple["Totals", str, Phase]]) -> None:
        """Add all sums that are kept by module to other totals, possibly under other names.

        Args:
            target_of: A function that takes a module and a phase. It returns the totals to which
                the sums of this module and phase are added, and the new module and phase.
        """
        for (fqn, operator, phase, dtype), counts in self.op_counts.items():
            totals, new_fqn, new_phase = target_of(fqn, phase)
            totals.op_counts[new_fqn, operator, new_phase, dtype].add(counts)
        for (fqn, operator, phase), transfers in self.unsupported.items():
            totals, new_fqn, new_phase = target_of(fqn, phase)
            totals.unsupported[new_fqn, operator, new_phase].add(transfers)
        for (fqn, phase, collective, group, size), transfers in self.collectives.items():
            totals, new_fqn, new_phase = target_of(fqn, phase)
            totals.collectives[new_fqn, new_phase, collective, group, size].add(transfers)
        for wait in self.waits:
            totals, *place = target_of(*wait)  # type: ignore[arg-type]
            totals.waits.add(ModulePhase(*place))
        for key, macs in self.logical_difference.items():
            totals, *place = target_of(*key)  # type: ignore[arg-type]
            totals.add_difference(ModulePhase(*place), macs)

    def moved(self, target_of: Callable[[str, Phase], tuple[str, Phase]]) -> "Totals":
        """Return a copy in which the sums are assigned to other modules and phases.

        `target_of` takes the module and phase of a sum, and returns the new module and phase.
        """
        moved = Totals()
        moved.merge_without_modules(self)
        self.add_to(lambda fqn, phase: (moved, *target_of(fqn, phase)))
        return moved

    def module_names(self) -> Iterator[str]:
        """Yield the module of every operator and collective. A name may occur several times."""
        for keys in (self.op_counts, self.unsupported, self.collectives):
            for key in keys:
                yield key[0]


@dataclass
class Resolved:
    """The work of a step, including the work of its compiled graphs.

    Attributes:
        totals: The work by module and phase.
        calls: The number of calls of each module in compiled graphs.
        notes: Notes for the profile about the compiled graphs.
        is_memory_known: Whether every allocation of the step was seen. This is false if a compiled
            graph ran generated kernels, because the dispatch mode does not see their allocations.
    """

    totals: Totals
    calls: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    is_memory_known: bool = True

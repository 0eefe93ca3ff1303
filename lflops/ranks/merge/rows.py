"""Merge the modules, operators and collectives of several ranks.

A row is the `ModuleProfile` of one module. Each merged row comes from the first added rank that has
the module.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.profile import (
    COUNTS,
    Communication,
    DtypeShare,
    ModuleProfile,
    OpCount,
    Profile,
    UnsupportedCall,
    Work,
)
from lflops.profile.records import PHASES, ModulePhase
from lflops.profile.series import spelled_runs, sum_known, sums

# Maximum number of ranges that `ranges` lists.
_LISTED = 12

_PARAMETER_FIELDS = (
    "parameters",
    "parameter_bytes",
    "trainable_parameters",
    "trainable_parameter_bytes",
    "local_parameters",
    "local_parameter_bytes",
)


Entry = TypeVar("Entry", OpCount, Communication)


class MergedRows:
    """Merges the rows of ranks, which are added one after another, starting with the leading rank.

    A row is the `ModuleProfile` of one module. Only rows that no earlier rank had are stored. So
    the memory depends on the number of different modules, not on the number of ranks.

    Attributes:
        sources: The rank that each row is from, by module.
        differ: Whether any rank did different work than the leading rank.
        waits: The places (modules in a phase) where any rank waits for other ranks.
        unsupported: The operators that any rank ran without a formula, by module, operator and
            phase.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.differ = False
        self.waits: set[ModulePhase] = set()
        self.unsupported: dict[tuple[str, str, str], UnsupportedCall] = {}
        self._leading: Profile | None = None
        self._added: list[int] = []
        self._rows: dict[str, ModuleProfile] = {}
        # The position of each row in the profile of the lowest rank that has it.
        self._positions: dict[str, tuple[int, int]] = {}
        # The ranks that have each row: one bit for each added rank.
        self._having: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._op_counts: dict[int, list[OpCount]] = {}
        self._communication: dict[int, list[Communication]] = {}

    def add(self, rank: int, profile: Profile, lowest: int) -> None:
        """Add the rows (the `ModuleProfile` of each module) of the next rank.

        If several ranks have identical rows, only one of them must be added. `lowest` is the lowest
        of these ranks, and decides the order of the merged rows.
        """
        if self._leading is None:
            self._leading = profile
        self.differ = self.differ or _differ(self._leading, profile)
        bit = 1 << len(self._added)
        self._added.append(rank)
        for index, (row, module) in enumerate(profile.modules.items()):
            if row not in self.sources:
                self.sources[row] = rank
                self._rows[row] = module
            self._having[row] = self._having.get(row, 0) | bit
            position = (lowest, index)
            self._positions[row] = min(self._positions.get(row, position), position)
            if module.peak_bytes is not None:
                self._peaks[row] = max(module.peak_bytes, self._peaks.get(row, 0))
        self.waits.update(profile.waits)
        self._op_counts[rank] = self._from(rank, profile.op_counts)
        self._communication[rank] = self._from(rank, profile.communication)
        # An operator without a formula on any rank makes the totals incomplete.
        for each in profile.unsupported:
            self.unsupported.setdefault((each.module, each.operator, each.phase), each)

    def _from(self, rank: int, entries: Iterable[Entry]) -> list[Entry]:
        """Select the operators or collectives of modules whose rows are from this rank."""
        return [each for each in entries if self.sources[each.module] == rank]

    def modules(self) -> dict[str, ModuleProfile]:
        """Return the merged modules.

        If a module contains submodules that only other ranks have, the work of these submodules is
        added to the work of the module.
        """
        added_below: dict[str, list[ModuleProfile]] = {}
        for row, module in self._rows.items():
            above = ancestry(row)[1:]
            if above and self.sources[above[0]] != self.sources[row]:
                for name in above:
                    added_below.setdefault(name, []).append(module)
        modules = {}
        for row in sorted(self._rows, key=self._positions.__getitem__):
            module = _with_added(self._rows[row], added_below.get(row, []))
            modules[row] = replace(module, peak_bytes=self._peaks.get(row))
        return modules

    def only_on(self) -> Iterator[tuple[list[int], list[str]]]:
        """Yield the modules that are missing on some ranks, grouped by the ranks that have them.

        Each group is a list of ranks and a list of module names. A module is left out if its parent
        is in the same group.
        """
        all_ranks = (1 << len(self._added)) - 1
        uppermost: dict[int, list[str]] = {}
        for row in sorted(self._rows, key=self._positions.__getitem__):
            bits = self._having[row]
            is_uppermost = not row or self._having[ancestry(row)[1]] != bits
            if is_uppermost and bits != all_ranks:
                uppermost.setdefault(bits, []).append(row)
        for bits, rows in uppermost.items():
            yield self._ranks_in(bits), rows

    def _ranks_in(self, bits: int) -> list[int]:
        """Return the ranks whose bits are set in `bits`. Each added rank has one bit."""
        ranks = []
        for index, rank in enumerate(self._added):
            if bits >> index & 1:
                ranks.append(rank)
        return ranks

    def op_counts(self) -> Iterator[OpCount]:
        """Yield the operators of each module, from the rank in `sources`."""
        for rank in sorted(self._op_counts):
            yield from self._op_counts[rank]

    def communication(self) -> Iterator[Communication]:
        """Yield the collectives of each module, from the rank in `sources`."""
        for rank in sorted(self._communication):
            yield from self._communication[rank]


def ranges(ranks: Iterable[int]) -> str:
    """Format ranks in ascending order, such as `0, 4-7`; a long list is cut off."""
    runs = spelled_runs(ranks)
    if len(runs) > _LISTED:
        runs[_LISTED:] = ["…"]
    return ", ".join(runs)


def _with_added(row: ModuleProfile, below: list[ModuleProfile]) -> ModuleProfile:
    """Return the row of a module after adding the parameters and work of missing submodules.

    `row` comes from a rank that does not have all submodules of the module, for example because it
    runs one stage of a pipeline. `below` has the rows of the submodules that only other ranks have.
    """
    if not below:
        return row
    fields: dict[str, Any] = sums((row, *below), *_PARAMETER_FIELDS)
    for phase in PHASES:
        fields[phase] = _with_added_work(row.work(phase), [each.work(phase) for each in below])
    shares: dict[str, list[DtypeShare]] = {}
    for module in (row, *below):
        for dtype, share in module.dtypes.items():
            shares.setdefault(dtype, []).append(share)
    dtypes = {}
    for dtype, of_dtype in shares.items():
        dtypes[dtype] = DtypeShare(**sums(of_dtype, "parameters", "bytes"))
    return replace(row, dtypes=dtypes, **fields)


def _with_added_work(work: Work, below: list[Work]) -> Work:
    """Return the inclusive work of a module after adding the work of missing submodules.

    `work` comes from a rank that does not have these submodules. `below` has the work of each
    submodule, from ranks that have it. If work is added, the times become `None`, because times of
    several ranks cannot be summed.
    """
    if not any(sums(below, *COUNTS).values()):
        return work
    return replace(
        work,
        **sums((work, *below), *COUNTS),
        logical_macs=sum_known(each.logical_macs for each in (work, *below)),
        seconds=None,
        device_seconds=None,
    )


def _differ(one: Profile, other: Profile) -> bool:
    """Return whether two ranks did different work. The order of the work does not matter."""
    if one is other:
        return False
    if one.op_counts != other.op_counts and set(one.op_counts) != set(other.op_counts):
        return True
    return (
        _calls(one) != _calls(other)
        or _unsupported(one) != _unsupported(other)
        or _collectives(one) != _collectives(other)
    )


def _calls(profile: Profile) -> dict[str, tuple[str, int]]:
    return {row: (module.class_name, module.calls) for row, module in profile.modules.items()}


def _unsupported(profile: Profile) -> Counter[Hashable]:
    key = attrgetter("module", "phase", "operator", "calls", "bytes")
    return Counter(map(key, profile.unsupported))


def _collectives(profile: Profile) -> Counter[Hashable]:
    """Count identical collectives. Group names are ignored, because they differ between ranks."""
    key = attrgetter("module", "phase", "collective", "group_size", "calls", "bytes")
    return Counter(map(key, profile.communication))

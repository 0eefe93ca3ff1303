"""What each operator did, over all modules and in each of them; and the operators that ran without a formula."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from itertools import groupby

from msgspec import Struct

from lflops.analyze.modules.tree import WorkCounts, share_of
from lflops.analyze.speed.traced_operators import traced_seconds
from lflops.profile.model import PHASES, Cell, Phase, Profile

__all__ = ["MODULES", "Operator", "OperatorRow", "UncountedOperator", "operator_rows", "operators", "uncounted_operators"]


MODULES = 20
"""The most modules listed for an operator in a phase: those in which it did the most."""


class Operator(Struct, frozen=True, kw_only=True):
    """One operator. `share` is its part of the MACs, or of the FLOPs, as `share_of` says."""

    operator: str
    figures: WorkCounts
    share: float | None


class OperatorRow(Struct, frozen=True, kw_only=True):
    """One operator in one phase and dtype, or in all of them.

    Attributes:
        phase: `None` is all of them.
        dtypes: One where there is a phase; none of what has no formula.
        figures: Calls and bytes alone where there is no formula: then they are in no total.
        is_counted: Whether there is one.
        share: As in `Operator`, of its phase; `None` also where it is not counted.
        modules: How many modules ran it.
        by_module: The modules in which it did the most, at most 20, without what is below them, the most first.
    """

    operator: str
    phase: Phase | None
    dtypes: tuple[str, ...]
    figures: WorkCounts
    is_counted: bool
    share: float | None
    modules: int
    by_module: Mapping[str, WorkCounts]


class UncountedOperator(Struct, frozen=True, kw_only=True):
    """An operator that is in no total: what it did in all modules and phases.

    Attributes:
        seconds: Its own seconds in a step, from a trace: on the device where one was recorded; `None` without a trace of it.
    """

    operator: str
    modules: tuple[str, ...]
    calls: int
    bytes: int
    seconds: float | None


def operators(profile: Profile, phase: Phase | None = "forward") -> tuple[Operator, ...]:
    """The operators of a phase, or of all of them, the most first: by MACs, then by FLOPs, then by bytes."""
    phases = PHASES if phase is None else (phase,)
    sums: dict[str, WorkCounts] = {}
    for cell in profile.cells:
        if cell.phase in phases:
            counts = WorkCounts(**{field: getattr(cell, field) for field in WorkCounts.__struct_fields__})
            sums[cell.operator] = sums.get(cell.operator, WorkCounts()) + counts
    metric, total = _total(profile, phase)
    rows = [
        Operator(operator=name, figures=counts, share=getattr(counts, metric) / total if total else None) for name, counts in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: _most(row.figures)))


def operator_rows(profile: Profile) -> tuple[OperatorRow, ...]:
    """Every operator in all phases together, then in each phase by dtype; those without a formula first, of each kind the most first.

    A call that is in two phases, as a fused attention's backward with its second product in recompute, is one call of all together.
    """
    counted = [
        (cell.operator, cell.phase, cell.dtype, cell.module, (cell.calls, cell.macs, cell.executed_macs, cell.flops, cell.bytes_moved))
        for cell in profile.cells
    ]
    twice = _calls_in_two_phases(profile.cells)
    uncounted = [(each.operator, each.phase, "", each.module, (each.calls, 0, 0, 0, each.bytes)) for each in profile.uncounted]
    return (*_sorted(_rows(profile, uncounted, {}, is_counted=False)), *_sorted(_rows(profile, counted, twice, is_counted=True)))


def _calls_in_two_phases(cells: Iterable[Cell]) -> dict[tuple[str, str], int]:
    """By operator and module, the calls whose recomputed part is a separate cell: that part moves no bytes beyond those of the call."""
    backward = {(cell.operator, cell.module, cell.dtype): cell.calls for cell in cells if cell.phase == "backward" and cell.bytes_moved}
    calls: defaultdict[tuple[str, str], int] = defaultdict(int)
    for cell in cells:
        if cell.phase == "recompute" and not cell.bytes_moved:
            calls[cell.operator, cell.module] += min(cell.calls, backward.get((cell.operator, cell.module, cell.dtype), 0))
    return dict(calls)


def uncounted_operators(profile: Profile) -> tuple[UncountedOperator, ...]:
    """The operators that ran without a formula, those that moved the most bytes first."""
    seconds = traced_seconds(profile, own=True)
    rows = []
    for operator, group in groupby(sorted(profile.uncounted, key=lambda entry: entry.operator), key=lambda entry: entry.operator):
        entries = list(group)
        rows.append(
            UncountedOperator(
                operator=operator,
                modules=tuple(dict.fromkeys(entry.module for entry in entries)),
                calls=sum(entry.calls for entry in entries),
                bytes=sum(entry.bytes for entry in entries),
                seconds=seconds.get(operator),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


_Entry = tuple[str, Phase, str, str, tuple[int, int, int, int, int]]
"""Operator, phase, dtype, module, and the values of `WorkCounts` in their order: 200,000 structs would be slow."""


def _rows(profile: Profile, entries: Iterable[_Entry], twice: Mapping[tuple[str, str], int], *, is_counted: bool) -> Iterator[OperatorRow]:
    sums: defaultdict[tuple[str, Phase | None, str], dict[str, list[int]]] = defaultdict(dict)
    dtypes: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for operator, phase, dtype, module, counts in entries:
        if dtype:
            dtypes[operator][dtype] = None
        calls, macs, executed, flops, moved = counts
        for modules in sums[operator, None, ""], sums[operator, phase, dtype]:
            of_module = modules.get(module)
            if of_module is None:
                modules[module] = [*counts]
                continue
            of_module[0] += calls
            of_module[1] += macs
            of_module[2] += executed
            of_module[3] += flops
            of_module[4] += moved
    keys: tuple[Phase | None, ...] = (None, *PHASES)
    totals = {phase: _total(profile, phase) for phase in keys}
    fields = WorkCounts.__struct_fields__
    for (operator, when, dtype), modules in sums.items():
        if when is None:
            for name, of_module in modules.items():
                of_module[0] -= twice.get((operator, name), 0)
        first = nsmallest(MODULES, modules.items(), key=lambda item: (-item[1][1], -item[1][3], -item[1][4]))
        done = WorkCounts(**{name: sum(values) for name, values in zip(fields, zip(*modules.values(), strict=True), strict=True)})
        metric, total = totals[when]
        yield OperatorRow(
            operator=operator,
            phase=when,
            dtypes=tuple(dtypes[operator]) if when is None else (dtype,) if dtype else (),
            figures=done,
            is_counted=is_counted,
            share=getattr(done, metric) / total if is_counted and total else None,
            modules=len(modules),
            by_module={name: WorkCounts(**dict(zip(fields, counts, strict=True))) for name, counts in first},
        )


def _total(profile: Profile, phase: Phase | None) -> tuple[str, int]:
    """The metric that shares of a phase are of, and its total."""
    metric = share_of(profile, phase)
    return metric, sum(getattr(profile.modules[""].work(each), metric) for each in (PHASES if phase is None else (phase,)))


def _sorted(rows: Iterable[OperatorRow]) -> list[OperatorRow]:
    return sorted(rows, key=lambda row: (row.phase is not None, *_most(row.figures)))


def _most(counts: WorkCounts) -> tuple[int, ...]:
    return -counts.macs, -counts.flops, -counts.bytes_moved

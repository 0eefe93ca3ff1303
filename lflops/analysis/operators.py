"""What each operator did, over all modules and in each of them.

And the operators that ran without a formula.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import add, attrgetter, itemgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.analysis.step_times import traced_seconds
from lflops.analysis.tree import WorkCounts, share_of
from lflops.profile.profile import OpCount, Profile
from lflops.profile.records import PHASES, Phase
from lflops.profile.series import gathered, grouped, summed, sums

# the most modules listed for an operator in a phase: those in which it did the most
MODULES = 20


class Operator(Struct, frozen=True, kw_only=True):
    """One operator. `share` is its part of the MACs, or of the FLOPs, as `share_of` says."""

    operator: str
    figures: WorkCounts
    share: float | None


class OperatorRow(Struct, frozen=True, kw_only=True):
    """One operator in one phase and dtype, or in all of them."""

    operator: str
    # `None` is all of them
    phase: Phase | None
    # one where there is a phase; none of what has no formula
    dtypes: tuple[str, ...]
    figures: (
        # calls and bytes alone where there is no formula: then they are in no total
        WorkCounts
    )
    # whether there is one
    is_counted: bool
    # as in `Operator`, of its phase; `None` also where it is not counted
    share: float | None
    # how many modules ran it
    modules: int
    by_module: Mapping[
        str, WorkCounts
        # the modules in which it did the most, at most 20, without what is below them, the most first
    ]


class UnsupportedOperator(Struct, frozen=True, kw_only=True):
    """An operator that is in no total: what it did in all modules and phases.

    Its own seconds in a step are from a trace, or `None`.
    """

    operator: str
    modules: tuple[str, ...]
    calls: int
    bytes: int
    seconds: float | None


class _Found(NamedTuple):
    figures: WorkCounts
    modules: int
    by_module: Mapping[str, WorkCounts]


def operators(profile: Profile, phase: Phase | None = "forward") -> tuple[Operator, ...]:
    """The operators of a phase, or of all of them, the most first.

    By MACs, then by FLOPs, then by bytes.
    """
    cells = grouped(
        (cell for cell in profile.op_counts if phase is None or cell.phase == phase),
        attrgetter("operator"),
    )
    figures = {
        name: WorkCounts(**sums(found, *WorkCounts.__struct_fields__))
        for name, found in cells.items()
    }
    metric, total = _total(profile, phase)
    rows = [
        Operator(
            operator=name, figures=done, share=getattr(done, metric) / total if total else None
        )
        for name, done in figures.items()
    ]
    return tuple(sorted(rows, key=lambda row: _most(row.figures)))


def operator_rows(profile: Profile) -> tuple[OperatorRow, ...]:
    """Every operator in all phases together, then in each phase by dtype.

    Those without a formula first, of each kind the most first.
    """
    # A call that is in two phases, as a fused attention's backward with its second product in
    # recompute, is one call of all together
    twice = _calls_in_two_phases(profile.op_counts)
    no_work = dict.fromkeys(("macs", "executed_macs", "flops"), 0)
    unsupported = [
        OpCount(
            module=each.module,
            operator=each.operator,
            phase=each.phase,
            dtype="",
            calls=each.calls,
            bytes_moved=each.bytes,
            **no_work,
        )
        for each in profile.unsupported
    ]
    return (
        *_sorted(_rows(profile, unsupported, {}, is_counted=False)),
        *_sorted(_rows(profile, profile.op_counts, twice, is_counted=True)),
    )


def _calls_in_two_phases(cells: Sequence[OpCount]) -> dict[tuple[str, str], int]:
    """Count the calls whose recomputed part is a separate cell, by operator and module.

    That part moves no bytes beyond the call's.
    """
    recomputed = [cell for cell in cells if cell.phase == "recompute" and not cell.bytes_moved]
    if not recomputed:
        return {}
    backward = {
        (cell.operator, cell.module, cell.dtype): cell.calls
        for cell in cells
        if cell.phase == "backward" and cell.bytes_moved
    }
    return summed(
        (
            (cell.operator, cell.module),
            min(cell.calls, backward.get((cell.operator, cell.module, cell.dtype), 0)),
        )
        for cell in recomputed
    )


def unsupported_operators(profile: Profile) -> tuple[UnsupportedOperator, ...]:
    """The operators that ran without a formula, those that moved the most bytes first."""
    seconds = traced_seconds(profile, own=True)
    rows = (
        UnsupportedOperator(
            operator=operator,
            modules=tuple(dict.fromkeys(entry.module for entry in entries)),
            seconds=seconds.get(operator),
            **sums(entries, "calls", "bytes"),
        )
        for operator, entries in sorted(
            grouped(profile.unsupported, attrgetter("operator")).items()
        )
    )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


_COUNTS_OF = attrgetter(*WorkCounts.__struct_fields__)
_NOTHING = (0,) * len(WorkCounts.__struct_fields__)
_MOST_OF = itemgetter(*map(WorkCounts.__struct_fields__.index, ("macs", "flops", "bytes_moved")))


def _rows(
    profile: Profile,
    cells: Sequence[OpCount],
    twice: Mapping[tuple[str, str], int],
    *,
    is_counted: bool,
) -> Iterator[OperatorRow]:
    kinds: dict[tuple[str, Phase, str], list[OpCount]] = grouped(
        cells, attrgetter("operator", "phase", "dtype")
    )
    in_two_phases = {operator for operator, _ in twice}
    totals = {phase: _total(profile, phase) for phase in (None, *PHASES)}

    def row(
        operator: str, phase: Phase | None, dtypes: tuple[str, ...], found: _Found
    ) -> OperatorRow:
        metric, total = totals[phase]
        share = getattr(found.figures, metric) / total if is_counted and total else None
        return OperatorRow(
            operator=operator,
            phase=phase,
            dtypes=dtypes,
            is_counted=is_counted,
            share=share,
            **found._asdict(),
        )

    for operator, rows in grouped(kinds, itemgetter(0)).items():
        where = [(phase, dtype) for _, phase, dtype in rows]
        found = {each: _found(_together(kinds[operator, *each])) for each in where}
        if len(where) == 1 and operator not in in_two_phases:
            everywhere = found[where[0]]
        else:
            everywhere = _found(
                _together([cell for each in where for cell in kinds[operator, *each]], twice)
            )
        dtypes = dict.fromkeys(dtype for _, dtype in where if dtype)
        yield row(operator, None, tuple(dtypes), everywhere)
        for phase, dtype in where:
            yield row(operator, phase, (dtype,) if dtype else (), found[phase, dtype])


def _together(
    cells: Sequence[OpCount], twice: Mapping[tuple[str, str], int] | None = None
) -> list[tuple[str, tuple[int, ...]]]:
    """The counts of each module, without the calls of `twice`.

    Most cells are the only ones of their module.
    """
    counted: list[tuple[str, tuple[int, ...]]] = list(
        zip(map(attrgetter("module"), cells), map(_COUNTS_OF, cells), strict=True)
    )
    if not twice and len({module for module, _ in counted}) == len(cells):
        return counted
    sums: dict[str, list[int]] = {}
    for module, counts in counted:
        sums[module] = list(map(add, sums.get(module, _NOTHING), counts))
    for module, of_module in sums.items():
        of_module[0] -= twice.get((cells[0].operator, module), 0) if twice else 0
    return [(module, tuple(counts)) for module, counts in sums.items()]


def _found(counted: Sequence[tuple[str, tuple[int, ...]]]) -> _Found:
    """The total, and the modules with the most of it.

    Layers repeat, so few of the counts are different.
    """
    fields = WorkCounts.__struct_fields__
    alike = gathered((counts, module) for module, counts in counted)
    ranked = sorted(alike.items(), key=lambda item: _MOST_OF(item[0]), reverse=True)
    first = islice(((module, counts) for counts, modules in ranked for module in modules), MODULES)
    total = [
        sum(counts[place] * len(modules) for counts, modules in ranked)
        for place in range(len(fields))
    ]
    return _Found(
        figures=WorkCounts(**dict(zip(fields, total, strict=True))),
        modules=len(counted),
        by_module={
            module: WorkCounts(**dict(zip(fields, counts, strict=True))) for module, counts in first
        },
    )


def _total(profile: Profile, phase: Phase | None) -> tuple[str, int]:
    metric = share_of(profile, phase)
    return metric, sum(
        getattr(profile.modules[""].work(each), metric)
        for each in (PHASES if phase is None else (phase,))
    )


def _sorted(rows: Iterable[OperatorRow]) -> list[OperatorRow]:
    return sorted(rows, key=lambda row: (row.phase is not None, *_most(row.figures)))


def _most(counts: WorkCounts) -> tuple[int, ...]:
    return -counts.macs, -counts.flops, -counts.bytes_moved

"""What each operator did, over all modules, and in which of them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from lflops.analyze.modules.tree import WorkCounts, share_of
from lflops.profile.model import PHASES, Phase, Profile

__all__ = ["Operator", "OperatorRow", "operators", "ran"]


class Operator(Struct, frozen=True, kw_only=True):
    """One operator. `share` is its part of the MACs, or of the FLOPs, as `analyze.tree.share_of` says."""

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
        by_module: The modules that ran it, without what is below them, the most first.
    """

    operator: str
    phase: Phase | None
    dtypes: tuple[str, ...]
    figures: WorkCounts
    is_counted: bool
    share: float | None
    by_module: Mapping[str, WorkCounts]


def operators(profile: Profile, phase: Phase | None = "forward") -> tuple[Operator, ...]:
    """The operators of a phase, or of all of them, the most first: by MACs, then by FLOPs, then by bytes."""
    phases = PHASES if phase is None else (phase,)
    found: dict[str, WorkCounts] = {}
    for cell in profile.cells:
        if cell.phase in phases:
            done = WorkCounts(**{field: getattr(cell, field) for field in WorkCounts.__struct_fields__})
            found[cell.operator] = found.get(cell.operator, WorkCounts()) + done
    shared, whole = _whole(profile, phase)
    rows = [Operator(operator=name, figures=done, share=getattr(done, shared) / whole if whole else None) for name, done in found.items()]
    return tuple(sorted(rows, key=lambda row: _most(row.figures)))


def ran(profile: Profile) -> tuple[OperatorRow, ...]:
    """Every operator in all phases together, then in each phase by dtype; those without a formula first, of each kind the most first."""
    places = [
        (cell.operator, cell.phase, cell.dtype, cell.module, (cell.calls, cell.macs, cell.executed_macs, cell.flops, cell.bytes_moved))
        for cell in profile.cells
    ]
    ledger = [(each.operator, each.phase, "", each.module, (each.calls, 0, 0, 0, each.bytes)) for each in profile.uncounted]
    return (*_sorted(_rows(profile, ledger, is_counted=False)), *_sorted(_rows(profile, places, is_counted=True)))


_Place = tuple[str, Phase, str, str, tuple[int, int, int, int, int]]
"""Operator, phase, dtype, module, and the values of `WorkCounts` in their order: 200,000 structs would be slow."""


def _rows(profile: Profile, places: Iterable[_Place], *, is_counted: bool) -> Iterator[OperatorRow]:
    found: defaultdict[tuple[str, Phase | None, str], dict[str, list[int]]] = defaultdict(dict)
    dtypes: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for operator, phase, dtype, module, figures in places:
        if dtype:
            dtypes[operator][dtype] = None
        for modules in found[operator, None, ""], found[operator, phase, dtype]:
            sums = modules.setdefault(module, [0] * len(figures))
            for index, figure in enumerate(figures):
                sums[index] += figure
    asked: tuple[Phase | None, ...] = (None, *PHASES)
    whole = {phase: _whole(profile, phase) for phase in asked}
    fields = WorkCounts.__struct_fields__
    for (operator, when, dtype), modules in found.items():
        by_module = {name: WorkCounts(**dict(zip(fields, sums, strict=True))) for name, sums in modules.items()}
        done = WorkCounts(**{name: sum(values) for name, values in zip(fields, zip(*modules.values(), strict=True), strict=True)})
        shared, of_all = whole[when]
        yield OperatorRow(
            operator=operator,
            phase=when,
            dtypes=tuple(dtypes[operator]) if when is None else (dtype,) if dtype else (),
            figures=done,
            is_counted=is_counted,
            share=getattr(done, shared) / of_all if is_counted and of_all else None,
            by_module=dict(sorted(by_module.items(), key=lambda item: _most(item[1]))),
        )


def _whole(profile: Profile, phase: Phase | None) -> tuple[str, int]:
    """What a share in a phase is of, and how much of that there is."""
    shared = share_of(profile, phase)
    return shared, sum(getattr(profile.modules[""].work(each), shared) for each in (PHASES if phase is None else (phase,)))


def _sorted(rows: Iterable[OperatorRow]) -> list[OperatorRow]:
    return sorted(rows, key=lambda row: (row.phase is not None, *_most(row.figures)))


def _most(figures: WorkCounts) -> tuple[int, ...]:
    return -figures.macs, -figures.flops, -figures.bytes_moved

"""The page's table of operators, with the modules that each of them ran in."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.operators import OperatorRow
from lflops.profile.model import PHASES, Profile
from lflops.profile.records import Trace, TracedOperator
from lflops.report.lines.trace import per_batch
from lflops.report.payload.columns import Columns, column

__all__ = ["Operators", "operators"]

_COUNTED = ("macs", "flops")
_ALWAYS = ("calls", "bytes_moved")
_TRACED = ("own_device_seconds", "device_seconds", "own_host_seconds", "host_seconds")
_OF_TORCH = "aten::"


class Operators(Struct, frozen=True, kw_only=True):
    """What ran, by operator.

    Attributes:
        table: Of each its `operator` and its `phase`, always lists; `all` is all phases together. Seconds are of the mean traced batch, of
            all phases together: a trace does not separate them. A traced operator that was not counted has only seconds.
        within: The modules of each, `row` and `module` as always lists of rows of this table and of that of modules.
        uncounted: How many operators ran without a formula.
    """

    table: Columns
    within: Columns
    uncounted: int


def operators(analysis: Analysis) -> Operators | None:
    """The view; `None` where nothing was counted and nothing traced."""
    profile = analysis.profile
    rows = analysis.operator_rows if profile.is_counted else ()
    traced = _traced(profile.trace)
    traced_only = [name for name in traced if name not in {row.operator.removeprefix(_OF_TORCH) for row in rows}]
    if not rows and not traced_only:
        return None
    return Operators(
        table=_table(analysis, rows, traced_only, traced),
        within=_within(profile, rows),
        uncounted=len({entry.operator for entry in profile.uncounted}),
    )


def _table(analysis: Analysis, rows: Sequence[OperatorRow], traced_only: Sequence[str], traced: Mapping[str, TracedOperator]) -> Columns:
    trace, nothing = analysis.profile.trace, [None] * len(traced_only)
    shared = {phase: {"macs": "MACs", "flops": "FLOPs"}[analysis.share_of(phase)] for phase in (None, *PHASES)}
    columns: Columns = {
        "operator": [*(row.operator for row in rows), *traced_only],
        "phase": [*(row.phase or "all" for row in rows), *("all" for _ in traced_only)],
        "dtype": column([*(", ".join(row.dtypes) or None for row in rows), *nothing]),
        "kind": column([*("counted" if row.is_counted else "no formula" for row in rows), *("traced" for _ in traced_only)]),
        "share": column([*(row.share for row in rows), *nothing]),
        "share_of": column([*(shared[row.phase] for row in rows), *nothing]),
        "modules": column([*(row.modules for row in rows), *nothing]),
    }
    for field in _ALWAYS:
        columns[field] = column([*(getattr(row.figures, field) for row in rows), *nothing])
    for field in _COUNTED:
        columns[field] = column([*(getattr(row.figures, field) if row.is_counted else None for row in rows), *nothing])
    columns["intensity"] = column([*(_intensity(row) for row in rows), *nothing])
    of_rows = [traced.get(row.operator.removeprefix(_OF_TORCH)) if row.phase is None else None for row in rows]
    for field in _TRACED:
        times = [*of_rows, *(traced[name] for name in traced_only)]
        columns[field] = column(None if each is None or trace is None else per_batch(getattr(each, field), trace) for each in times)
    return columns


def _intensity(row: OperatorRow) -> float | None:
    """FLOPs for each byte, without what a mask left out: as in the roofline."""
    figures = row.figures
    executed = figures.flops - 2 * (figures.macs - figures.executed_macs)
    return executed / figures.bytes_moved if row.is_counted and figures.bytes_moved else None


def _within(profile: Profile, rows: Sequence[OperatorRow]) -> Columns:
    numbers = {name: number for number, name in enumerate(profile.modules)}
    listed = [(row, name, each.by_module[name]) for row, each in enumerate(rows) for name in each.by_module]
    columns: Columns = {"row": [row for row, _, _ in listed], "module": [numbers[name] for _, name, _ in listed]}
    columns |= {field: column(getattr(counts, field) for _, _, counts in listed) for field in (*_ALWAYS, *_COUNTED)}
    return columns


def _traced(trace: Trace | None) -> dict[str, TracedOperator]:
    """By name, torch's own without `aten::`, as counts name them."""
    return {} if trace is None else {each.name.removeprefix(_OF_TORCH): each for each in trace.operators}

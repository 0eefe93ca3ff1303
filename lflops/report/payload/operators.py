"""The page's tables of modules, of operators with their modules, and of compiled kernels."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, sub

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.analysis.operators import OperatorRow, operator_rows
from lflops.analysis.tree import share_of
from lflops.profile.profile import Profile
from lflops.profile.records import PASS_PHASES, PHASES, CompiledCode, Trace, TracedOperator
from lflops.report.payload.columns import Columns, column

_OF_MODULES = (
    "calls",
    "compiled",
    "owner",
    "parameters",
    "self_parameters",
    "trainable_parameters",
    "peak_bytes",
)
_COUNTS = tuple(
    prefix + field
    for field in ("macs", "flops", "bytes_moved", "comm_bytes")
    for prefix in ("", "self_")
)
_TIMES = ("seconds", "self_seconds", "device_seconds")


def modules(analysis: Analysis) -> Columns:
    """Columns of the modules, then of their work in each phase, inclusive and `self_`.

    The names are always a list. Modules with the same number in `identical` have the same counts,
    all the way down.
    """
    spreads: dict[str, float] = {}
    for stat in analysis.profile.rank_stats:
        if stat.median and not stat.waits and stat.phase in PASS_PHASES:
            spreads[stat.module] = max(stat.spread / stat.median, spreads.get(stat.module, 0.0))
    profile = analysis.profile
    rows, counted = profile.modules.values(), profile.is_counted
    columns: Columns = {
        "name": list(profile.modules),
        "kind": column(module.class_name for module in rows),
    }
    columns |= {field: column(map(attrgetter(field), rows)) for field in _OF_MODULES}
    columns["rank_spread"] = column(spreads.get(name) for name in profile.modules)
    columns["identical"] = column(analysis.identical_subtrees[name] for name in profile.modules)
    for phase in PHASES:
        works, whole = list(map(attrgetter(phase), rows)), profile.modules[""].work(phase)
        for field in _COUNTS:
            # The root includes all work: if it has none, no module has any.
            has_any = getattr(whole, field.removeprefix("self_"))
            columns[f"{phase}.{field}"] = (
                None if not counted else column(map(attrgetter(field), works)) if has_any else 0
            )
        for own in ("", "self_"):
            masked = map(
                sub,
                map(attrgetter(f"{own}macs"), works),
                map(attrgetter(f"{own}executed_macs"), works),
            )
            has_any = whole.macs != whole.executed_macs
            columns[f"{phase}.{own}masked_flops"] = (
                None if not counted else column([2 * macs for macs in masked]) if has_any else 0
            )
        for field in _TIMES:
            columns[f"{phase}.{field}"] = column(
                [None if each is None else each.median for each in map(attrgetter(field), works)]
            )
    return columns


KERNELS = 1000
"""The most compiled kernels in the table, for the size of the page."""

_COUNTED = ("macs", "flops")
_ALWAYS = ("calls", "bytes_moved")
_TRACED = ("self_device_seconds", "device_seconds", "self_host_seconds", "host_seconds")
_OF_TORCH = "aten::"


class Kernels(Struct, frozen=True, kw_only=True):
    """The kernels of compiled code. Figures are of the mean traced batch.

    Attributes:
        table: The kernels, most time first; `name`, `module` (a row of the table of modules) and
            `phase` are always lists. A kernel that is fused of several modules has a row in each of
            them, with its part of the time and the bytes.
        left_out: Number of kernels that are not in the table.
        timed_on: Where the seconds were measured: `device` or `host`.
        graphs: Number of compiled graphs that ran.
        assigned: Share of the time in compiled code that belongs to a known module.
        fused: Share of that time in kernels that are fused of several modules.
    """

    table: Columns
    left_out: int
    timed_on: str
    graphs: int
    assigned: float | None
    fused: float | None


class Operators(Struct, frozen=True, kw_only=True):
    """Work and time by operator.

    Attributes:
        table: The operators; `operator` and `phase` are always lists, and the phase `all` is all
            phases together. Seconds are those of the mean traced batch in all phases: a trace does
            not separate them. A traced operator that was not counted has only seconds.
        within: Modules of each operator; `row` and `module`, always lists, are rows of this table
            and of the table of modules.
        unsupported: Number of operators without a formula that ran.
        kernels: Kernels of compiled code; `None` if none were recorded.
    """

    table: Columns
    within: Columns
    unsupported: int
    kernels: Kernels | None


def operators(analysis: Analysis) -> Operators | None:
    """The view, or `None` if nothing was counted and nothing traced."""
    profile = analysis.profile
    rows = operator_rows(profile) if profile.is_counted else ()
    # Torch's own without `aten::`, as counts name them.
    traced = (
        {each.name.removeprefix(_OF_TORCH): each for each in profile.trace.operators}
        if profile.trace
        else {}
    )
    traced_only = [
        name
        for name in traced
        if name not in {row.operator.removeprefix(_OF_TORCH) for row in rows}
    ]
    kernels = (
        None
        if profile.trace is None or profile.trace.compiled is None
        else _kernels(profile, profile.trace, profile.trace.compiled)
    )
    if not rows and not traced_only and kernels is None:
        return None
    return Operators(
        table=_table(analysis, rows, traced_only, traced),
        within=_within(profile, rows),
        unsupported=len({entry.operator for entry in profile.unsupported}),
        kernels=kernels,
    )


def _table(
    analysis: Analysis,
    rows: Sequence[OperatorRow],
    traced_only: Sequence[str],
    traced: Mapping[str, TracedOperator],
) -> Columns:
    trace, nothing = analysis.profile.trace, [None] * len(traced_only)
    shared = {
        phase: {"macs": "MACs", "flops": "FLOPs"}[share_of(analysis.profile, phase)]
        for phase in (None, *PHASES)
    }
    columns: Columns = {
        "operator": [*(row.operator for row in rows), *traced_only],
        "phase": [*(row.phase or "all" for row in rows), *("all" for _ in traced_only)],
        "dtype": column([*(", ".join(row.dtypes) or None for row in rows), *nothing]),
        "kind": column(
            [
                *("counted" if row.is_counted else "no formula" for row in rows),
                *("traced" for _ in traced_only),
            ]
        ),
        "share": column([*(row.share for row in rows), *nothing]),
        "share_of": column([*(shared[row.phase] for row in rows), *nothing]),
        "modules": column([*(row.modules for row in rows), *nothing]),
    }
    for field in _ALWAYS:
        columns[field] = column([*(getattr(row.figures, field) for row in rows), *nothing])
    for field in _COUNTED:
        columns[field] = column(
            [*(getattr(row.figures, field) if row.is_counted else None for row in rows), *nothing]
        )
    columns["intensity"] = column([*(_intensity(row) for row in rows), *nothing])
    of_rows = [
        traced.get(row.operator.removeprefix(_OF_TORCH)) if row.phase is None else None
        for row in rows
    ]
    for field in _TRACED:
        times = [*of_rows, *(traced[name] for name in traced_only)]
        columns[field] = column(
            None if each is None or trace is None else trace.per_batch(getattr(each, field))
            for each in times
        )
    return columns


def _intensity(row: OperatorRow) -> float | None:
    """FLOPs per byte, without the work that a mask skips, as in the roofline."""
    figures = row.figures
    executed = figures.flops - 2 * (figures.macs - figures.executed_macs)
    return executed / figures.bytes_moved if row.is_counted and figures.bytes_moved else None


def _within(profile: Profile, rows: Sequence[OperatorRow]) -> Columns:
    numbers = {name: number for number, name in enumerate(profile.modules)}
    listed = [
        (row, name, each.by_module[name])
        for row, each in enumerate(rows)
        for name in each.by_module
    ]
    columns: Columns = {
        "row": [row for row, _, _ in listed],
        "module": [numbers[name] for _, name, _ in listed],
    }
    columns |= {
        field: column(getattr(counts, field) for _, _, counts in listed)
        for field in (*_ALWAYS, *_COUNTED)
    }
    return columns


def _kernels(profile: Profile, trace: Trace, code: CompiledCode) -> Kernels | None:
    """The kernels with the most time, or `None` if no kernel belongs to a known module."""
    numbers = {name: number for number, name in enumerate(profile.modules)}
    known = [each for each in code.kernels if each.module in numbers]
    if not known:
        return None
    kept = known[:KERNELS]
    took = [each.seconds_on(code.timed_on) for each in kept]
    columns: Columns = {
        "name": [each.name for each in kept],
        "module": [numbers[each.module] for each in kept],
        "phase": [each.phase for each in kept],
        "seconds": column(trace.per_batch(seconds) for seconds in took),
        "share": column(seconds / code.seconds if code.seconds else None for seconds in took),
        "fused_bytes": column(
            None if each.bytes_moved is None else trace.per_batch(each.bytes_moved) for each in kept
        ),
        "modules": column(each.modules for each in kept),
        "calls": column(trace.per_batch(each.calls) for each in kept),
    }
    return Kernels(
        table=columns,
        left_out=len(known) - len(kept),
        timed_on=code.timed_on,
        graphs=code.graphs,
        assigned=1 - code.unassigned_seconds / code.seconds if code.seconds else None,
        fused=code.divided_seconds / code.seconds if code.seconds else None,
    )

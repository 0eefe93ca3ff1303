"""Build the page's tables of modules, of operators, and of kernels of compiled code."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.analysis.operators import OperatorRow, operator_rows
from lflops.analysis.tree import share_of
from lflops.profile.profile import Profile, Work
from lflops.profile.records import (
    PASS_PHASES,
    PHASES,
    CompiledCode,
    Trace,
    TracedOperator,
    median_of,
)
from lflops.profile.series import positions, ratio
from lflops.report.payload.columns import Columns, Value, column, lists, table

_OF_MODULES = (
    "calls",
    "compiled",
    "owner",
    "parameters",
    "self_parameters",
    "trainable_parameters",
    "peak_bytes",
)
_COUNTS = ("macs", "flops", "bytes_moved", "comm_bytes")
_TIMES = ("seconds", "self_seconds", "device_seconds")


def modules(analysis: Analysis) -> Columns:
    """Build the table of modules, with their work and times in each phase.

    There are two columns for each count: one includes submodules, and the other has the prefix
    `self_` and excludes them. The column of names is a list even if all values are equal. If two
    modules have the same number in the column `identical`, they and all their submodules do the
    same work.
    """
    profile = analysis.profile
    rows = list(profile.modules.values())
    columns: Columns = {
        "name": list(profile.modules),
        "kind": column(module.class_name for module in rows),
        **table(rows, _OF_MODULES),
    }
    spreads = _rank_spreads(profile)
    columns["rank_spread"] = column(spreads.get(name) for name in profile.modules)
    columns["identical"] = column(analysis.identical_subtrees[name] for name in profile.modules)
    for phase in PHASES:
        works = [module.work(phase) for module in rows]
        columns |= _counts(profile, works, phase)
        for field in _TIMES:
            columns[f"{phase}.{field}"] = _medians(works, field)
    return columns


def _rank_spreads(profile: Profile) -> dict[str, float]:
    """Return how much slower the slowest rank is than the median rank, keyed by module name.

    A value is a share of the median rank's time, in the phase in which this share is largest.
    """
    spreads: dict[str, float] = {}
    for stat in profile.rank_stats:
        if stat.median and not stat.waits and stat.phase in PASS_PHASES:
            spread = stat.spread / stat.median
            spreads[stat.module] = max(spread, spreads.get(stat.module, 0.0))
    return spreads


def _counts(profile: Profile, works: Sequence[Work], phase: str) -> Columns:
    """Build the columns with the counts of a phase, from the work of each module in this phase.

    The columns `masked_flops` have the FLOPs of attention that masks let the kernel skip. All
    values are `None` if nothing was counted.
    """
    root = profile.modules[""].work(phase)
    columns: Columns = {}
    for prefix in ("", "self_"):
        for field in _COUNTS:
            # The root includes the work of all modules. If this work is 0, a single 0 is stored
            # instead of a list.
            has_any = bool(getattr(root, field))
            values = map(attrgetter(prefix + field), works) if has_any else [0]
            columns[f"{phase}.{prefix}{field}"] = column(values)
        has_masks = root.macs != root.executed_macs
        masked = _masked_flops(works, prefix) if has_masks else [0]
        columns[f"{phase}.{prefix}masked_flops"] = column(masked)
    if not profile.is_counted:
        return dict.fromkeys(columns)
    return columns


def _masked_flops(works: Sequence[Work], prefix: str) -> Iterator[Value]:
    for work in works:
        macs: int = getattr(work, f"{prefix}macs")
        executed: int = getattr(work, f"{prefix}executed_macs")
        yield 2 * (macs - executed)


def _medians(works: Sequence[Work], field: str) -> list[Value] | Value:
    medians: list[Value] = []
    for work in works:
        medians.append(median_of(getattr(work, field)))
    return column(medians)


KERNELS = 1000
"""Maximum number of kernels of compiled code in the table, to limit the size of the page."""

_WORK = ("calls", "bytes_moved", "macs", "flops")
_TRACED = ("self_device_seconds", "device_seconds", "self_host_seconds", "host_seconds")
_OF_TORCH = "aten::"
# Maximum number of rows of operators that were traced but not counted.
_TRACED_OPERATORS = 20


class Kernels(Struct, frozen=True, kw_only=True):
    """The kernels of compiled code. Times, bytes and calls are means per traced batch.

    Attributes:
        table: The kernels, sorted by time, the longest first. The columns `name`, `module` and
            `phase` are always lists. `module` is the index of a row in the table of modules. A
            kernel that is fused from several modules has a row for each of these modules, and its
            time and bytes are divided among the rows.
        left_out: Number of kernels that are not in the table.
        timed_on: Where the seconds were measured: `device` or `host`.
        graphs: Number of compiled graphs that ran.
        assigned: Share of the time in compiled code that could be assigned to modules.
        fused: Share of the time in compiled code that was spent in kernels that are fused from
            several modules.
    """

    table: Columns
    left_out: int
    timed_on: str
    graphs: int
    assigned: float | None
    fused: float | None


class Operators(Struct, frozen=True, kw_only=True):
    """The Operators view: work and time by operator.

    Attributes:
        table: A row for each operator in each phase, and a row with the phase `all` for all phases
            together. The columns `operator` and `phase` are lists even if all values are equal. A
            trace does not separate phases, so only the rows of the phase `all` have seconds, which
            are means per traced batch. If an operator was traced but not counted, its row only has
            seconds.
        within: The work of each operator in each module. The columns `row` and `module` have
            indices into `table` and into the table of modules. They are lists even if all values
            are equal.
        unsupported: Number of operators that ran but have no formula, so their work is not counted.
        kernels: Kernels of compiled code. `None` if none were recorded.
    """

    table: Columns
    within: Columns
    unsupported: int
    kernels: Kernels | None


class _Row(NamedTuple):
    """A row of the table of operators. Values that are unknown are `None`.

    Attributes:
        kind: `counted`, `no formula` or `traced` (traced, but not counted).
        times: The seconds from the trace, keyed by the names in `_TRACED`. Empty if the operator
            was not traced, or if the row is about a single phase.
    """

    operator: str
    phase: str
    kind: str
    dtype: str | None = None
    share: float | None = None
    share_of: str | None = None
    modules: int | None = None
    calls: int | None = None
    bytes_moved: int | None = None
    macs: int | None = None
    flops: int | None = None
    intensity: float | None = None
    times: Mapping[str, float | None] = {}


def operators(analysis: Analysis) -> Operators | None:
    """Return the data of the Operators view, or `None` if no operators were counted or traced."""
    profile = analysis.profile
    rows = operator_rows(profile) if profile.is_counted else ()
    listed = [*_counted_rows(profile, rows), *_traced_only(profile, rows)]
    trace = profile.trace
    kernels = None
    if trace is not None and trace.compiled is not None:
        kernels = _kernels(profile, trace, trace.compiled)
    if not listed and kernels is None:
        return None
    columns = lists(listed, _Row._fields[:2]) | table(listed, _Row._fields[2:-1])
    for field in _TRACED:
        columns[field] = column(row.times.get(field) for row in listed)
    return Operators(
        table=columns,
        within=_within(profile, rows),
        unsupported=len({entry.operator for entry in profile.unsupported}),
        kernels=kernels,
    )


def _counted_rows(profile: Profile, rows: Sequence[OperatorRow]) -> Iterator[_Row]:
    metrics = {"macs": "MACs", "flops": "FLOPs"}
    traced = _traced_by_name(profile)
    for row in rows:
        figures = row.figures
        # A trace has no phases.
        operator = None
        if row.phase is None:
            operator = traced.get(_short_name(row.operator))
        yield _Row(
            operator=row.operator,
            phase=row.phase or "all",
            kind="counted" if row.is_counted else "no formula",
            dtype=", ".join(row.dtypes) or None,
            share=row.share,
            share_of=metrics[share_of(profile, row.phase)],
            modules=row.modules,
            calls=figures.calls,
            bytes_moved=figures.bytes_moved,
            macs=figures.macs if row.is_counted else None,
            flops=figures.flops if row.is_counted else None,
            intensity=_intensity(row),
            times=_traced_seconds(profile.trace, operator),
        )


def _traced_only(profile: Profile, rows: Sequence[OperatorRow]) -> Iterator[_Row]:
    """Yield rows of operators that were traced but not counted, if their self time is long."""
    trace = profile.trace
    if trace is None:
        return
    counted = {_short_name(row.operator) for row in rows}
    for operator in trace.by_own_time()[:_TRACED_OPERATORS]:
        name = _short_name(operator.name)
        if name not in counted:
            times = _traced_seconds(trace, operator)
            yield _Row(operator=name, phase="all", kind="traced", times=times)


def _traced_by_name(profile: Profile) -> dict[str, TracedOperator]:
    """Return the traced operators, keyed by their short names."""
    traced: dict[str, TracedOperator] = {}
    if profile.trace is not None:
        for operator in profile.trace.operators:
            traced[_short_name(operator.name)] = operator
    return traced


def _short_name(operator: str) -> str:
    """Return an operator's name without the namespace `aten::`.

    Only the names in traces have this namespace, so names are compared without it.
    """
    return operator.removeprefix(_OF_TORCH)


def _traced_seconds(
    trace: Trace | None, operator: TracedOperator | None
) -> dict[str, float | None]:
    seconds: dict[str, float | None] = {}
    if trace is not None and operator is not None:
        for field in _TRACED:
            seconds[field] = trace.per_batch(getattr(operator, field))
    return seconds


def _intensity(row: OperatorRow) -> float | None:
    """Return the FLOPs of an operator per byte that it moves, as in the roofline.

    FLOPs that a mask skips are left out. Return `None` if the intensity is unknown.
    """
    figures = row.figures
    if not row.is_counted or not figures.bytes_moved:
        return None
    masked = 2 * (figures.macs - figures.executed_macs)
    return (figures.flops - masked) / figures.bytes_moved


def _within(profile: Profile, rows: Sequence[OperatorRow]) -> Columns:
    """Build a table with the work of each operator in each module."""
    numbers = _module_numbers(profile)
    operators: list[Value] = []
    modules: list[Value] = []
    works = []
    for number, row in enumerate(rows):
        for name, work in row.by_module.items():
            operators.append(number)
            modules.append(numbers[name])
            works.append(work)
    return {"row": operators, "module": modules, **table(works, _WORK)}


def _module_numbers(profile: Profile) -> Mapping[str, int]:
    """Return the index of each module's row in the table of modules, keyed by module name."""
    return positions(profile.modules)


def _kernels(profile: Profile, trace: Trace, code: CompiledCode) -> Kernels | None:
    """Return the kernels of compiled code whose modules are known, or `None` if there are none.

    If there are too many kernels, only the kernels with the most time are in the table.
    """
    numbers = _module_numbers(profile)
    known = [kernel for kernel in code.kernels if kernel.module in numbers]
    if not known:
        return None
    kept = known[:KERNELS]
    modules: list[Value] = []
    seconds = []
    shares = []
    calls = []
    fused_bytes = []
    for kernel in kept:
        took = kernel.seconds_on(code.timed_on)
        modules.append(numbers[kernel.module])
        seconds.append(trace.per_batch(took))
        shares.append(ratio(took, code.seconds))
        calls.append(trace.per_batch(kernel.calls))
        fused_bytes.append(trace.per_batch(kernel.bytes_moved))
    columns: Columns = {
        **lists(kept, ("name",)),
        "module": modules,
        **lists(kept, ("phase",)),
        "seconds": column(seconds),
        "share": column(shares),
        **table(kept, ("modules",)),
        "calls": column(calls),
        "fused_bytes": column(fused_bytes),
    }
    unassigned = ratio(code.unassigned_seconds, code.seconds)
    return Kernels(
        table=columns,
        left_out=len(known) - len(kept),
        timed_on=code.timed_on,
        graphs=code.graphs,
        assigned=None if unassigned is None else 1 - unassigned,
        fused=ratio(code.divided_seconds, code.seconds),
    )

"""A profile on a terminal.

Lines about what was profiled, its times and what no total holds, then a table of its modules or
operators.
"""

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.tree import Row, WorkCounts, share_of
from lflops.profile.records import CompiledCode, Phase, Trace
from lflops.profile.series import sum_known
from lflops.report.module_table import ModuleColumn, ModuleLine, module_columns, module_lines
from lflops.report.report import Part, report_of, speed_lines
from lflops.report.terminal.tables import MARGIN, FittedTable, figure, margin, prose, text
from lflops.report.text import counted, plain, shortened_name
from lflops.report.verdict import verdict_lines


def header(analysis: Analysis) -> Group:
    report = report_of(analysis)
    blocks: list[RenderableType] = [
        margin((label, prose(value)) for label, value in verdict_lines(report.verdict)),
        margin((fact.label, prose(fact.text)) for fact in report.subject),
        *([margin(speed_lines(report.speed))] if report.speed else []),
        *([_budget(report.budget)] if report.budget else []),
        _totals(analysis),
        margin((fact.label, prose(fact.said)) for fact in report.model if fact.name != "MACs"),
        margin(
            (fact.label, prose(fact.text, "yellow" if fact.doubt else ""))
            for fact in report.remarks
        ),
    ]
    return Group(*(part for block in blocks[:-1] for part in (block, "")), blocks[-1])


def _budget(parts: tuple[Part, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for index, part in enumerate(parts):
        table.add_row(
            "" if index else "budget",
            *map(text, (units.percent(part.share), units.duration(part.seconds), part.label)),
        )
    return table


def _totals(analysis: Analysis) -> FittedTable:
    ran: dict[str, WorkCounts] = {
        phase: counts for phase, counts in analysis.totals.items() if counts != WorkCounts()
    }
    if not ran and not analysis.profile.is_counted:
        unknown = {
            name: [units.UNKNOWN] for name in ("MACs", "FLOPs", "bytes moved", "operator calls")
        }
        return FittedTable("totals", ["all"], unknown, room=MARGIN)
    ran = ran or {"forward": WorkCounts()}
    if len(ran) > 1:
        ran["all"] = sum(ran.values(), WorkCounts())
    columns = {"MACs": [units.count(counts.macs) for counts in ran.values()]}
    if model := analysis.unsharded_macs:
        macs: dict[str, int | None] = {**model, "all": sum_known(model.values())}
        columns["MACs of model"] = [units.count(macs.get(phase, 0)) for phase in ran]
    if any(counts.executed_macs != counts.macs for counts in ran.values()):
        columns["executed MACs"] = [units.count(counts.executed_macs) for counts in ran.values()]
    columns["FLOPs"] = [units.count(counts.flops) for counts in ran.values()]
    columns["bytes moved"] = [units.size(counts.bytes_moved) for counts in ran.values()]
    columns["operator calls"] = [units.count(counts.calls) for counts in ran.values()]
    return FittedTable("totals", list(ran), columns, room=MARGIN)


_GAP = 2
# width that names have, if they need it, before a column is left out for them
_NAME = 36
# the least width of a name below its indent
_LABEL = 8
# the first columns, which are never left out
_KEPT = 2


def render(
    analysis: Analysis,
    *,
    depth: int = -1,
    sort: str | None = None,
    own: bool = False,
    phase: Phase | None = None,
) -> RenderableType:
    """A profile as text for a terminal.

    Its tree down to `depth`, or a flat list of modules by their `own` work.

    The phase is that of times, work and shares; `None` is all phases together. Without a column to
    sort by, rows have the model's order, or that of own MACs. A `ValueError` where `depth`, `sort`
    or `phase` is invalid.
    """
    rows = (
        analysis.flat(sort=sort, phase=phase)
        if own
        else analysis.tree(depth=depth, sort=sort, phase=phase)
    )
    return Group(header(analysis), "", _Modules(analysis, rows, phase))


class _Modules:
    """The table of the rows, with as many of the columns as leave room for the names."""

    def __init__(self, analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> None:
        listed = list(module_lines(rows))
        self._lines = [
            line
            for line in listed
            if not line.row.own or line.row.parameters or line.row.one(None).calls
        ]
        self._columns = module_columns(analysis, phase)
        self._cells = {
            column: [column.cell(line) for line in self._lines] for column in self._columns
        }
        self._uncalled = set(analysis.uncalled)
        self._idle = len(listed) - len(self._lines)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = self._fitting(options.max_width)
        room = max(options.max_width - sum(map(self._width, columns)), 1)
        step, deepest = self._indent(room)
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold",
        )
        table.add_column(
            "module, own work" if any(line.row.own for line in self._lines) else "module",
            vertical="bottom",
            no_wrap=True,
        )
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
        for index, line in enumerate(self._lines):
            if line.row.own or line.row.depth <= deepest:
                style = "dim" if line.row.name in self._uncalled else ""
                name = _name(line, 0 if line.row.own else step * line.row.depth, room)
                table.add_row(
                    name, *(figure(self._cells[column][index]) for column in columns), style=style
                )
        yield table
        if remarks := [prose(remark, "dim") for remark in self._remarks(columns, deepest)]:
            yield Group("", *remarks)

    def _width(self, column: ModuleColumn) -> int:
        return _GAP + max(map(len, [*column.heading.split("\n"), *self._cells[column]]))

    def _fitting(self, width: int) -> list[ModuleColumn]:
        """The columns that leave room for the names; the last ones go first."""
        kept = list(self._columns)
        longest = max(map(_full_width, self._lines), default=0)
        deepest = max((line.row.depth for line in self._lines if not line.row.own), default=0)
        room = max(min(longest, _NAME), deepest + _LABEL)
        while (
            len(kept) > 1
            and sum(map(self._width, kept)) + (room if len(kept) > _KEPT else _LABEL) > width
        ):
            kept.pop()
        return kept

    def _indent(self, room: int) -> tuple[int, int]:
        """How far a level is indented, and the last level that is shown.

        Siblings alone have the same indent.
        """
        depth = max((line.row.depth for line in self._lines), default=0)
        step = 2 if 2 * depth + _LABEL <= room else 1
        return step, max((room - _LABEL) // step, 0)

    def _remarks(self, columns: list[ModuleColumn], deepest: int) -> Iterator[str]:
        if any(line.times > 1 for line in self._lines):
            times = (
                ", times too" if any(column.heading.endswith("time") for column in columns) else ""
            )
            yield f"×N: N equal modules; the figures are those of all of them{times}"
        if self._idle:
            yield f"{counted(self._idle, 'module')} without own work or parameters {'is' if self._idle == 1 else 'are'} not listed"
        if deep := sum(not line.row.own and line.row.depth > deepest for line in self._lines):
            yield f"too narrow for {counted(deep, 'row')} below level {deepest} (COLUMNS=200 shows them)"
        if left_out := [
            " ".join(column.heading.split()) for column in self._columns if column not in columns
        ]:
            yield f"too narrow for {', '.join(left_out)} (COLUMNS=200 shows them)"


def _full_width(line: ModuleLine) -> int:
    kind = _kind(line)
    return (
        (0 if line.row.own else 2 * line.row.depth)
        + len(_label(line))
        + (2 + len(kind) if kind else 0)
    )


def _label(line: ModuleLine) -> str:
    last = line.path if line.row.own else line.path.rpartition(".")[2]
    return plain(
        (last or line.row.kind or "all of it") + (f" ×{line.times}" if line.row.repeat else "")
    )


def _kind(line: ModuleLine) -> str:
    row = line.row
    kind = row.kind if row.name else ""
    return plain(
        kind
        + (", compiled" if row.compiled else "")
        + (f", shares {row.owner}" if row.owner else "")
    )


def _name(line: ModuleLine, indent: int, room: int) -> Text:
    """The indented label, its middle left out where it is too long, and the class where it has room."""
    kind = _kind(line)
    label = shortened_name(_label(line), max(room - indent, 1))
    name = Text(" " * indent + label, no_wrap=True, overflow="crop")
    left = room - indent - len(label) - 2
    if kind and left >= min(len(kind), 6):
        name.append("  " + (kind if len(kind) <= left else kind[: left - 1] + "…"), style="dim")
    return name


# kernels of compiled code that are shown
_MOST = 20


def render_operators(analysis: Analysis, phase: Phase | None = "forward") -> RenderableType:
    """The operators of a phase as text for a terminal, the most first.

    `None` is all the phases together.
    """
    rows = analysis.operators(phase)
    if not rows:
        return Group(header(analysis), "", text(f"no operators in {phase or 'any phase'}", "dim"))
    macs = {"MACs": [units.count(row.figures.macs) for row in rows]}
    flops = {"FLOPs": [units.count(row.figures.flops) for row in rows]}
    by_flops = share_of(analysis.profile, phase) == "flops"
    share = {f"% of {'FLOPs' if by_flops else 'MACs'}": [units.percent(row.share) for row in rows]}
    columns = (flops | share if by_flops else macs | share | flops) | {
        "bytes moved": [units.size(row.figures.bytes_moved) for row in rows],
        "calls": [units.count(row.figures.calls) for row in rows],
    }
    tables = [FittedTable(f"operators, {phase or 'all'}", [row.operator for row in rows], columns)]
    trace = analysis.profile.trace
    if trace is not None and trace.operators:
        tables += [_traced(trace), *([_compiled(trace, trace.compiled)] if trace.compiled else [])]
    return Group(header(analysis), *(part for table in tables for part in ("", table)))


def _traced(trace: Trace) -> FittedTable:
    """The operators with the most own time, in the mean recorded batch.

    Device time is attributed to the operator that launched it.
    """
    on_device = any(each.device_seconds for each in trace.operators)
    rows = trace.by_own_time(on_device=on_device)
    figures = (
        {"device, own": "self_device_seconds", "device": "device_seconds"} if on_device else {}
    )
    figures |= {"host, own": "self_host_seconds", "host": "host_seconds"}
    columns = {
        heading: [units.duration(trace.per_batch(getattr(row, name))) for row in rows]
        for heading, name in figures.items()
    }
    columns["calls"] = [units.count(trace.per_batch(row.calls)) for row in rows]
    return FittedTable("operators as traced, in a batch", [row.name for row in rows], columns)


def _compiled(trace: Trace, code: CompiledCode) -> FittedTable:
    """The kernels of compiled code with the most time, in the mean recorded batch.

    A fused one has a row in each of its modules.
    """
    rows = code.kernels[:_MOST]
    took = [row.seconds_on(code.timed_on) for row in rows]
    columns: dict[str, list[str]] = {
        "module": [row.module or "the model itself" for row in rows],
        "phase": [row.phase for row in rows],
        code.timed_on: [units.duration(trace.per_batch(seconds)) for seconds in took],
        "% of compiled": [
            units.percent(seconds / code.seconds if code.seconds else None) for seconds in took
        ],
        "bytes, fused": [
            units.size(None if row.bytes_moved is None else trace.per_batch(row.bytes_moved))
            for row in rows
        ],
        "fused of": [f"{row.modules} modules" if row.modules > 1 else "1 module" for row in rows],
        "calls": [units.count(trace.per_batch(row.calls)) for row in rows],
    }
    return FittedTable("kernels of compiled code, in a batch", [row.name for row in rows], columns)

"""Draw a profile on a terminal: lines about the run, then a table of its modules or operators."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.operators import Operator
from lflops.analysis.tree import ModuleRow, WorkCounts, share_of
from lflops.profile.module_names import last_part, plain
from lflops.profile.records import CompiledCode, Phase, Trace
from lflops.profile.series import ratio, sum_known
from lflops.report.module_columns import ModuleColumn, ModuleLine, module_columns, module_lines
from lflops.report.summary_facts import Fact, Part, report_of, speed_lines
from lflops.report.terminal.tables import (
    MARGIN,
    FittedTable,
    figure,
    margin,
    prose,
    prose_rows,
    text,
    too_narrow_for,
)
from lflops.report.text import counted, shortened_name
from lflops.report.verdict import verdict_lines


def header(analysis: Analysis, *, of_run: bool = False) -> Group:
    """Draw the lines above the table: the verdict, the run, its speed, totals, memory and remarks.

    `of_run` is true if the summary of the whole run is shown above these lines. In this case, the
    verdict is left out, and each label of a time says that the time is from one window of the run
    (a few profiled steps).
    """
    report = report_of(analysis)
    blocks: list[RenderableType] = []
    speed = report.speed
    if of_run:
        speed = tuple(map(_of_window, speed))
    else:
        blocks.append(margin(prose_rows(verdict_lines(report.verdict))))
    blocks.append(margin((fact.label, prose(fact.text)) for fact in report.subject))
    if speed:
        blocks.append(margin(prose_rows(speed_lines(speed))))
    if report.breakdown:
        blocks.append(_step_breakdown(report.breakdown))
    blocks.append(_totals(analysis))
    model = []
    for fact in report.model:
        # The table of totals has the MACs.
        if fact.name != "MACs":
            model.append((fact.label, prose(fact.said)))
    blocks.append(margin(model))
    remarks: list[tuple[str, RenderableType]] = []
    for fact in report.remarks:
        style = "yellow" if fact.is_caveat else ""
        remarks.append((fact.label, prose(fact.text, style)))
    parts: list[RenderableType] = []
    for block in blocks:
        parts += [block, ""]
    return Group(*parts, margin(remarks))


def _of_window(fact: Fact) -> Fact:
    return fact if fact.of else replace(fact, label=f"{fact.label} of the window")


def _step_breakdown(parts: tuple[Part, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    label = "step breakdown"
    for part in parts:
        seconds = units.duration(part.seconds)
        table.add_row(label, text(units.percent(part.share)), text(seconds), text(part.label))
        label = ""
    return table


def _totals(analysis: Analysis) -> FittedTable:
    """Draw a table with the work of each phase, and of all phases together."""
    ran: dict[str, WorkCounts] = {
        phase: counts for phase, counts in analysis.totals.items() if counts != WorkCounts()
    }
    if not ran and not analysis.profile.is_counted:
        headings = ("MACs", "FLOPs", "bytes moved", "operator calls")
        unknown = dict.fromkeys(headings, units.UNKNOWN)
        return FittedTable.of_rows("totals", [("all", unknown)], room=MARGIN)
    ran = ran or {"forward": WorkCounts()}
    if len(ran) > 1:
        ran["all"] = sum(ran.values(), WorkCounts())
    macs_of_model: dict[str, int | None] = dict(analysis.unsharded_macs or {})
    macs_of_model["all"] = sum_known(macs_of_model.values())
    has_masks = any(counts.executed_macs != counts.macs for counts in ran.values())
    rows = []
    for phase, counts in ran.items():
        cells = {"MACs": units.count(counts.macs)}
        if analysis.unsharded_macs:
            cells["MACs of model"] = units.count(macs_of_model.get(phase, 0))
        if has_masks:
            cells["executed MACs"] = units.count(counts.executed_macs)
        cells["FLOPs"] = units.count(counts.flops)
        cells["bytes moved"] = units.size(counts.bytes_moved)
        cells["operator calls"] = units.count(counts.calls)
        rows.append((phase, cells))
    return FittedTable.of_rows("totals", rows, room=MARGIN)


_GAP = 2
# Names up to this width are shown in full. Columns are left out to make room for the names.
_NAME = 36
# Smallest width of a name, without its indent.
_LABEL = 8
# Number of first columns that are kept even if names must be shortened down to `_LABEL` characters.
_KEPT = 2


def render(
    analysis: Analysis,
    *,
    depth: int = -1,
    sort: str | None = None,
    flat: bool = False,
    phase: Phase | None = None,
    of_run: bool = False,
) -> RenderableType:
    """Draw a profile with its module tree, or with a flat list of modules.

    Args:
        analysis: The analysis of the profile.
        depth: Number of levels of the tree below the model, or -1 for all levels.
        sort: Column to sort by. By default, a tree has the order of the model, and a flat list is
            sorted by MACs.
        flat: Whether to draw a flat list. In a flat list, the figures of a module exclude its
            submodules.
        phase: The phase to show times, work and shares of, or `None` for all phases together.
        of_run: Whether the first screen of the run is shown above the profile.

    Raises:
        ValueError: `depth`, `sort` or `phase` is invalid.
    """
    if flat:
        rows = analysis.flat(sort=sort, phase=phase)
    else:
        rows = analysis.tree(depth=depth, sort=sort, phase=phase)
    return Group(header(analysis, of_run=of_run), "", _Modules(analysis, rows, phase))


class _Layout(NamedTuple):
    """The layout of the table of modules for a given terminal width.

    Attributes:
        columns: The columns that are shown.
        room: Width of the column of names.
        indent: Number of spaces by which each level of the tree is indented.
        deepest: The deepest level of the tree that is shown.
    """

    columns: list[ModuleColumn]
    room: int
    indent: int
    deepest: int


class _Modules:
    """The table of modules. On a narrow terminal, its last columns are left out."""

    def __init__(self, analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None) -> None:
        listed = list(module_lines(rows))
        self._lines = [line for line in listed if _is_listed(line.row)]
        self._columns = module_columns(analysis, phase)
        self._cells: dict[ModuleColumn, list[str]] = {}
        for column in self._columns:
            self._cells[column] = list(map(column.cell, self._lines))
        self._uncalled = set(analysis.uncalled)
        self._idle = len(listed) - len(self._lines)
        root = analysis.profile.modules[""]
        self._root_class = root.class_name or "the model"
        self._outside_macs = root.other.macs if phase is None else 0

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        layout = self._layout(options.max_width)
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold",
        )
        is_flat = any(line.row.is_self for line in self._lines)
        heading = "module, self work" if is_flat else "module"
        table.add_column(heading, vertical="bottom", no_wrap=True)
        for column in layout.columns:
            table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
        for index, line in enumerate(self._lines):
            level = _level(line)
            if level <= layout.deepest:
                cells = [figure(self._cells[column][index]) for column in layout.columns]
                name = _name(line, layout.indent * level, layout.room)
                style = ""
                if line.row.name in self._uncalled:
                    style = "dim"
                table.add_row(name, *cells, style=style)
        yield table
        remarks = [prose(remark, "dim") for remark in self._remarks(layout)]
        if remarks:
            yield Group("", *remarks)

    def _layout(self, width: int) -> _Layout:
        depths = [line.row.depth for line in self._lines]
        columns = self._fitting(width)
        room = max(width - sum(map(self._width, columns)), 1)
        indent = 2 if 2 * max(depths, default=0) + _LABEL <= room else 1
        return _Layout(columns, room, indent, max((room - _LABEL) // indent, 0))

    def _width(self, column: ModuleColumn) -> int:
        return _GAP + max(map(len, [*column.heading.split("\n"), *self._cells[column]]))

    def _fitting(self, width: int) -> list[ModuleColumn]:
        """Return the columns that can be shown without shortening names too much.

        If there is too little room, the last columns are left out.
        """
        kept = list(self._columns)
        longest = max(map(_full_width, self._lines), default=0)
        deepest = max(map(_level, self._lines), default=0)
        room = max(min(longest, _NAME), deepest + _LABEL)
        while len(kept) > 1:
            needed = room if len(kept) > _KEPT else _LABEL
            if sum(map(self._width, kept)) + needed <= width:
                break
            kept.pop()
        return kept

    def _remarks(self, layout: _Layout) -> Iterator[str]:
        if any(line.times > 1 for line in self._lines):
            has_times = any(column.heading.endswith("time") for column in layout.columns)
            times = " and times" if has_times else ""
            yield f"×N: N identical modules; all figures{times} are sums over the N modules"
        if self._outside_macs:
            macs = units.count(self._outside_macs)
            yield (
                f"{plain(self._root_class)} includes {macs} MACs outside all phases, for example "
                "of a model that lflops does not monitor"
            )
        if self._idle:
            are = "is" if self._idle == 1 else "are"
            modules = counted(self._idle, "module")
            yield f"{modules} without self work or parameters {are} not listed"
        too_deep = sum(_level(line) > layout.deepest for line in self._lines)
        if too_deep:
            rows = counted(too_deep, "row")
            yield too_narrow_for(f"{rows} below level {layout.deepest}")
        left_out = []
        for column in self._columns:
            if column not in layout.columns:
                left_out.append(" ".join(column.heading.split()))
        if left_out:
            yield too_narrow_for(", ".join(left_out))


def _is_listed(row: ModuleRow) -> bool:
    """Return whether the table lists a module.

    A flat list leaves out modules that have no parameters and run no operators themselves.
    """
    return not row.is_self or bool(row.parameters) or bool(row.one(None).calls)


def _level(line: ModuleLine) -> int:
    """Return the level of a line in the module tree. In a flat list, all lines have level 0."""
    return 0 if line.row.is_self else line.row.depth


def _full_width(line: ModuleLine) -> int:
    kind = _kind(line)
    width = 2 * _level(line) + len(_label(line))
    return width + 2 + len(kind) if kind else width


def _label(line: ModuleLine) -> str:
    name = line.path if line.row.is_self else last_part(line.path)
    label = name or line.row.class_name or "the whole model"
    if line.row.repeat:
        label = f"{label} ×{line.times}"
    return plain(label)


def _kind(line: ModuleLine) -> str:
    row = line.row
    kind = row.class_name if row.name else ""
    if row.compiled:
        kind += ", compiled"
    if row.owner:
        kind += f", shares parameters with {row.owner}"
    return plain(kind)


def _name(line: ModuleLine, indent: int, room: int) -> Text:
    """Return the cell with the name of a module: indented, and with the class if there is room.

    A long name is shortened.
    """
    kind = _kind(line)
    label = shortened_name(_label(line), max(room - indent, 1))
    name = Text(" " * indent + label, no_wrap=True, overflow="crop")
    left = room - indent - len(label) - 2
    if kind and left >= min(len(kind), 6):
        shown = kind if len(kind) <= left else f"{kind[: left - 1]}…"
        name.append(f"  {shown}", style="dim")
    return name


# Maximum number of kernels of compiled code that are shown.
_KERNELS = 20
_TRACED_OPERATORS = 20


def render_operators(analysis: Analysis, phase: Phase | None = "forward") -> RenderableType:
    """Draw a table of the operators of a phase, sorted by work. `None` means all phases.

    If operators were traced, a second table has their times.
    """
    rows = analysis.operators(phase)
    if not rows:
        return Group(header(analysis), "", text(f"no operators in {phase or 'any phase'}", "dim"))
    by_flops = share_of(analysis.profile, phase) == "flops"
    cells = []
    for row in rows:
        cells.append((row.operator, _operator(row, by_flops=by_flops)))
    table = FittedTable.of_rows(f"operators, {phase or 'all'}", cells)
    parts: list[RenderableType] = [header(analysis), "", table]
    trace = analysis.profile.trace
    if trace is not None and trace.operators:
        parts += ["", _traced(trace)]
        if trace.compiled is not None:
            parts += ["", _compiled(trace, trace.compiled)]
    return Group(*parts)


def _operator(row: Operator, *, by_flops: bool) -> dict[str, str]:
    figures = row.figures
    cells = {}
    if by_flops:
        cells["FLOPs"] = units.count(figures.flops)
        cells["% of FLOPs"] = units.percent(row.share)
    else:
        cells["MACs"] = units.count(figures.macs)
        cells["% of MACs"] = units.percent(row.share)
        cells["FLOPs"] = units.count(figures.flops)
    cells["bytes moved"] = units.size(figures.bytes_moved)
    cells["calls"] = units.count(figures.calls)
    return cells


def _traced(trace: Trace) -> FittedTable:
    """Draw a table of traced operators with their times, sorted by self time.

    All values are means per traced batch. If an operator launches a kernel, the time of this kernel
    on the device is attributed to the operator.
    """

    def time(seconds: float) -> str:
        return units.duration(trace.per_batch(seconds))

    on_device = trace.has_device_times
    rows = []
    for operator in trace.by_own_time()[:_TRACED_OPERATORS]:
        cells = {}
        if on_device:
            cells["device, self"] = time(operator.self_device_seconds)
            cells["device"] = time(operator.device_seconds)
        cells["host, self"] = time(operator.self_host_seconds)
        cells["host"] = time(operator.host_seconds)
        cells["calls"] = units.count(trace.per_batch(operator.calls))
        rows.append((operator.name, cells))
    return FittedTable.of_rows("traced operators, per batch", rows)


def _compiled(trace: Trace, code: CompiledCode) -> FittedTable:
    """Draw a table of the kernels of compiled code that take the most time.

    All values are means per traced batch. A kernel that is fused from several modules has a row for
    each of these modules.
    """
    rows = []
    for kernel in code.kernels[:_KERNELS]:
        seconds = kernel.seconds_on(code.timed_on)
        cells = {
            "module": kernel.module or "the model itself",
            "phase": kernel.phase,
            code.timed_on: units.duration(trace.per_batch(seconds)),
            "% of compiled": units.percent(ratio(seconds, code.seconds)),
            "fused bytes moved": units.size(trace.per_batch(kernel.bytes_moved)),
            "fused from": counted(kernel.modules, "module"),
            "calls": units.count(trace.per_batch(kernel.calls)),
        }
        rows.append((kernel.name, cells))
    return FittedTable.of_rows("kernels of compiled code, per batch", rows)

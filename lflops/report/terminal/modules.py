"""A profile on a terminal: lines about what was profiled, its times and what no total holds, then its modules as a table."""

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import Row
from lflops.profile.records import Phase
from lflops.report.lines.text import counted, plain, shortened_name
from lflops.report.tables.module_columns import ModuleColumn, ModuleLine, module_columns, module_lines
from lflops.report.terminal.header import header
from lflops.report.terminal.tables import figure, prose

_GAP = 2
_NAME = 36  # width that names have, if they need it, before a column is left out for them
_LABEL = 8  # the least width of a name below its indent
_KEPT = 2  # the first columns, which are never left out


def render(
    analysis: Analysis, *, depth: int = -1, sort: str | None = None, own: bool = False, phase: Phase | None = None
) -> RenderableType:
    """A profile as text for a terminal: its tree down to `depth`, or a flat list of modules by their `own` work.

    The phase is that of times, work and shares; `None` is all phases together. Without a column to sort by, rows have the model's order, or
    that of own MACs. A `ValueError` where `depth`, `sort` or `phase` is invalid.
    """
    rows = analysis.flat(sort=sort, phase=phase) if own else analysis.tree(depth=depth, sort=sort, phase=phase)
    return Group(header(analysis), "", _Modules(analysis, rows, phase))


class _Modules:
    """The table of the rows, with as many of the columns as leave room for the names."""

    def __init__(self, analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> None:
        listed = list(module_lines(rows))
        self._lines = [line for line in listed if not line.row.own or line.row.parameters or line.row.one(None).calls]
        self._columns = module_columns(analysis, phase)
        self._cells = {column: [column.cell(line) for line in self._lines] for column in self._columns}
        self._uncalled = set(analysis.uncalled)
        self._idle = len(listed) - len(self._lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = self._fitting(options.max_width)
        room = max(options.max_width - sum(map(self._width, columns)), 1)
        step, deepest = self._indent(room)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("module, own work" if any(line.row.own for line in self._lines) else "module", vertical="bottom", no_wrap=True)
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
        for index, line in enumerate(self._lines):
            if line.row.own or line.row.depth <= deepest:
                style = "dim" if line.row.name in self._uncalled else ""
                name = _name(line, 0 if line.row.own else step * line.row.depth, room)
                table.add_row(name, *(figure(self._cells[column][index]) for column in columns), style=style)
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
        while len(kept) > _KEPT and sum(map(self._width, kept)) + room > width:
            kept.pop()
        while len(kept) > 1 and sum(map(self._width, kept)) + _LABEL > width:
            kept.pop()
        return kept

    def _indent(self, room: int) -> tuple[int, int]:
        """How far a level is indented, and the last level that is shown: siblings alone have the same indent."""
        depth = max((line.row.depth for line in self._lines), default=0)
        step = 2 if 2 * depth + _LABEL <= room else 1
        return step, max((room - _LABEL) // step, 0)

    def _remarks(self, columns: list[ModuleColumn], deepest: int) -> Iterator[str]:
        if any(line.times > 1 for line in self._lines):
            times = ", times too" if any(column.heading.endswith("time") for column in columns) else ""
            yield f"×N: N equal modules; the figures are those of all of them{times}"
        if self._idle:
            yield f"{counted(self._idle, 'module')} without own work or parameters {'is' if self._idle == 1 else 'are'} not listed"
        if deep := sum(not line.row.own and line.row.depth > deepest for line in self._lines):
            yield f"too narrow for {counted(deep, 'row')} below level {deepest} (COLUMNS=200 shows them)"
        if left_out := [" ".join(column.heading.split()) for column in self._columns if column not in columns]:
            yield f"too narrow for {', '.join(left_out)} (COLUMNS=200 shows them)"


def _full_width(line: ModuleLine) -> int:
    kind = _kind(line)
    return (0 if line.row.own else 2 * line.row.depth) + len(_label(line)) + (2 + len(kind) if kind else 0)


def _label(line: ModuleLine) -> str:
    last = line.path if line.row.own else line.path.rpartition(".")[2]
    return plain((last or line.row.kind or "all of it") + (f" ×{line.times}" if line.row.repeat else ""))


def _kind(line: ModuleLine) -> str:
    row = line.row
    kind = row.kind if row.name else ""
    return plain(kind + (", compiled" if row.compiled else "") + (f", shares {row.owner}" if row.owner else ""))


def _name(line: ModuleLine, indent: int, room: int) -> Text:
    """The indented label, its middle left out where it is too long, and the class where it has room."""
    kind = _kind(line)
    label = shortened_name(_label(line), max(room - indent, 1))
    name = Text(" " * indent + label, no_wrap=True, overflow="crop")
    left = room - indent - len(label) - 2
    if kind and left >= min(len(kind), 6):
        name.append("  " + (kind if len(kind) <= left else kind[: left - 1] + "…"), style="dim")
    return name

"""A profile on a terminal: a few lines of what was profiled and what no total holds, then its modules as a table."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import Row, walk
from lflops.profile.model import PHASES, Phase
from lflops.report.lines.text import plain, shortened
from lflops.report.terminal.header import header
from lflops.report.terminal.tables import figure, text

__all__ = ["render"]

_SHORT: dict[Phase | None, str] = {
    "forward": "fwd",
    "backward": "bwd",
    "recompute": "recomp",
    "optimizer": "optim",
    "other": "other",
    None: "all",
}
_GAP = 2
_CUT_NAME, _CLIPPED_NAME, _SHORT_NAME, _LONG_NAME = 4, 12, 16, 40


def render(
    analysis: Analysis, *, depth: int = -1, sort: str | None = None, own: bool = False, phase: Phase | None = "forward"
) -> RenderableType:
    """A profile as text for a terminal.

    Args:
        analysis: What to show.
        depth: How many levels of the tree below the root; -1 is all of them.
        sort: A column, one of `SORT_KEYS`; `None` is the model's order, or by own MACs.
        own: A flat list of modules by their own work, instead of the tree.
        phase: What the shares, the rate, the FLOPs and the bytes are about; `None` is all the phases together.

    Raises:
        ValueError: `depth`, `sort` or `phase` is invalid.
    """
    rows = analysis.flat(sort=sort, phase=phase) if own else analysis.tree(depth=depth, sort=sort, phase=phase)
    return Group(header(analysis), "", _Modules(analysis, rows, phase))


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]
    gives: int = _SHORT_NAME  # it is left out before a name of up to this width is shortened


class _Name:
    """A row's name, fitted to its column: first the kind is shortened, then the middle of the label."""

    def __init__(self, row: Row) -> None:
        kind = row.kind + (", compiled" if row.compiled else "") + (f", shares {row.owner}" if row.owner else "")
        self.indent = 0 if row.own else 2 * row.depth
        self.label, self.kind = plain(_label(row) or kind or "all of it"), plain(kind if _label(row) else "")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = self.indent + len(self.label) + (2 + len(self.kind) if self.kind else 0)
        return Measurement(min(width, 12), width).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        indent = min(self.indent, options.max_width // 2)
        label = shortened(self.label, options.max_width - indent)
        line = Text(" " * indent + label, no_wrap=True, overflow="crop")
        left = options.max_width - indent - len(label) - 2
        if self.kind and left >= min(len(self.kind), 6):
            line.append("  " + (self.kind if len(self.kind) <= left else self.kind[: left - 1] + "…"), style="dim")
        yield line


class _Modules:
    """The table of the rows, with as many of the columns as leave room for the names."""

    def __init__(self, analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> None:
        listed = list(walk(rows))
        self._rows = [row for row in listed if not row.own or row.parameters or row.one(None).calls]
        self._names = [_Name(row) for row in self._rows]
        self._columns = list(_columns(analysis, phase))
        self._uncalled = set(analysis.uncalled)
        self._idle = len(listed) - len(self._rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = self._fitting(options.max_width)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("module, own work" if any(row.own for row in self._rows) else "module", vertical="bottom")
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
        for row, name in zip(self._rows, self._names, strict=True):
            style = "dim" if row.name in self._uncalled else ""
            table.add_row(name, *(figure(column.cell(row)) for column in columns), style=style)
        yield table
        if remarks := [text(remark, "dim") for remark in self._remarks(columns)]:
            yield Group("", *remarks)

    def _fitting(self, width: int) -> list[_Column]:
        """The columns that leave room for the names."""
        kept = list(self._columns)
        longest = max((name.indent + len(name.label) for name in self._names), default=0)
        widths = {column: _GAP + max(map(len, [*column.heading.split("\n"), *map(column.cell, self._rows)])) for column in kept}
        for column in sorted(kept, key=lambda column: (column.gives, kept.index(column)), reverse=True):
            if column.gives and sum(widths[each] for each in kept) + min(longest, column.gives) > width:
                kept.remove(column)
        return kept

    def _remarks(self, columns: list[_Column]) -> Iterator[str]:
        if any(row.repeat for row in self._rows):
            times = ", times the mean over all of them" if any(column.heading.endswith("time") for column in columns) else ""
            yield f"×N: N equal modules; the figures are those of one of them{times}"
        if self._idle:
            yield f"{self._idle} modules without own work or parameters are not listed"
        if left_out := [" ".join(column.heading.split()) for column in self._columns if column not in columns]:
            yield f"too narrow for {', '.join(left_out)} (COLUMNS=200 shows them)"


def _columns(analysis: Analysis, phase: Phase | None) -> Iterator[_Column]:
    """Work and, where it is known, time: of the phase shown, with its shares, and of the other phases that have some."""
    short, by_flops, timed = _SHORT[phase], analysis.share_of(phase) == "flops", analysis.has_times(None)
    extra = _LONG_NAME if timed else _SHORT_NAME
    yield _Column("params", lambda row: units.count(row.parameters))
    yield from _macs_columns(analysis, phase, extra)
    if timed:
        yield from _time_columns(analysis, phase)
    yield _Column(f"{short}\nFLOPs", lambda row: units.count(row.one(phase).flops), gives=0 if by_flops else _LONG_NAME)
    if by_flops:
        yield _share(f"% of {short}\nFLOPs")
    yield _Column(f"{short} bytes\nmoved", lambda row: units.size(row.one(phase).bytes_moved), gives=extra)


def _macs_columns(analysis: Analysis, phase: Phase | None, extra: int) -> Iterator[_Column]:
    """MACs of the phases that have some, the share after what it is of."""
    short, by_flops = _SHORT[phase], analysis.share_of(phase) == "flops"
    timed = analysis.has_times(phase)
    share = _share(f"% of {short}\nMACs", gives=_CLIPPED_NAME) if timed else _share(f"% of\n{short}")
    for each, counts in analysis.totals.items():
        if each == phase and by_flops:
            continue
        if each == phase:
            yield _Column(f"{short}\nMACs", partial(_macs, each), gives=0)
            yield share
        elif counts.macs or each == "forward":
            gives = {"forward": _SHORT_NAME, "backward": extra}.get(each, _LONG_NAME)
            yield _Column(f"{_SHORT[each]}\nMACs", partial(_macs, each), gives=gives)
    if phase is None and not by_flops:
        yield _Column("all\nMACs", partial(_macs, None), gives=0)
        yield share


def _time_columns(analysis: Analysis, phase: Phase | None) -> Iterator[_Column]:
    """The time of the phase shown, its share and the rate of its MACs; then the times of the other phases."""
    short = _SHORT[phase]
    if analysis.has_times(phase):
        yield _Column(f"{short}\ntime", partial(_time, phase), gives=_CUT_NAME)
        yield _Column(f"% of {short}\ntime", lambda row: units.percent(row.time_share), gives=_CLIPPED_NAME)
        if analysis.share_of(phase) == "macs":
            yield _Column(f"{short}\nFLOP/s", lambda row: units.count(row.flops_per_second(phase)))
    for each in PHASES:
        if each != phase and analysis.has_times(each):
            gives = _SHORT_NAME if each in {"forward", "backward"} else _LONG_NAME
            yield _Column(f"{_SHORT[each]}\ntime", partial(_time, each), gives=gives)


def _share(heading: str, gives: int = 0) -> _Column:
    return _Column(heading, lambda row: units.percent(row.share), gives=gives)


def _time(phase: Phase | None, row: Row) -> str:
    return units.duration(row.time(phase))


def _macs(phase: Phase | None, row: Row) -> str:
    return units.count(row.one(phase).macs)


def _label(row: Row) -> str:
    """A range of numbers, or up to three other names."""
    if row.own:
        return row.name
    if row.repeat is None:
        return row.label
    labels = [name.rpartition(".")[2] for name in row.names]
    numbered = len({label.rstrip("0123456789") for label in labels}) == 1
    listed = f"{labels[0]}…{labels[-1]}" if numbered or len(labels) > 3 else ", ".join(labels)
    return f"{listed} ×{row.times}"

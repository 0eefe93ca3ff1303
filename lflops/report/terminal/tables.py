"""Text and tables for a terminal: without markup or control characters, and fitted to its width."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.report.lines.text import plain, shortened

__all__ = ["MARGIN", "FittedTable", "figure", "margin", "text"]

MARGIN = 16
"""Width of the labels in the lines above a table."""

_GAP = 2
_SHORTEST = 16
_NOTHING = {"0", "0 B", "0 %", units.UNKNOWN}


def text(content: str, style: str = "") -> Text:
    """A line without markup or control characters."""
    return Text(plain(content), style=style)


def figure(number: str) -> Text:
    """A number; dimmed where it is 0 or unknown."""
    return text(number, "dim" if number in _NOTHING else "")


def margin() -> Table:
    """Lines with a label in the margin."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


class FittedTable:
    """Names with their figures; where the width is too small the last columns are left out, never digits."""

    def __init__(self, heading: str, names: Sequence[str], columns: Mapping[str, Sequence[str]], *, room: int) -> None:
        """Take the cells as text.

        Args:
            heading: Of the names.
            names: One a row.
            columns: Cells of each row, by heading.
            room: Width of the names, as long as there is a column to leave out.
        """
        self._heading, self._names, self._columns, self._room = heading, names, columns, room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept = self._fitting(options.max_width)
        room = max(options.max_width - self._width(kept), 1)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column(self._heading, min_width=min(self._room, room), no_wrap=True)
        for heading in kept:
            table.add_column(heading, justify="right", overflow="fold")
        for name, *cells in zip(self._names, *(self._columns[heading] for heading in kept), strict=True):
            table.add_row(text(shortened(plain(name), max(room, min(self._room, _SHORTEST)))), *map(figure, cells))
        yield table
        if left_out := list(self._columns)[len(kept) :]:
            yield text(f"too narrow for {', '.join(left_out)} (COLUMNS=200 shows them)", "dim")

    def _fitting(self, width: int) -> list[str]:
        kept = list(self._columns)
        while len(kept) > 1 and self._room + self._width(kept) > width:
            kept.pop()
        return kept

    def _width(self, headings: Sequence[str]) -> int:
        return sum(_GAP + max(map(len, [heading, *self._columns[heading]])) for heading in headings)

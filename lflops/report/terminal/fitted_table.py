"""A table of figures that gives up columns, never digits."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

from lflops.report.terminal.text import figure, plain, text

__all__ = ["FittedTable"]

_GAP = 2


class FittedTable:
    """Names with their figures: the last column gives way first, the first never."""

    def __init__(self, heading: str, names: Sequence[str], columns: Mapping[str, Sequence[str]], *, room: int) -> None:
        """Take the cells as text.

        Args:
            heading: Of the names.
            names: One a row.
            columns: Cells of each row, by heading.
            room: What the names have, as long as there is a column to give up.
        """
        self._heading, self._names, self._columns, self._room = heading, names, columns, room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept = self._fitting(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column(self._heading, min_width=max(min(self._room, options.max_width - self._width(kept)), 1), no_wrap=True)
        for heading in kept:
            table.add_column(heading, justify="right", overflow="fold")
        for name, *cells in zip(self._names, *(self._columns[heading] for heading in kept), strict=True):
            table.add_row(text(plain(name)), *map(figure, cells))
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

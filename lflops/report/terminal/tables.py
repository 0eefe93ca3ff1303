"""Text and tables for a terminal: without markup or control characters, and fitted to its width."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.report.text import plain, shortened, shortened_name

# width of the labels in the lines above a table
MARGIN = 16

_WITH_UNIT = re.compile(
    r"(?<=\d) (?=(?:%|[nµm]?s|[KMGT]?i?B|[kMGTP]?(?:FLOP/s|B/s)?)(?:[^\w%]|$))|(?<=±) "
)
_GAP = 2
_SHORTEST, _LONG_NAME = 16, 40
_NOTHING = {"0", "0 B", "0 %", units.UNKNOWN}


def text(content: str, style: str = "") -> Text:
    """A line without markup or control characters."""
    return Text(plain(content), style=style)


def figure(number: str) -> Text:
    """A number; dimmed where it is 0 or unknown."""
    return text(number, "dim" if number in _NOTHING else "")


class prose:  # noqa: N801 - used as the function `text` is
    """A sentence or more, wrapped between words; a number keeps its unit."""

    def __init__(self, content: str, style: str = "", indent: int = 0) -> None:
        """Take the text, a style of rich, and the columns that every line is indented by."""
        self._content, self._style, self._indent = plain(content), style, " " * indent

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self._indent) + len(self._content)).with_maximum(
            options.max_width
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        tied = _WITH_UNIT.sub("\N{NO-BREAK SPACE}", self._content)
        room = max(options.max_width, len(self._indent) + 1)
        lines = textwrap.wrap(
            tied,
            room,
            initial_indent=self._indent,
            subsequent_indent=self._indent,
            break_on_hyphens=False,
        )
        yield Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "), self._style, no_wrap=True)


def margin(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Lines with a label in the margin, which stands once for all lines below it with the same label."""
    table, above = Table.grid(padding=(0, 2, 0, 0)), ""
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, line in rows:
        table.add_row(
            "" if label == above else label, text(line) if isinstance(line, str) else line
        )
        above = label or above
    return table


class FittedTable:
    """Names with their figures; where the width is too small columns are left out, never digits."""

    def __init__(
        self,
        heading: str,
        names: Sequence[str],
        columns: Mapping[str, Sequence[str]],
        *,
        room: int | None = None,
        first: Sequence[str] = (),
    ) -> None:
        """Take cells by heading.

        `room` is the names' width while a column can be left out, else their own, up to 40 letters.
        """
        self._heading, self._names, self._columns = heading, names, columns
        self._order = dict.fromkeys(
            [*first, *reversed(list(columns))]
            # in which columns are left out
        )
        self._room = (
            max(len(heading), min(max(map(len, names), default=0), _LONG_NAME))
            if room is None
            else room
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        kept = self._fitting(options.max_width)
        room = max(options.max_width - self._width(kept), 1)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column(self._heading, min_width=min(self._room, room), no_wrap=True)
        for heading in kept:
            table.add_column(heading, justify="right", overflow="fold")
        cut = shortened_name if self._heading.startswith("module") else shortened
        for name, *cells in zip(
            self._names, *(self._columns[heading] for heading in kept), strict=True
        ):
            table.add_row(
                text(cut(plain(name), max(room, min(self._room, _SHORTEST)))), *map(figure, cells)
            )
        yield table
        if left_out := [heading for heading in self._columns if heading not in kept]:
            yield prose(f"too narrow for {', '.join(left_out)} (COLUMNS=200 shows them)", "dim")

    def _fitting(self, width: int) -> list[str]:
        kept, order = list(self._columns), iter(self._order)
        while len(kept) > 1 and self._room + self._width(kept) > width:
            kept.remove(next(order))
        return kept

    def _width(self, headings: Sequence[str]) -> int:
        return sum(_GAP + max(map(len, [heading, *self._columns[heading]])) for heading in headings)

"""Draw text and tables that fit the width of a terminal, without markup or control characters."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lflops import units
from lflops.profile.module_names import plain
from lflops.report.text import shortened, shortened_name

MARGIN = 16
"""Minimum width of the column of labels in the lines above a table."""

_WITH_UNIT = re.compile(
    r"(?<=\d) (?=(?:%|[nµm]?s|[KMGT]?i?B|[kMGTP]?(?:FLOP/s|B/s)?)(?:[^\w%]|$))|(?<=±) "
)
_GAP = 2
# Names are not shortened to less than this width.
_SHORTEST = 16
_LONG_NAME = 40
_NOTHING = {"0", "0 B", "0 %", units.UNKNOWN}


def text(content: str, style: str = "") -> Text:
    """Return a rich `Text` without markup or control characters."""
    return Text(plain(content), style=style)


def figure(number: str) -> Text:
    """Return a number as a rich `Text`, which is dimmed if the number is 0 or unknown."""
    return text(number, "dim" if number in _NOTHING else "")


def too_narrow_for(left_out: str) -> str:
    """Return the remark that the terminal is too narrow for a part of a table.

    `left_out` names this part, for example "the last columns".
    """
    return f"hidden at this terminal width: {left_out} (COLUMNS=200 shows more)"


class prose:  # noqa: N801 - used like the function `text`
    """Sentences that wrap between words, but not between a number and its unit."""

    def __init__(self, content: str, style: str = "", indent: int = 0) -> None:
        """Store a text, its rich style, and the number of spaces by which lines are indented."""
        self._content = plain(content)
        self._style = style
        self._indent = " " * indent

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = len(self._indent) + len(self._content)
        return Measurement(1, width).with_maximum(options.max_width)

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


def one_line(heading: str) -> str:
    """Return a heading without its line break."""
    return heading.replace("-\n", "-").replace("\n", " ")


def margin(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Draw lines with their labels in a column on the left.

    If consecutive lines have the same label, only the first of them shows it.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    above = ""
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, line in rows:
        shown = text(line) if isinstance(line, str) else line
        table.add_row(text("" if label == above else label), shown)
        above = label or above
    return table


def prose_rows(
    rows: Iterable[tuple[str, str]],
) -> Iterator[tuple[str, RenderableType]]:
    """Yield the label and the text of each row for `margin`. The texts wrap between words."""
    for label, line in rows:
        yield label, prose(line)


class FittedTable:
    """A table with names in the first column and numbers in the other columns.

    On a narrow terminal, whole columns are left out, so that digits are never cut off.
    """

    def __init__(
        self,
        heading: str,
        names: Sequence[str],
        columns: Mapping[str, Sequence[str]],
        *,
        room: int | None = None,
        first: Sequence[str] = (),
    ) -> None:
        """Store the cells of the table.

        Args:
            heading: Heading of the column of names.
            names: The names, one for each row.
            columns: The cells of each column, keyed by its heading. A heading may contain one line
                break.
            room: Width of the column of names. On a narrow terminal, other columns are left out
                before this column becomes narrower. By default, the length of the longest name, but
                at most 40 characters.
            first: Headings of the columns that are left out first on a narrow terminal. Then the
                other columns are left out, starting with the last column.
        """
        if room is None:
            longest = max(map(len, names), default=0)
            room = max(len(heading), min(longest, _LONG_NAME))
        self._heading = heading
        self._names = names
        self._columns = columns
        self._room = room
        self._left_out_first = dict.fromkeys([*first, *reversed(list(columns))])

    @classmethod
    def of_rows(
        cls,
        heading: str,
        rows: Iterable[tuple[str, Mapping[str, str]]],
        *,
        room: int | None = None,
        first: Sequence[str] = (),
    ) -> Self:
        """Make a table from rows instead of columns.

        A row is a pair of its name and its cells, which are keyed by the heading of their column.
        """
        names = []
        columns: dict[str, list[str]] = {}
        for name, cells in rows:
            names.append(name)
            for column, cell in cells.items():
                columns.setdefault(column, []).append(cell)
        return cls(heading, names, columns, room=room, first=first)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        kept = self._fitting(options.max_width)
        room = max(options.max_width - self._width(kept), 1)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        width = min(self._room, room)
        # Rich would interpret a string as markup, and a heading can be the name of a chip.
        table.add_column(Text(self._heading), min_width=width, no_wrap=True, vertical="bottom")
        for heading in kept:
            table.add_column(Text(heading), justify="right", overflow="fold", vertical="bottom")
        cut = shortened_name if self._heading.startswith("module") else shortened
        width = max(room, min(self._room, _SHORTEST))
        cells = zip(*(self._columns[heading] for heading in kept), strict=True)
        for name, row in zip(self._names, cells, strict=True):
            table.add_row(text(cut(plain(name), width)), *map(figure, row))
        yield table
        left_out = [one_line(heading) for heading in self._columns if heading not in kept]
        if left_out:
            yield prose(too_narrow_for(", ".join(left_out)), "dim")

    def _fitting(self, width: int) -> list[str]:
        """Return the headings of the columns that are shown at this terminal width."""
        kept = list(self._columns)
        for heading in self._left_out_first:
            if len(kept) == 1 or self._room + self._width(kept) <= width:
                break
            kept.remove(heading)
        return kept

    def _width(self, headings: Sequence[str]) -> int:
        width = 0
        for heading in headings:
            width += _GAP + max(map(len, [*heading.split("\n"), *self._columns[heading]]))
        return width

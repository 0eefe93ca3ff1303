"""Text for a terminal, which anybody's names may be part of."""

from rich.table import Table
from rich.text import Text

from lflops import units

__all__ = ["MARGIN", "figure", "margin", "plain", "shortened", "text"]

MARGIN = 16
"""Of the lines above a table: what their labels have."""

_NOTHING = {"0", "0 B", "0 %", units.UNKNOWN}


def text(content: str, style: str = "") -> Text:
    """A line that is shown as it is, without markup."""
    return Text(plain(content), style=style)


def figure(number: str) -> Text:
    """A number; one that says nothing steps back."""
    return text(number, "dim" if number in _NOTHING else "")


def plain(content: str) -> str:
    """The content without control characters: a module's name does not drive the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in content)


def shortened(name: str, width: int) -> str:
    """The name's two ends, where all of it has no room."""
    if len(name) <= width:
        return name
    end = max(width - 1, 0) // 2
    return f"{name[: max(width - 1 - end, 0)]}…{name[len(name) - end :]}"


def margin() -> Table:
    """Lines with a label in the margin."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table

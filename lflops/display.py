"""Define a base class and a table that print as text and display as HTML in a notebook."""

import importlib
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple


class Displayed:
    """Base class of values such as `Profile` that print and display as a report.

    `lflops.report` is imported only when a value is displayed. An import at the top of this file
    would be circular, because the modules of `lflops.report` import the subclasses of this class.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(str(part).rstrip("\n") for part in _parts(self))

    def _repr_html_(self) -> str:
        """Return the report as HTML that needs neither scripts nor other files."""
        return "\n".join(as_html(part) for part in _parts(self))


def from_report(name: str) -> Any:
    """Return the function with this name from `lflops.report.display`."""
    return getattr(importlib.import_module("lflops.report.display"), name)


def _parts(value: Displayed) -> Sequence[Any]:
    """Return the texts and tables of a value's report."""
    parts: Sequence[Any] = from_report("parts_of")(value)
    return parts


class Table(NamedTuple):
    """A table of text cells that prints with aligned columns.

    The first two columns contain names and are aligned to the left.

    Attributes:
        head: The headings of the columns.
        rows: The cells of each row.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_aligned(line, widths) for line in lines)

    def _repr_html_(self) -> str:
        """Return the table as HTML."""
        rows = [_html_row("th", self.head)]
        rows += [_html_row("td", row) for row in self.rows]
        return f"<table>{''.join(rows)}</table>"


NAMES = 2
"""Number of columns that contain names: the first two."""


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = []
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if place < NAMES:
            parts.append(cell.ljust(width))
        else:
            parts.append(cell.rjust(width))
    return "  ".join(parts).rstrip()


def _html_row(tag: str, cells: Sequence[str]) -> str:
    parts = []
    for place, cell in enumerate(cells):
        side = "left" if place < NAMES else "right"
        # Leading spaces must stay visible: they show the depth of a module in the tree.
        parts.append(f'<{tag} style="text-align:{side};white-space:pre">{escape(cell)}</{tag}>')
    return f"<tr>{''.join(parts)}</tr>"


def as_html(part: Any) -> str:
    """Return a part of a report as HTML: a table, or text with its line breaks."""
    if isinstance(part, Table):
        return part._repr_html_()
    return f'<pre style="white-space:pre-wrap">{escape(str(part))}</pre>'

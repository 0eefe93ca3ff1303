"""Draw the first screen of a run on a terminal."""

from collections.abc import Iterable

from rich.console import RenderableType

from lflops.report.terminal.tables import margin, prose_rows


def render_rows(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Draw the lines of a first screen, each with its label in the margin."""
    return margin(prose_rows(rows))

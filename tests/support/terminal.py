"""Render a profile or another object as on a terminal without colors."""

from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

from lflops.analysis.analysis import analyze
from lflops.profile.profile import Profile
from lflops.report.terminal.modules import render


def drawn(given: Profile, width: int = 100, **options: Any) -> list[str]:
    """Return the lines of a profile's report."""
    return printed(render(analyze(given), **options), width)


def printed(content: RenderableType, width: int = 100) -> list[str]:
    """Return the lines of anything that rich can print."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(content)
    file = console.file
    assert isinstance(file, StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]

"""A profile as a terminal shows it."""

from io import StringIO
from typing import Any

from rich.console import Console

from lflops.profile.model import Profile
from lflops.report.terminal.modules import render


def drawn(given: Profile, width: int = 100, **options: Any) -> list[str]:
    """The lines on a terminal without colours."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(render(given, **options))
    file = console.file
    assert isinstance(file, StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]

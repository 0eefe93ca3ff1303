"""Print the output of the commands: tables, lines of text, and JSON.

Tables are as wide as the terminal and use its colours.
"""

import os
import sys
from collections.abc import Iterable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import typer
from msgspec import json
from rich.console import Console, RenderableType

from lflops.extras import needed
from lflops.profile.profile import Profile

WIDTH = 120
"""Width in characters of output that does not go to a terminal, unless COLUMNS is set."""

BYTES = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
"""Units of sizes that a user can pass, and the number of bytes in each unit."""

# The error that typer raises on wrong usage. Typer does not export this base class by name, and the
# package that defines it depends on the version of typer.
UsageError: Any = typer.BadParameter.__bases__[0]


def draw(content: RenderableType) -> None:
    """Print a rich renderable, such as a table.

    The output is as wide as the terminal and uses its colours. If stdout is not a terminal, the
    output is plain text.
    """
    drawn = BytesIO()
    file = TextIOWrapper(drawn, encoding=sys.stdout.encoding, errors="replace", newline="\n")
    options: dict[str, Any] = {"force_terminal": True}
    if not sys.stdout.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() else 0
        options = {"force_terminal": False, "color_system": None, "width": width or WIDTH}
    # Names from a file may look like the markup of rich, but are printed unchanged.
    Console(file=file, markup=False, emoji=False, **options).print(content)
    file.flush()
    _write(b"\n".join(line.rstrip() for line in drawn.getvalue().split(b"\n")))


def save_memory(profile: Profile, figure: Path | None) -> None:
    """Draw the live memory over a step into the file `figure`. If it is `None`, do nothing.

    The suffix of the file determines the format.
    """
    if figure is not None:
        needed("save_memory_figure", "a figure")(profile, figure)


def name_file(path: Path | None, *, as_json: bool) -> None:
    """Print the path of a file that a command has written. If `path` is `None`, do nothing.

    If the command prints JSON to stdout, the path goes to stderr.
    """
    if path is not None:
        typer.echo(path, err=as_json)


def write_lines(lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    _write(text.encode(sys.stdout.encoding or "utf-8", "replace"))


def write_json(value: object) -> None:
    _write(json.format(json.encode(value)) + b"\n")


def _write(content: bytes) -> None:
    # A program that calls `main` may have printed text that is still in the buffer of `sys.stdout`.
    sys.stdout.flush()
    sys.stdout.buffer.write(content)

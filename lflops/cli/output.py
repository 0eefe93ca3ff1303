"""What every command writes through.

Tables in the terminal's width and colours, JSON, and the error of a wrong call.
"""

import os
import sys
from collections.abc import Iterable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import typer
from msgspec import json, toml
from rich.console import Console, RenderableType

from lflops.extras import needed
from lflops.profile.profile import Profile

# of what is not a terminal, unless COLUMNS says another
WIDTH = 120

BYTES = {"B": 1} | {
    f"{prefix}B": 1000**power
    for power, prefix in enumerate("kMGT", 1)
    # by the units of a size
}
BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}

# What typer raises on wrong usage: it exports no other of these by name, and which package they
# live in depends on its version.
UsageError: Any = typer.BadParameter.__bases__[0]


def help_of(command: str) -> dict[str, str]:
    """Read the help of a command's options, by its arguments' names, from the table next to its file."""
    return toml.decode(Path(command).with_suffix(".toml").read_bytes(), type=dict[str, str])


def draw(content: RenderableType) -> None:
    """On a terminal in its width and colours; elsewhere plain."""
    drawn = BytesIO()
    file = TextIOWrapper(drawn, encoding=sys.stdout.encoding, errors="replace", newline="\n")
    if sys.stdout.isatty():
        console = Console(file=file, force_terminal=True)
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else WIDTH
        console = Console(file=file, force_terminal=False, color_system=None, width=width)
    console.print(content)
    file.flush()
    _write(b"\n".join(line.rstrip() for line in drawn.getvalue().split(b"\n")))


def save_memory(profile: Profile, figure: Path | None) -> None:
    """Draw live memory over a step, in the format of the file's ending."""
    if figure is not None:
        needed("save_memory_figure", "a figure")(profile, figure)


def name_file(path: Path | None, *, as_json: bool) -> None:
    """Say which file was written, if one was; on stderr where stdout is JSON."""
    if path is not None:
        typer.echo(path, err=as_json)


def write_lines(lines: Iterable[str]) -> None:
    _write("".join(f"{line}\n" for line in lines).encode(sys.stdout.encoding or "utf-8", "replace"))


def write_json(value: object) -> None:
    _write(json.format(json.encode(value)) + b"\n")


def _write(content: bytes) -> None:
    # what a program that calls our `main` has printed comes first
    sys.stdout.flush()
    sys.stdout.buffer.write(content)

"""`lflops why`: explain why a training run is slow."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError, draw, write_json, write_lines
from lflops.report.explanation import explain, lines_of, markdown
from lflops.report.terminal.tables import margin, prose

FORMATS = ("text", "markdown", "json")

_FORMAT = (
    "Format of the output: text, markdown (for an issue or a chat) or json. json is one object "
    "with the keys status, findings, measured, modules, ranks, run (the seconds of the run by "
    "category) and more (commands that print more). Each finding has its cause, module, rank and "
    "fix, and its cost in seconds and as a share of a step. Unknown values are null."
)


def why(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR", help="A profile's JSON file, or the folder of a training run."
        ),
    ],
    *,
    form: Annotated[str, typer.Option("--format", metavar="NAME", help=_FORMAT)] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print why a training run is slow, how much time each cause costs, and what to do next."""
    if as_json:
        form = "json"
    if form not in FORMATS:
        raise UsageError(f"format={form!r}: pass one of {', '.join(FORMATS)}")
    found = explain(path)
    if form == "json":
        write_json(found)
    elif form == "markdown":
        write_lines(markdown(found))
    else:
        _print_lines(list(lines_of(found)))


def _print_lines(rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a label and a text.

    On a terminal, the texts wrap at its width. Otherwise, each text stays on one line, which is
    easier to search.
    """
    if sys.stdout.isatty():
        draw(margin((label, prose(text)) for label, text in rows))
    else:
        write_lines(f"{label:<12}{text}" for label, text in rows)

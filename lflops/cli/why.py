"""`lflops why`: what a run is slow for, and what to do next."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError, help_of, write_json, write_lines
from lflops.report.explanation import explain, lines_of, markdown

HELP = help_of(__file__)

FORMATS = ("text", "markdown", "json")


def why(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help=HELP["path"])],
    *,
    form: Annotated[str, typer.Option("--format", metavar="NAME", help=HELP["form"])] = "text",
) -> None:
    """Print what a training is slow for, what that costs, and what to do next."""
    if form not in FORMATS:
        raise UsageError(f"format={form!r}: give one of {', '.join(FORMATS)}")
    found = explain(path)
    if form == "json":
        write_json(found)
    else:
        write_lines(markdown(found) if form == "markdown" else (f"{label:<9}{text}" for label, text in lines_of(found)))

"""`lflops trace`: the traces of a window."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.commands.output import write_json
from lflops.traces.merge import MERGED
from lflops.traces.merge import merge as merge_traces

__all__ = ["trace"]

trace = typer.Typer(rich_markup_mode=None, help="Traces of a run of several ranks.")


@trace.command()
def merge(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Has the ranks' traces of one window, *.pt.trace.json or *.pt.trace.json.gz.")
    ],
    *,
    into: Annotated[Path | None, typer.Option(metavar="FILE", help=f"What to write; without it, {MERGED} in the same folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: file, ranks (a list) and events (their number).")] = False,
) -> None:
    """Make one Chrome trace of several ranks', each rank under its name and all on one clock."""
    merged = merge_traces(folder, into)
    if as_json:
        write_json(merged)
    else:
        typer.echo(f"{merged.file}: {len(merged.ranks)} traces, {merged.events} events")

"""`lflops trace`: the traces of a window."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import write_json
from lflops.traces.convert import compat as copy_of
from lflops.traces.files import traces_in
from lflops.traces.merge import MERGED
from lflops.traces.merge import merge as merge_traces

__all__ = ["trace"]

trace = typer.Typer(rich_markup_mode=None, help="Traces of a window: those of several ranks as one, or copies for torch-tb-profiler.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Has the ranks' traces of one window, *.pt.trace.json or *.pt.trace.json.gz.")]


@trace.command()
def merge(
    folder: Folder,
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


@trace.command()
def compat(
    folder: Folder,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: files (a list of the copies).")] = False,
) -> None:
    """Copy traces for torch-tb-profiler 0.4.3 into the folder compat-DIR beside DIR; where it is installed the callback does so itself."""
    files = [str(copy_of(each)) for each in traces_in(folder)]
    if as_json:
        write_json({"files": files})
    else:
        typer.echo("\n".join(files))

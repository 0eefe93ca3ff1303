"""`lflops window`: a close look at a run that goes on."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError, write_lines
from lflops.ledger.run import REQUEST, load_run, newest_file


def window(directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a running training, or one above it.")]) -> None:
    """Ask a running training for a window. It opens at the next step that all ranks can meet, and its profile comes to the run's folder."""
    ended = load_run(directory).starts[-1].ended
    if ended != "running":
        raise UsageError(f"{directory}: the run there is not going on: {ended}")
    folder = newest_file(directory).parent
    (folder / REQUEST).touch()
    write_lines([f"asked for a window: its profile comes to {folder}"])

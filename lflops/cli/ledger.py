"""`lflops ledger`: where the time of a run went."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import write_json, write_lines
from lflops.ledger.run import load_run
from lflops.report.lines.ledger import ledger_lines


def ledger(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or one above it.")],
    *,
    rank: Annotated[int, typer.Option(metavar="N", help="The process whose account it is.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: seconds by category, slow_steps, starts and spans. Unknown is null.")
    ] = False,
) -> None:
    """Print every second of the last run in a folder by category, over its restarts, and its slow steps with their causes."""
    account = load_run(directory, rank)
    if as_json:
        write_json(account)
    else:
        write_lines(ledger_lines(account))

"""`lflops ledger`: where the time of a run went."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError, help_of, write_json, write_lines
from lflops.ledger.run import load_run
from lflops.report.html import page_of_data, write
from lflops.report.lines.ledger import ledger_lines
from lflops.report.payload.run import run_shown

HELP = help_of(__file__)


def ledger(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help=HELP["directory"])],
    *,
    rank: Annotated[int, typer.Option(metavar="N", help=HELP["rank"])] = 0,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
    page: Annotated[Path | None, typer.Option("--html", metavar="OUT", help=HELP["page"])] = None,
) -> None:
    """Print every second of the last run in a folder by category, over its restarts, and its slow steps with their causes."""
    account = load_run(directory, rank)
    if as_json and page is not None:
        raise UsageError(f"html={str(page)!r}: --json writes no page, give one of the two")
    if as_json:
        write_json(account)
    elif page is not None:
        shown = run_shown(account)
        write(page_of_data(f"Run: {shown.title}", shown, "entry/ledger"), page)
        typer.echo(page)
    else:
        write_lines(ledger_lines(account))

"""`lflops run`: a script as Python runs it, with every training in it watched.

`ledger` and `window` are of its folder.
"""

import os
import secrets
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError, help_of, write_json, write_lines
from lflops.integrations.auto_detect.entry import VARIABLE, settings_line
from lflops.ledger.run import REQUEST, load_run, newest_file
from lflops.report.html import page_of_data, write
from lflops.report.ledger import ledger_lines
from lflops.report.payload.payload import ledger_shown

HELP = help_of(__file__)


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help=HELP["command"])
    ],
    *,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help=HELP["folder"])
    ] = None,
) -> None:
    """Run a Python script, and keep the ledger of every training in it.

    Lightning, transformers, or its own loop.

    Python runs the script itself, with the variable LFLOPS set. If something cost time, five lines
    at the end say what.
    """
    if not entry_points(group="torch.backends", name="lflops"):
        raise UsageError(
            f"lflops is not installed for {sys.executable}, so torch does not load it: pip install lflops"
        )
    settings = settings_line()
    if folder is not None or "dirpath" not in (settings or ""):
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        where = (folder or Path("lflops_runs", name)).absolute()
        settings = ",".join(filter(None, [settings, f"dirpath={where}"]))
    os.environ[VARIABLE] = settings or "1"
    is_python = (
        command[0].startswith("-") or command[0].endswith(".py") or Path(command[0]).exists()
    )
    arguments = [sys.executable, *command] if is_python else command
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - what the user asks for
    except OSError as error:
        raise UsageError(
            f"{arguments[0]}: {error.strerror}: give a Python script, or a command"
        ) from error


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
        shown = ledger_shown(account)
        write(page_of_data(f"Run: {shown.title}", shown, "entry/ledger"), page)
        typer.echo(page)
    else:
        write_lines(ledger_lines(account))


def window(running: Annotated[Path, typer.Argument(metavar="DIR", help=HELP["running"])]) -> None:
    """Ask a running training for a window.

    It opens at the next step that all ranks can meet, and its profile comes to the run's folder.
    """
    ended = load_run(running).starts[-1].ended
    if ended != "running":
        raise UsageError(f"{running}: the run there is not going on: {ended}")
    folder = newest_file(running).parent
    (folder / REQUEST).touch()
    write_lines([f"asked for a window: its profile comes to {folder}"])

"""`lflops run`: a script as Python runs it, with every training in it watched."""

import os
import secrets
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.output import UsageError
from lflops.watch.entry import VARIABLE, settings_line


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="As after `python`; or a command, as torchrun.")],
    *,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="For the ledger. By default a new folder below lflops_runs.")
    ] = None,
) -> None:
    """Run a Python script, and keep the ledger of every training in it: Lightning, transformers, or its own loop.

    Python runs the script itself, with the variable LFLOPS set. If something cost time, five lines at the end say what.
    """
    if not entry_points(group="torch.backends", name="lflops"):
        raise UsageError(f"lflops is not installed for {sys.executable}, so torch does not load it: pip install lflops")
    settings = settings_line()
    if folder is not None or "dirpath" not in (settings or ""):
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        where = (folder or Path("lflops_runs", name)).absolute()
        settings = ",".join(filter(None, [settings, f"dirpath={where}"]))
    os.environ[VARIABLE] = settings or "1"
    is_python = command[0].startswith("-") or command[0].endswith(".py") or Path(command[0]).exists()
    arguments = [sys.executable, *command] if is_python else command
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - what the user asks for
    except OSError as error:
        raise UsageError(f"{arguments[0]}: {error.strerror}: give a Python script, or a command") from error

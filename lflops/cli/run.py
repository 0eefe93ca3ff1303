"""`lflops run`, `ledger` and `window`: run a script with lflops, and use the folder of its run.

The ledger is the time account of the run. A window is a few steps that lflops profiles.
"""

import os
import secrets
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from lflops.analysis.analysis import analyze
from lflops.cli.output import UsageError, write_json, write_lines
from lflops.files import open_file, write_whole
from lflops.integrations.auto_detect.entry import VARIABLE, settings_line
from lflops.ledger.ledger_file import REQUEST, load_run, newest_file
from lflops.profile.json_file import load
from lflops.report.explanation import last_window
from lflops.report.first_screen.window import window_summary
from lflops.report.html import page_of_data, write
from lflops.report.ledger import headline, ledger_lines
from lflops.report.payload.payload import run_shown


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENT]...",
            help="A Python script, or a command such as torchrun, followed by its arguments.",
        ),
    ],
    *,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Folder to write the ledger to. Default: a new folder in lflops_runs.",
        ),
    ] = None,
) -> None:
    """Run a Python script, and write a ledger (a time account) of each training run in the script.

    The script may use Lightning, transformers, or a custom loop.

    lflops sets the environment variable LFLOPS and starts the script with Python. At the end of
    the run, lflops prints the folder of the ledger. If the run lost time, lflops also prints why.
    """
    if not entry_points(group="torch.backends", name="lflops"):
        raise UsageError(
            f"lflops is not installed for {sys.executable}, so the processes that it starts cannot "
            "import lflops: install "
            "it with pip install lflops"
        )
    os.environ[VARIABLE] = _settings(folder) or "1"
    program = command[0]
    is_python = program.startswith("-") or program.endswith(".py") or _is_script(Path(program))
    arguments = [sys.executable, *command] if is_python else command
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - the user's command
    except OSError as error:
        raise UsageError(
            f"cannot start {arguments[0]}: {error.strerror}: pass a Python script or a command"
        ) from error


def _is_script(path: Path) -> bool:
    """Return whether Python can run a path: a package, or a file that no other program runs."""
    if not path.is_file():
        return (path / "__main__.py").is_file()
    with open_file(path) as file:
        first_line = file.readline(256)
    if first_line.startswith(b"#!"):
        return b"python" in first_line
    return not first_line.startswith(b"\x7fELF")


def _settings(folder: Path | None) -> str | None:
    """Return the value of the environment variable LFLOPS for the script.

    The value contains the user's settings and the folder of the ledger. If `folder` is `None`, the
    folder of the ledger is the folder in the user's settings or, without one, a new folder.

    Raises:
        LflopsError: The user's settings are invalid.
    """
    settings = settings_line()
    if settings:
        # Imported here because it imports torch, which takes seconds.
        from lflops.monitoring.inputs.settings import settings_of

        # An invalid setting is an error here. In the run, it would only be a warning.
        settings_of(settings)
    if folder is None and settings is not None and "dirpath" in settings:
        return settings
    if folder is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = Path("lflops_runs", name)
    # The path is quoted because commas separate settings, and spaces around a value are dropped.
    dirpath = f"dirpath={quote(os.fsencode(folder.absolute()))}"
    return f"{settings},{dirpath}" if settings else dirpath


def ledger(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder of a training run, or a folder above it."),
    ],
    *,
    rank: Annotated[int, typer.Option(metavar="N", help="The rank to show.")] = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object. It has the seconds by category, slow_steps, starts (an "
            "entry for each start of the run) and spans (consecutive sections of the run). Unknown "
            "values are null.",
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="OUT", help="Write an HTML page to this file. It opens offline."
        ),
    ] = None,
) -> None:
    """Print where the time of the last run in a folder went, and which steps were slow and why.

    Time that was lost in restarts is included.
    """
    account = load_run(directory, rank)
    if as_json and page is not None:
        raise UsageError(
            f"html={str(page)!r}: --json writes no HTML file, so pass only one of --html and --json"
        )
    if as_json:
        write_json(account)
    elif page is not None:
        window_file = last_window(directory)
        summary = None
        if window_file is not None:
            summary = window_summary(analyze(load(window_file)))
        shown = run_shown(summary, account)
        write(page_of_data(f"Run: {headline(account)}", shown, "entry/ledger"), page)
        typer.echo(page)
    else:
        write_lines(ledger_lines(account))


def window(
    running: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder of a training that is running, or a folder above it."
        ),
    ],
) -> None:
    """Request a window, which is a few profiled steps, from a training that is running.

    The window opens at the same step on all ranks, as soon as possible. Its profile is written to
    the run's folder.
    """
    ended = load_run(running).starts[-1].ended
    if ended != "running":
        raise UsageError(
            f"{running}: this run has ended ({ended}), so it cannot be profiled: pass the folder "
            "of a training that is running"
        )
    folder = newest_file(running).parent
    write_whole(folder / REQUEST, b"")
    write_lines([f"requested a profiling window: its profile will be written to {folder}"])

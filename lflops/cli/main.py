"""Define the command line and run it.

Exit status 0 means success, and 1 means that a limit is violated or a self-test failed. 2 means
wrong
usage, or a file that cannot be read or written; a one-line error message is then printed.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from lflops.cli.diff import diff
from lflops.cli.estimate import estimate
from lflops.cli.hardware import hardware, roofline, selftest
from lflops.cli.output import UsageError, write_json
from lflops.cli.run import ledger, run, window
from lflops.cli.show import html, show
from lflops.cli.what_if import what_if
from lflops.cli.why import why
from lflops.errors import LflopsError
from lflops.extras import offered
from lflops.profile.json_file import json_schema
from lflops.profile.module_names import plain
from lflops.report.explanation import FORMAT, Explanation
from lflops.version import __version__


def schema(
    *,
    of_why: Annotated[
        bool,
        typer.Option("--why", help="Print the schema of the output of `lflops why --format json`."),
    ] = False,
) -> None:
    """Print the JSON schema of a profile's file."""
    if of_why:
        write_json(
            json_schema(Explanation, f"Output of lflops why --format json, version {FORMAT}")
        )
    else:
        write_json(json_schema())


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    show,
    why,
    what_if,
    diff,
    html,
    estimate,
    roofline,
    hardware,
    ledger,
    window,
    selftest,
    schema,
):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    run
)
for add_commands in offered("add_commands", "the command line"):
    add_commands(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    By default, `args` are the arguments of the process.
    """
    try:
        status = typer.main.get_command(app).main(args, prog_name="lflops", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        # Writing failed; a failed read raises a `ProfileError` instead. Discard the rest of the
        # buffer of stdout, so that writing it does not fail again while Python shuts down.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        return _refused(f"cannot write the output: {error.strerror}")
    except UsageError as error:
        command_path = error.ctx.command_path if error.ctx else "lflops"
        return _refused(f"{error.format_message()} ({command_path} --help)")
    except LflopsError as error:
        return _refused(str(error))
    return status or 0


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"lflops {__version__}")
        raise typer.Exit


@app.callback()
def lflops(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Show where the time, FLOPs and memory of a PyTorch training step go, module by module."""


def _refused(reason: str) -> int:
    # The reason may contain text from a file of another user, and therefore control characters.
    typer.echo(f"lflops: {plain(' '.join(reason.split()))}", err=True)
    return 2

"""The shell: `lflops show`, `lflops hardware`. Exit status 0 is fine, 2 is wrong usage or an unreadable file: one line says which."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import json
from rich.console import Console, RenderableType

from lflops.analyze.operators import operators
from lflops.analyze.pace import pace
from lflops.analyze.tree import SORT_KEYS, flat, ledger, share_of, totals, tree
from lflops.analyze.utilization import utilization
from lflops.errors import HardwareError, LflopsError
from lflops.hardware import chips, lookup, unknown
from lflops.profile import PHASES, Phase, Profile
from lflops.profile_file import load
from lflops.report.hardware import figures, listing
from lflops.report.operators import render_operators
from lflops.report.table import render

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

WIDTH = 120
"""Of what is not a terminal, unless COLUMNS says another."""

# What typer raises on wrong usage: it exports no other of these by name, and which package they live in depends on its version.
UsageError: Any = typer.BadParameter.__bases__[0]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        args: What stands after `lflops`; `None` takes it from the shell.

    Returns:
        The exit status.
    """
    try:
        status = typer.main.get_command(app).main(args, prog_name="lflops", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:  # of writing: what reads has errors of its own
        # What is left in the buffer must not fail once more while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if isinstance(error, BrokenPipeError) else _refused(f"cannot write: {error.strerror}")
    except UsageError as error:
        return _refused(f"{error.format_message()} (lflops --help)")
    except LflopsError as error:
        return _refused(str(error))
    return status or 0


def _print_version(*, wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"lflops {version('lflops')}")
        except PackageNotFoundError:
            typer.echo("lflops, not installed")
        raise typer.Exit


@app.callback()
def lflops(
    *, _version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")] = False
) -> None:
    """Where the FLOPs and bytes of a PyTorch training step go, module by module."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile's JSON file.")],
    *,
    depth: Annotated[int, typer.Option(metavar="N", help="How many levels of the tree below the root; -1 is all.")] = -1,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help=f"Order the rows by {', '.join(SORT_KEYS)}: the most in the phase shown first, names from A to Z."
        ),
    ] = None,
    own: Annotated[bool, typer.Option("--flat", help="No tree: every module by its own work, the most MACs first.")] = False,
    by_operator: Annotated[bool, typer.Option("--operators", help="No modules: every operator, the most MACs first.")] = False,
    phase: Annotated[
        str, typer.Option(metavar="NAME", help=f"What the shares, the FLOPs and the bytes are of: {', '.join(PHASES)}, or all.")
    ] = "forward",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: run, phase, pace (of the clean steps), utilization, share_of (macs, or flops where the phase has "
            "no MACs), totals (by phase), rows (nested by children, with the exact counts and the seconds of each phase; or operators), "
            "uncounted (operators without a formula), uncalled (modules) and notes. A row with a repeat holds the figures of one of its "
            "names, and the mean of the times of all. Unknown is null.",
        ),
    ] = False,
) -> None:
    """Print a profile: totals, what they leave out, and its modules."""
    if phase not in (*PHASES, "all"):
        raise UsageError(f"phase={phase!r}: give one of {', '.join(PHASES)}, or all")
    if own and depth != -1:
        raise UsageError(f"depth={depth}: --flat has no depth, give one of the two")
    if by_operator and (own or depth != -1 or sort):
        raise UsageError("--operators goes with --phase and --json, not with --depth, --sort or --flat")
    profile = load(file)
    chosen = next((each for each in PHASES if each == phase), None)
    try:
        if by_operator:
            _write(_as_json(profile, chosen, operators=operators(profile, chosen))) if as_json else _draw(render_operators(profile, chosen))
        elif as_json:
            rows = flat(profile, sort=sort, phase=chosen) if own else tree(profile, depth=depth, sort=sort, phase=chosen)
            _write(_as_json(profile, chosen, rows=rows))
        else:
            _draw(render(profile, depth=depth, sort=sort, own=own, phase=chosen))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RecursionError as error:
        raise UsageError("the modules are nested too deeply for a tree: give --depth or --flat") from error


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A chip, as its driver or the list names it.")] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Measure what this machine reaches, beside the chip's figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: chips (a list) and measured (or null).")] = False,
) -> None:
    """List the chips whose peaks are known, print one of them, or measure this machine."""
    chip = None if name is None else lookup(name)
    if name is not None and chip is None:
        raise HardwareError(f"{unknown(name)}: lflops hardware lists the chips, lflops hardware --measure measures this machine")
    measured = None
    if measure:
        from lflops.collect.calibrate import calibrate  # with torch, which no other part of the shell waits for

        measured = calibrate(fresh=True)
        chip = chip or lookup(measured.name)
    everything = name is None and measured is None
    if as_json:
        shown = [each for of_vendor in chips().values() for each in of_vendor] if everything else [chip] if chip else []
        _write(json.format(json.encode({"chips": shown, "measured": measured})) + b"\n")
    else:
        _draw(listing(chips()) if everything else figures(chip, measured))


def _as_json(profile: Profile, phase: Phase | None, **listed: object) -> bytes:
    shown = {
        "schema_version": profile.schema_version,
        "run": profile.run,
        "phase": phase or "all",
        "pace": pace(profile),
        "utilization": utilization(profile),
        "share_of": share_of(profile, phase),
        "totals": totals(profile),
        **listed,
        "uncounted": ledger(profile),
        "uncalled": profile.uncalled,
        "notes": profile.notes,
    }
    return json.format(json.encode(shown)) + b"\n"


def _draw(content: RenderableType) -> None:
    """On a terminal in its width and colours; elsewhere plain."""
    drawn = BytesIO()
    file = TextIOWrapper(drawn, encoding=sys.stdout.encoding, errors="replace", newline="\n")
    if sys.stdout.isatty():
        console = Console(file=file, force_terminal=True)
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else WIDTH
        console = Console(file=file, force_terminal=False, color_system=None, width=width)
    console.print(content)
    file.flush()
    _write(b"\n".join(line.rstrip() for line in drawn.getvalue().split(b"\n")))


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)


def _refused(reason: str) -> int:
    """One line, whatever the reason holds."""
    typer.echo(f"lflops: {' '.join(reason.split())}", err=True)
    return 2

"""`lflops why` and `lflops what-if`.

What a training is slow for, and what a step would take after a change.
"""

from pathlib import Path
from typing import Annotated

import typer

from lflops import units
from lflops.analysis.analysis import analyze
from lflops.analysis.what_if import what_if as answer
from lflops.cli.output import UsageError, help_of, write_json, write_lines
from lflops.report.explanation import explain, lines_of, markdown, profile_at
from lflops.report.report import report_of

HELP = help_of(__file__)

FORMATS = ("text", "markdown", "json")


def why(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help=HELP["path"])],
    *,
    form: Annotated[str, typer.Option("--format", metavar="NAME", help=HELP["form"])] = "text",
) -> None:
    """Print what a training is slow for, what that costs, and what to do next."""
    if form not in FORMATS:
        raise UsageError(f"format={form!r}: give one of {', '.join(FORMATS)}")
    found = explain(path)
    if form == "json":
        write_json(found)
    else:
        write_lines(
            markdown(found)
            if form == "markdown"
            else (f"{label:<9}{text}" for label, text in lines_of(found))
        )


def what_if(
    file: Annotated[Path, typer.Argument(metavar="FILE|DIR", help=HELP["file"])],
    *,
    without: Annotated[list[str] | None, typer.Option(metavar="NAME", help=HELP["without"])] = None,
    scale: Annotated[list[str] | None, typer.Option(metavar="NAME=N", help=HELP["scale"])] = None,
    batch: Annotated[float, typer.Option(metavar="N", help=HELP["batch"])] = 1.0,
    accumulation: Annotated[
        int | None, typer.Option(metavar="N", help=HELP["accumulation"])
    ] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["hardware"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Answer what a measured step would take without something, or with more or less of it."""
    factors = dict(map(_factor, scale or ()))
    profile = profile_at(file)
    found = answer(
        profile,
        without=without or (),
        scale=factors,
        batch=batch,
        accumulation=accumulation,
        hardware=hardware,
    )
    if as_json:
        return write_json(found)
    seconds, low, high, measured = map(
        units.duration, (found.seconds, found.low, found.high, found.measured)
    )
    why = (
        ["the device waits for the host, and how this changes that is unknown"]
        if "idle" in found.doubts
        else []
    )
    why += (
        [report_of(analyze(profile)).verdict.trust] if {"busy", "modules"} & {*found.doubts} else []
    )
    doubt = [f"these times are no measure: {'; '.join(why)}"] if why else []
    return write_lines(
        [f"about {seconds} a step ({low} to {high}), in place of {measured}", *doubt]
    )


def _factor(given: str) -> tuple[str, float]:
    name, _, number = given.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise UsageError(
            f"--scale {given}: give a name and how many times as long it takes, as data=0.5"
        ) from None

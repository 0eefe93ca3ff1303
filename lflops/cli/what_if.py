"""`lflops what-if`: predict the step time after a change, such as a larger batch."""

from pathlib import Path
from typing import Annotated

import typer

from lflops import units
from lflops.analysis.analysis import analyze
from lflops.analysis.what_if import WhatIf, what_if as predict_step
from lflops.cli.output import UsageError, write_json, write_lines
from lflops.profile.profile import Profile
from lflops.report.explanation import profile_at
from lflops.report.summary_facts import report_of


def what_if(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="A profile's JSON file with step times, or the folder of a training run. From a "
            "folder, the profile of the last window is read.",
        ),
    ],
    *,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Remove a part of the step: a phase such as data, a module, recompute or "
            "communication (only its exposed part). May be repeated.",
        ),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="Multiply the time of a phase or module by a factor. For example, layers.0=0.5 "
            "makes layers.0 twice as fast. May be repeated.",
        ),
    ] = None,
    batch: Annotated[
        float, typer.Option(metavar="N", help="Multiply the batch size by this factor.")
    ] = 1.0,
    accumulation: Annotated[
        int | None,
        typer.Option(metavar="N", help="Accumulate gradients over N batches in each step."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Predict the step time on another chip. `lflops hardware` lists the names.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with measured (the measured step time), seconds (the "
            "predicted step time), low and high (the interval of the prediction), phases (the "
            "seconds of each phase) and caveats.",
        ),
    ] = False,
) -> None:
    """Predict the step time after a change, such as a faster module or a larger batch."""
    factors = dict(_factor(given) for given in scale or ())
    profile = profile_at(file)
    found = predict_step(
        profile,
        without=without or (),
        scale=factors,
        batch=batch,
        accumulation=accumulation,
        hardware=hardware,
    )
    if as_json:
        write_json(found)
        return
    seconds = units.duration(found.seconds)
    interval = f"{units.duration(found.low)} to {units.duration(found.high)}"
    lines = [f"about {seconds} per step ({interval}), instead of {units.duration(found.measured)}"]
    caveats = _caveats(found, profile)
    if caveats:
        lines.append(f"this prediction is unreliable: {'; '.join(caveats)}")
    write_lines(lines)


def _caveats(found: WhatIf, profile: Profile) -> list[str]:
    caveats = []
    if "idle" in found.caveats:
        caveats.append(
            "the device waits for the host, and the effect of the change on this wait is unknown"
        )
    if "busy" in found.caveats or "modules" in found.caveats:
        caveats.append(report_of(analyze(profile)).verdict.confidence)
    return caveats


def _factor(given: str) -> tuple[str, float]:
    name, _, number = given.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise UsageError(
            f"--scale {given}: pass the name of a phase or module and a factor for its time, such "
            "as data=0.5"
        ) from None

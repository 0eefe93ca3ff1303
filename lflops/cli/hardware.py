"""`lflops hardware`: what chips can do, and what this machine does."""

from typing import Annotated

import typer

from lflops.cli.output import draw, write_json
from lflops.errors import HardwareError
from lflops.hardware.chips import chips, lookup, unknown
from lflops.report.terminal.hardware import figures, listing

__all__ = ["hardware"]


def hardware(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A chip, as its driver or the list names it.")] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine, and compare it with the chip's figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: chips (a list) and measured (or null).")] = False,
) -> None:
    """List the chips whose peaks are known, print one of them, or measure this machine."""
    chip = None if name is None else lookup(name)
    if name is not None and chip is None:
        raise HardwareError(f"{unknown(name)}: lflops hardware lists the chips, lflops hardware --measure measures this machine")
    measured = None
    if measure:
        from lflops.collect.calibration.calibrate import calibrate  # with torch, which no other part of the shell waits for

        measured = calibrate(fresh=True)
        chip = chip or lookup(measured.name)
    everything = name is None and measured is None
    if as_json:
        shown = [each for of_vendor in chips().values() for each in of_vendor] if everything else [chip] if chip else []
        write_json({"chips": shown, "measured": measured})
    else:
        draw(listing(chips()) if everything else figures(chip, measured))

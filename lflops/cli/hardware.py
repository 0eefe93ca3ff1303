"""`lflops hardware`: what chips can do, and what this machine does."""

from typing import Annotated

import typer

from lflops.cli.output import UsageError, draw, name_file, write_json
from lflops.errors import HardwareError
from lflops.hardware.chips import check_new, chips, lookup, named, save, unknown
from lflops.report.terminal.hardware import figures, listing


def hardware(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A chip, as its driver or the list names it; or a TOML file with one chip.")
    ] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine, and compare it with the chip's figures.")] = False,
    save_as: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="With --measure: add the figures to your table of chips under this name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: chips (a list) and measured (or null).")] = False,
) -> None:
    """List the chips whose peaks are known, print one of them, or measure this machine."""
    if save_as is not None and not measure:
        raise UsageError("--save adds what --measure measures: give both")
    if save_as is not None:
        check_new(save_as)
    chip = None if name is None else named(name) if name.endswith(".toml") else lookup(name)
    if name is not None and chip is None:
        raise HardwareError(f"{unknown(name)}: lflops hardware lists the chips, lflops hardware --measure measures this machine")
    measured = saved_in = None
    if measure:
        from lflops.collect.calibration.calibrate import calibrate  # with torch, which no other part of the shell waits for

        measured = calibrate(fresh=True)
        chip = chip or lookup(measured.name)
        saved_in = None if save_as is None else save(save_as, measured)
    everything = name is None and measured is None
    if as_json:
        shown = [each for of_vendor in chips().values() for each in of_vendor] if everything else [chip] if chip else []
        write_json({"chips": shown, "measured": measured})
    else:
        draw(listing(chips()) if everything else figures(chip, measured))
    name_file(saved_in, as_json=as_json)

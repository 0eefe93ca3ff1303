"""`lflops hardware`: what chips can do, and what this machine does."""

from typing import Annotated

import typer

from lflops.cli.output import UsageError, draw, help_of, name_file, write_json
from lflops.errors import HardwareError
from lflops.hardware.chips import check_new, chips, lookup, named, save, unknown
from lflops.report.terminal.hardware import figures, listing

HELP = help_of(__file__)


def hardware(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=HELP["name"])] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help=HELP["measure"])] = False,
    save_as: Annotated[str | None, typer.Option("--save", metavar="NAME", help=HELP["save_as"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
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
        from lflops.collect.calibration.calibrate import calibrate  # with torch, which no other command waits for

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

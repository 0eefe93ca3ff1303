"""`lflops hardware`, `roofline` and `selftest`.

What chips can do, how far from it a training is, and what works on this machine.
"""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import json

from lflops.analysis.analysis import analyze
from lflops.cli.output import UsageError, draw, help_of, name_file, write_json, write_lines
from lflops.errors import HardwareError
from lflops.extras import needed
from lflops.hardware.chips import check_new, chips, lookup, named, save, unknown
from lflops.profile.json_file import load
from lflops.report.terminal.hardware import figures, listing
from lflops.report.terminal.roofline import render_roofline
from lflops.trace.files import is_trace

HELP = help_of(__file__)


def hardware(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=HELP["name"])] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help=HELP["measure"])] = False,
    save_as: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help=HELP["save_as"])
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """List the chips whose peaks are known, print one of them, or measure this machine."""
    if save_as is not None and not measure:
        raise UsageError("--save adds what --measure measures: give both")
    if save_as is not None:
        check_new(save_as)
    chip = None if name is None else named(name) if name.endswith(".toml") else lookup(name)
    if name is not None and chip is None:
        raise HardwareError(
            f"{unknown(name)}: lflops hardware lists the chips, lflops hardware --measure measures this machine"
        )
    measured = saved_in = None
    if measure:
        from lflops.hardware.calibrate import (
            calibrate,
            # with torch, which no other command waits for
        )

        measured = calibrate(fresh=True)
        chip = chip or lookup(measured.name)
        saved_in = None if save_as is None else save(save_as, measured)
    everything = name is None and measured is None
    if as_json:
        shown = (
            [each for of_vendor in chips().values() for each in of_vendor]
            if everything
            else [chip]
            if chip
            else []
        )
        write_json({"chips": shown, "measured": measured})
    else:
        draw(listing(chips()) if everything else figures(chip, measured))
    name_file(saved_in, as_json=as_json)


def roofline(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help=HELP["file"])] = None,
    *,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help=HELP["figure"])] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["hardware"])] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help=HELP["top"])] = 20,
    ncu: Annotated[Path | None, typer.Option(metavar="LOG", help=HELP["ncu"])] = None,
    gpu_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help=HELP["gpu_time"])
    ] = None,
    ncu_command: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help=HELP["ncu_command"])
    ] = None,
    as_points: Annotated[bool, typer.Option("--json", help=HELP["as_points"])] = False,
) -> None:
    """Place operators, modules or kernels below the roofs of a chip."""
    if (ncu, ncu_command, gpu_time) != (None, None, None):
        show_kernels = needed("show_kernels", "--ncu")
        show_kernels(
            file,
            log=ncu,
            script=ncu_command,
            gpu_time=gpu_time,
            figure=figure,
            hardware=hardware,
            top=top,
            as_json=as_points,
        )
    elif file is None:
        raise UsageError(
            "nothing to place: give a profile's FILE, --ncu LOG or --ncu-command SCRIPT"
        )
    elif not is_trace(file):
        _show_profile(file, hardware, top, figure, as_json=as_points)
    elif figure is not None:
        raise UsageError("--figure draws a profile's FILE, not a trace")
    else:
        needed("show_trace_roofline", "the roofline of a trace")(
            file, hardware, top, as_json=as_points
        )


def _show_profile(
    file: Path, hardware: str | None, top: int, figure: Path | None, *, as_json: bool
) -> None:
    analysis = analyze(load(file), hardware)
    if figure is not None:
        save_figure = needed("save_roofline_figure", "a figure")
        try:
            save_figure(analysis.roofline, figure, analysis.patterns)
        except ValueError as error:
            raise UsageError(f"figure={error}") from error
    write_json(analysis.roofline.points()) if as_json else draw(render_roofline(analysis, top=top))
    name_file(figure, as_json=as_json)


def selftest(
    *,
    device: Annotated[str | None, typer.Option("--device", help=HELP["device"])] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help=HELP["output"])] = Path(
        "lflops-selftest.json"
    ),
) -> None:
    """Try out what works on a device, and write it to a file.

    The exit status is 1 if something is wrong.
    """
    # with torch, which no other command waits for
    from lflops.selftest import self_test

    result = self_test(device)
    output.write_bytes(json.format(json.encode(result)) + b"\n")
    words = {True: "right", False: "WRONG", None: "not offered"}
    checks = (
        f"  {check.name:<16}{words[check.passed]:<13}{check.found}" for check in result.checks
    )
    write_lines(
        [
            f"{result.device_name} ({result.device}), torch {result.torch}",
            *checks,
            f"written: {output}",
        ]
    )
    if not result.passed:
        raise typer.Exit(1)

"""`lflops hardware`, `roofline` and `selftest`: list chips, show rooflines, and test a device."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import json

from lflops.analysis.analysis import analyze
from lflops.cli.output import UsageError, draw, name_file, write_json, write_lines
from lflops.errors import HardwareError
from lflops.extras import needed
from lflops.files import write_whole
from lflops.hardware.chips import Hardware, check_new, chips, lookup, named, save, unknown
from lflops.profile.json_file import load
from lflops.report.terminal.hardware import figures, listing
from lflops.report.terminal.roofline import render_roofline
from lflops.trace.files import is_trace


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The chip: a name that `lflops hardware` lists, a name that the driver reports, "
            "or a TOML file that describes a chip.",
        ),
    ] = None,
    *,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the FLOP/s and the bandwidth of this machine, and compare them with the "
            "published figures of the chip.",
        ),
    ] = False,
    save_as: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="NAME",
            help="Add the measured figures to your table of chips under this name. Only with "
            "--measure.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with two keys. `chips` is a list of chips. `measured` has "
            "the measured figures, and is null without --measure.",
        ),
    ] = False,
) -> None:
    """List the chips whose peak FLOP/s are known, print one chip, or measure this machine."""
    if save_as is not None:
        if not measure:
            raise UsageError(
                "--save needs the figures that --measure measures: pass --measure as well"
            )
        check_new(save_as)
    chip = None if name is None else _chip(name)
    measured = None
    saved_in = None
    if measure:
        # Imported here because it imports torch, which most commands do not need.
        from lflops.hardware.calibrate import calibrate

        measured = calibrate(fresh=True)
        chip = chip or lookup(measured.name)
        if save_as is not None:
            saved_in = save(save_as, measured)
    is_list = name is None and measured is None
    if as_json:
        listed: list[Hardware] = []
        if is_list:
            for of_vendor in chips().values():
                listed.extend(of_vendor)
        elif chip is not None:
            listed.append(chip)
        write_json({"chips": listed, "measured": measured})
    else:
        draw(listing(chips()) if is_list else figures(chip, measured))
    name_file(saved_in, as_json=as_json)


def _chip(name: str) -> Hardware:
    if name.endswith(".toml"):
        return named(name)
    chip = lookup(name)
    if chip is None:
        raise HardwareError(
            f"{unknown(name)}: run `lflops hardware` to list the chips, or "
            "`lflops hardware --measure` to measure this machine"
        )
    return chip


_POINTS = (
    "Print one JSON object. For a profile, its keys are ceilings (the rooflines of the chip), "
    "modules, operators, op_counts and self_work. In the last four, each value is a list of points "
    "with the intensity, the roofline limit, the bound and the share of the limit. With --ncu, the "
    "keys are total and kernels. For a trace, the keys are hardware, utilization and operators "
    "(by shapes). Unknown values are null."
)


def roofline(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A profile's JSON file, or a trace of torch.profiler."),
    ] = None,
    *,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Draw the roofline into this file: .svg, .png or .pdf."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The chip whose roofline is used: a name that `lflops hardware` lists, or a TOML "
            "file. Default: the chip of the run.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of rows in each table.")
    ] = 20,
    ncu: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG",
            help="Output of Nsight Compute with its counters, as CSV or as text. If FILE is passed "
            "too, each kernel is assigned to a module of this profile.",
        ),
    ] = None,
    gpu_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds for which the GPU was busy, for example from Nsight Systems. They "
            "replace the sum of the kernel times. Only with --ncu.",
        ),
    ] = None,
    ncu_command: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT",
            help="Print a command that runs SCRIPT under Nsight Compute. SCRIPT may include "
            "arguments.",
        ),
    ] = None,
    as_points: Annotated[bool, typer.Option("--json", help=_POINTS)] = False,
) -> None:
    """Compare operators, modules or kernels with the roofline of a chip."""
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
            "nothing to compare: pass the FILE of a profile or a trace, --ncu LOG, or "
            "--ncu-command SCRIPT"
        )
    elif not is_trace(file):
        _show_profile(file, hardware, top, figure, as_json=as_points)
    elif figure is not None:
        raise UsageError(f"--figure draws only profiles, but {file} is a trace: leave --figure out")
    else:
        show_trace_roofline = needed("show_trace_roofline", "the roofline of a trace")
        show_trace_roofline(file, hardware, top, as_json=as_points)


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
    if as_json:
        write_json(analysis.roofline.points())
    else:
        draw(render_roofline(analysis, top=top))
    name_file(figure, as_json=as_json)


_RESULTS = {True: "right", False: "WRONG", None: "unavailable"}


def selftest(
    *,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Device to check, such as cuda:1. Default: the accelerator, or the CPU if there "
            "is no accelerator.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write the results to.")
    ] = Path("lflops-selftest.json"),
) -> None:
    """Check which features work on a device, and write the results to a file.

    The exit status is 1 if a check fails.
    """
    # Imported here because it imports torch, which most commands do not need.
    from lflops.selftest import self_test

    result = self_test(device)
    write_whole(output, json.format(json.encode(result)) + b"\n")
    lines = [f"{result.device_name} ({result.device}), torch {result.torch}"]
    for check in result.checks:
        lines.append(f"  {check.name:<16}{_RESULTS[check.passed]:<13}{check.found}")
    lines.append(f"results written to {output}")
    write_lines(lines)
    if not result.passed:
        raise typer.Exit(1)

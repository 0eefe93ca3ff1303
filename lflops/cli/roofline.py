"""`lflops roofline`: how far from what the chip can do, as counted by lflops or by Nsight Compute."""

import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from lflops.analyze.analysis import analyze
from lflops.analyze.speed.ncu import Measured, command, read
from lflops.analyze.trace.summary import summarise
from lflops.cli.output import UsageError, draw, name_file, write_json
from lflops.errors import LflopsError, ProfileError, needed_by
from lflops.hardware.chips import named
from lflops.profile.json_file import load
from lflops.profile.model import Profile
from lflops.report.terminal.roofline import render_ncu, render_roofline
from lflops.report.terminal.trace_summary import render_trace_roofline
from lflops.traces.files import is_trace
from lflops.traces.read_trace import read_trace

__all__ = ["roofline"]


def roofline(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A profile's JSON file, or a trace.")] = None,
    *,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Write a figure: .svg, .png or .pdf.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="The chip to judge by, or a TOML file; else the run's own.")] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines of a table.")] = 20,
    ncu: Annotated[
        Path | None, typer.Option(metavar="LOG", help="What Nsight Compute counted: its CSV or log. With FILE, kernels by its modules.")
    ] = None,
    gpu_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --ncu: how long the GPU ran, as Nsight Systems tells it.")
    ] = None,
    ncu_command: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help="Print the command that has Nsight Compute count for a script with its arguments.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: ceilings, modules, operators, cells and own (points with intensity, roof, bound and share); of "
            "--ncu total and kernels; of a trace hardware, utilization and operators by shapes. Unknown is null.",
        ),
    ] = False,
) -> None:
    """Place operators, modules or kernels below the roofs of a chip."""
    if ncu_command is None and ncu is None and file is None:
        raise UsageError("nothing to place: give a profile's FILE, --ncu LOG or --ncu-command SCRIPT")
    if ncu_command is not None and (file, ncu, figure, gpu_time, hardware) != (None,) * 5:
        raise UsageError("--ncu-command stands alone, or with --json")
    if ncu is None and gpu_time is not None:
        raise UsageError(f"gpu_time={gpu_time}: --gpu-time goes with --ncu LOG")
    if gpu_time is not None and not 0 < gpu_time < math.inf:
        raise UsageError(f"gpu_time={gpu_time}: give a positive number of seconds")
    if ncu is not None and figure is not None:
        raise UsageError("--figure draws a profile's FILE, not what --ncu reads")
    if ncu_command is not None:
        words = command(shlex.split(ncu_command))
        write_json({"command": words}) if as_json else typer.echo(shlex.join(words))
    elif ncu is not None:
        measured = _measured(ncu, gpu_time, None if file is None else load(file), hardware)
        write_json(measured) if as_json else draw(render_ncu(measured, top=top))
    elif file is not None and is_trace(file):
        _show_trace(file, hardware, top, figure, as_json=as_json)
    elif file is not None:
        _show_profile(file, hardware, top, figure, as_json=as_json)


def _show_profile(file: Path, hardware: str | None, top: int, figure: Path | None, *, as_json: bool) -> None:
    analysis = analyze(load(file), hardware)
    if figure is not None:
        with needed_by("a figure"):
            from lflops.report.figures.roofline import save

        try:
            save(analysis.roofline_overview, figure, analysis.patterns)
        except ValueError as error:
            raise UsageError(f"figure={error}") from error
    write_json(analysis.roofline) if as_json else draw(render_roofline(analysis, top=top))
    name_file(figure, as_json=as_json)


def _show_trace(file: Path, hardware: str | None, top: int, figure: Path | None, *, as_json: bool) -> None:
    if figure is not None:
        raise UsageError("--figure draws a profile's FILE, not a trace")
    summary = summarise(read_trace(file), hardware)
    if as_json:
        write_json({"hardware": summary.hardware, "utilization": summary.utilization, "operators": summary.shapes})
    else:
        draw(render_trace_roofline(summary, top=top))


def _measured(log: Path, gpu_time: float | None, profile: Profile | None, hardware: str | None) -> Measured:
    chip = named(hardware) if hardware else profile.run.hardware if profile else None
    try:
        return read(log.read_text(errors="replace"), gpu_seconds=gpu_time, modules=profile.modules if profile else (), chip=chip)
    except OSError as error:
        raise ProfileError(f"{log}: {error.strerror}") from error
    except LflopsError as error:
        raise ProfileError(f"{log}: {error}") from error

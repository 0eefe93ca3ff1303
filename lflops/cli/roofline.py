"""`lflops roofline`: how far from what the chip can do, as counted by lflops or by Nsight Compute."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.analyze.analysis import analyze
from lflops.cli.output import UsageError, draw, help_of, name_file, write_json
from lflops.extras import needed
from lflops.profile.json_file import load
from lflops.report.terminal.roofline import render_roofline
from lflops.traces.files import is_trace

HELP = help_of(__file__)


def roofline(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help=HELP["file"])] = None,
    *,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help=HELP["figure"])] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["hardware"])] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help=HELP["top"])] = 20,
    ncu: Annotated[Path | None, typer.Option(metavar="LOG", help=HELP["ncu"])] = None,
    gpu_time: Annotated[float | None, typer.Option(metavar="SECONDS", help=HELP["gpu_time"])] = None,
    ncu_command: Annotated[str | None, typer.Option(metavar="SCRIPT", help=HELP["ncu_command"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Place operators, modules or kernels below the roofs of a chip."""
    if (ncu, ncu_command, gpu_time) != (None, None, None):
        show_kernels = needed("show_kernels", "--ncu")
        show_kernels(file, log=ncu, script=ncu_command, gpu_time=gpu_time, figure=figure, hardware=hardware, top=top, as_json=as_json)
    elif file is None:
        raise UsageError("nothing to place: give a profile's FILE, --ncu LOG or --ncu-command SCRIPT")
    elif not is_trace(file):
        _show_profile(file, hardware, top, figure, as_json=as_json)
    elif figure is not None:
        raise UsageError("--figure draws a profile's FILE, not a trace")
    else:
        needed("show_trace_roofline", "the roofline of a trace")(file, hardware, top, as_json=as_json)


def _show_profile(file: Path, hardware: str | None, top: int, figure: Path | None, *, as_json: bool) -> None:
    analysis = analyze(load(file), hardware)
    if figure is not None:
        save = needed("save_roofline_figure", "a figure")
        try:
            save(analysis.roofline, figure, analysis.patterns)
        except ValueError as error:
            raise UsageError(f"figure={error}") from error
    write_json(analysis.roofline.points()) if as_json else draw(render_roofline(analysis, top=top))
    name_file(figure, as_json=as_json)

"""`lflops trace`: the traces of a window; and `lflops diff` and `lflops roofline` of traces."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lflops.cli.diff import memory_limit, refuse_unknown
from lflops.cli.output import UsageError, draw, help_of, write_json
from lflops.report.html import write
from lflops.report.text import counted, plain
from lflops.trace.analysis.compare import compare, trace_limits
from lflops.trace.analysis.merge import MERGED, merge as merge_traces
from lflops.trace.analysis.page import trace_page
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.sentences import clock_lines
from lflops.trace.analysis.summary import summarise, summarise_all
from lflops.trace.analysis.terminal import (
    render_ranks,
    render_trace,
    render_trace_diff,
    render_trace_roofline,
    trace_headline,
)
from lflops.trace.convert import compat as copy_of
from lflops.trace.files import traces_in

HELP = help_of(__file__)
_LISTED = 10

trace = typer.Typer(
    rich_markup_mode=None,
    help="Traces of torch.profiler: what the device did, ranks as one, copies for torch-tb-profiler.",
)

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Traces of torch.profiler, packed or not; one for each rank."
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Has the ranks' traces of one window, *.pt.trace.json or *.pt.trace.json.gz.",
    ),
]


@trace.command()
def show(
    files: Files,
    *,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["hardware"])] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help=HELP["top"])] = 10,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help=HELP["html"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Show what the device did.

    Computing, communicating, copying, idle and why; steps, kernels, operators.
    """
    if html is not None and as_json:
        raise UsageError(f"html={str(html)!r}: --json prints, --html writes; give one of the two")
    if html is not None and html.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"html={str(html)!r} is a trace itself: give another path")
    found = summarise_all((read_trace(file) for file in files), hardware)
    if as_json:
        write_json(found)
    elif html is not None:
        write(trace_page(found), html)
        typer.echo(html)
    else:
        shown = [] if found.ranks is None else [render_ranks(found.ranks, top=top)]
        for place, part in enumerate(
            [*shown, *(render_trace(summary, top=top) for summary in found.traces)]
        ):
            if place:
                draw("")
            draw(part)


@trace.command()
def merge(
    folder: Folder,
    *,
    into: Annotated[
        Path | None, typer.Option(metavar="FILE", help=HELP["into"].format(MERGED))
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["merge_as_json"])] = False,
) -> None:
    """Make one Chrome trace of several ranks', each rank under its name and all on one clock."""
    merged = merge_traces(folder, into)
    if as_json:
        write_json(merged)
    else:
        left_out = (
            f"; {counted(merged.damaged, 'event')} left out that cannot be read"
            if merged.damaged
            else ""
        )
        typer.echo(
            f"{merged.file}: {counted(len(merged.ranks), 'trace')}, {counted(merged.events, 'event')}{left_out}"
        )
        for line in clock_lines(merged.clocks):
            typer.echo(line)


@trace.command()
def compat(
    folder: Folder,
    *,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["compat_as_json"])] = False,
) -> None:
    """Copy traces for torch-tb-profiler 0.4.3 into the folder compat-DIR, next to DIR.

    If torch-tb-profiler is installed, the callback does this itself.
    """
    copies = [copy_of(each) for each in traces_in(folder)]
    if as_json:
        write_json(
            {
                "files": [str(file) for file, _ in copies],
                "damaged": [len(damage) for _, damage in copies],
            }
        )
    for file, damage in [] if as_json else copies:
        left_out = (
            f": {counted(len(damage), 'event')} left out that cannot be read: {plain(damage[0])}"
            if damage
            else ""
        )
        typer.echo(f"{file}{left_out}")


def add_commands(app: typer.Typer) -> None:
    app.add_typer(trace, name="trace")


def diff_traces(
    before: Path,
    after: Path,
    regress: float | None,
    mfu: float | None,
    memory: str | None,
    *,
    everything: bool,
    as_json: bool,
) -> int:
    """Compare two traces as `lflops diff` does; returns the exit status."""
    compared = compare(summarise(read_trace(before)), summarise(read_trace(after)))
    checked = trace_limits(
        compared,
        max_regress=regress,
        min_mfu=mfu,
        max_memory=memory_limit(memory, compared.allocated_bytes[0]),
    )
    refuse_unknown(checked, HELP)
    if as_json:
        fields = {field: getattr(compared, field) for field in compared.__struct_fields__}
        write_json({"headline": list(trace_headline(compared)), "limits": checked} | fields)
    else:
        draw(render_trace_diff(compared, checked, top=sys.maxsize if everything else _LISTED))
    return int(any(limit.broken for limit in checked))


def show_trace_roofline(file: Path, hardware: str | None, top: int, *, as_json: bool) -> None:
    """Place the operators of a trace below the roofs of a chip, as `lflops roofline` does."""
    summary = summarise(read_trace(file), hardware)
    if as_json:
        write_json(
            {
                "hardware": summary.hardware,
                "utilization": summary.utilization,
                "operators": summary.shapes,
            }
        )
    else:
        draw(render_trace_roofline(summary, top=top))

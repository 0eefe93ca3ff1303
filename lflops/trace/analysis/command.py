"""Define the command `lflops trace`, and let `lflops diff` and `lflops roofline` read traces."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from lflops.cli.diff import memory_limit, refuse_unknown
from lflops.cli.output import UsageError, draw, write_json
from lflops.profile.module_names import plain
from lflops.report.html import write
from lflops.report.text import counted
from lflops.trace.analysis.compare import compare, trace_limits
from lflops.trace.analysis.merge import MERGED, merge as merge_traces
from lflops.trace.analysis.page import trace_page
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.sentences import clock_lines
from lflops.trace.analysis.summary import TraceSummaries, summarise, summarise_all
from lflops.trace.analysis.terminal import (
    render_ranks,
    render_trace,
    render_trace_diff,
    render_trace_roofline,
    trace_headline,
)
from lflops.trace.convert import convert_for_tb_profiler
from lflops.trace.files import traces_in

_LISTED = 10
"""Maximum number of rows in each table of a comparison."""

_WHY_UNKNOWN = {
    "unknown_max_regress": "cannot be checked: each trace needs at least two steps",
    "unknown_min_mfu": (
        "cannot be checked: the second trace has no MFU, because its shapes or the peak FLOP/s of "
        "its chip are unknown"
    ),
    "unknown_max_memory": (
        "cannot be checked: the second trace has no memory peak: record it with profile_memory=True"
    ),
}
"""Reasons why a limit cannot be checked."""

trace = typer.Typer(
    rich_markup_mode=None,
    help="Analyze torch.profiler traces, merge the traces of several ranks, or convert them for "
    "torch-tb-profiler.",
)

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Traces of torch.profiler, compressed or not. To compare ranks, pass one trace of "
        "each rank.",
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Folder with the traces of one window. Their names end with .pt.trace.json or "
        ".pt.trace.json.gz.",
    ),
]
HardwareOption = typer.Option(
    metavar="NAME",
    help="The chip to compare with: a name that `lflops hardware` lists, or a TOML file. Default: "
    "the chip that the trace names.",
)
TopOption = typer.Option(metavar="N", min=1, help="Number of rows in each table.")
HtmlOption = typer.Option(
    metavar="OUT",
    help="Write an HTML page to this file, and print the path. The page opens offline.",
)
ShowJsonOption = typer.Option(
    "--json",
    help=(
        "Print one JSON object with traces and ranks. `traces` is a list of objects, each with the "
        "device, idle, steps, categories, kernels, operators and more of one trace. `ranks` "
        "compares the traces, and is null for a single trace. Times are whole nanoseconds. Unknown "
        "values are null."
    ),
)
IntoOption = typer.Option(
    metavar="FILE", help=f"The file to write. Default: {MERGED} in the same folder."
)
MergeJsonOption = typer.Option(
    "--json",
    help=(
        "Print one JSON object with file, ranks, events (the number of events), damaged (the "
        "number of events that are left out) and clocks (the time that was added to the times of "
        "each rank after the first, to align the clocks)."
    ),
)
CompatJsonOption = typer.Option(
    "--json",
    help=(
        "Print one JSON object with files (the list of copies) and damaged (a list with the number "
        "of events that each copy leaves out)."
    ),
)


@trace.command()
def show(
    files: Files,
    *,
    hardware: Annotated[str | None, HardwareOption] = None,
    top: Annotated[int, TopOption] = 10,
    html: Annotated[Path | None, HtmlOption] = None,
    as_json: Annotated[bool, ShowJsonOption] = False,
) -> None:
    """Show what the device did in a trace.

    The output begins with the time of computing, communication and copies, and the idle time with
    its causes. Tables of steps, kernels and operators follow.
    """
    if html is not None and as_json:
        raise UsageError(
            f"html={str(html)!r}: --json writes no HTML file, so pass only one of --html and --json"
        )
    if html is not None and html.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"html={str(html)!r} is a trace itself: pass another path")
    found = summarise_all(map(read_trace, files), hardware)
    if as_json:
        write_json(found)
    elif html is not None:
        write(trace_page(found), html)
        typer.echo(html)
    else:
        _draw_all(found, top)


def _draw_all(found: TraceSummaries, top: int) -> None:
    if found.ranks is not None:
        draw(render_ranks(found.ranks, top=top))
        draw("")
    for place, summary in enumerate(found.traces):
        if place:
            draw("")
        draw(render_trace(summary, top=top))


@trace.command()
def merge(
    folder: Folder,
    *,
    into: Annotated[Path | None, IntoOption] = None,
    as_json: Annotated[bool, MergeJsonOption] = False,
) -> None:
    """Merge the traces of several ranks into one Chrome trace, with all times on one clock."""
    merged = merge_traces(folder, into)
    if as_json:
        write_json(merged)
        return
    traces = counted(len(merged.ranks), "trace")
    line = f"{merged.file}: {traces}, {counted(merged.events, 'event')}"
    if merged.damaged:
        line += f"; left out {counted(merged.damaged, 'event')} that cannot be read"
    typer.echo(line)
    for clock_line in clock_lines(merged.clocks):
        typer.echo(clock_line)


@trace.command()
def compat(folder: Folder, *, as_json: Annotated[bool, CompatJsonOption] = False) -> None:
    """Write copies of traces that torch-tb-profiler 0.4.3 can read into compat-DIR, next to DIR.

    If torch-tb-profiler is installed, `FlopsMonitor` writes these copies itself.
    """
    files = []
    damaged = []
    lines = []
    for trace_file in traces_in(folder):
        file, left_out = convert_for_tb_profiler(trace_file)
        line = str(file)
        if left_out.number:
            events = counted(left_out.number, "event")
            line += f": left out {events} that cannot be read; first error: {plain(left_out.first)}"
        files.append(str(file))
        damaged.append(left_out.number)
        lines.append(line)
    if as_json:
        write_json({"files": files, "damaged": damaged})
        return
    for line in lines:
        typer.echo(line)


def add_commands(app: typer.Typer) -> None:
    """Add `lflops trace` to the command line."""
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
    """Compare two traces as `lflops diff` does, and return the exit status."""
    compared = compare(summarise(read_trace(before)), summarise(read_trace(after)))
    checked = trace_limits(
        compared,
        max_regress=regress,
        min_mfu=mfu,
        max_memory=memory_limit(memory, compared.allocated_bytes[0]),
    )
    refuse_unknown(checked, _WHY_UNKNOWN)
    if as_json:
        headline = list(trace_headline(compared))
        write_json({"headline": headline, "limits": checked} | asdict(compared))
    else:
        draw(render_trace_diff(compared, checked, top=sys.maxsize if everything else _LISTED))
    return int(any(limit.is_broken for limit in checked))


def show_trace_roofline(file: Path, hardware: str | None, top: int, *, as_json: bool) -> None:
    """Compare the operators of a trace with a chip's roofline, as `lflops roofline` does."""
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

"""`lflops memory`: explain why a device ran out of memory, or compare two snapshots."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Group, RenderableType

from lflops.cli.output import UsageError, draw, write_json
from lflops.hardware.chips import named
from lflops.memory.snapshots.explain import compare, compared_lines, explain, explained_lines
from lflops.memory.snapshots.modules import memory_by_module
from lflops.memory.snapshots.page import snapshot_shown
from lflops.memory.snapshots.read import read_snapshot
from lflops.profile.json_file import load
from lflops.report.html import page_of_data, write
from lflops.report.terminal.tables import prose


def add_commands(app: typer.Typer) -> None:
    """Add `lflops memory`."""
    app.command()(memory)


def memory(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT", help="A file that torch.cuda.memory._dump_snapshot wrote."
        ),
    ],
    after: Annotated[
        Path | None,
        typer.Argument(
            metavar="AFTER",
            help="A later snapshot to compare with. The output shows what grew and what shrank.",
        ),
    ] = None,
    *,
    device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Index of the device whose memory the report explains. Default: the device that "
            "ran out of memory. If no device ran out of memory, it is the device with the most "
            "reserved memory.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The chip: a name that `lflops hardware` lists, or a TOML file. The output then "
            "shows how much memory other processes use.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="OUT",
            help="Write an HTML page to this file. It shows the memory over time, and a treemap of "
            "the peak.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A profile of the same run. The output then shows which modules hold the memory "
            "in each phase.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with causes, by_category, holders (the lines of code that "
            "hold memory) and totals such as requested_bytes. For two snapshots, the values are "
            "pairs: before and after.",
        ),
    ] = False,
) -> None:
    """Explain why a device ran out of memory, from a snapshot of torch's allocator.

    If two snapshots are passed, compare their memory. Reading a snapshot runs no code.
    """
    if html is not None and as_json:
        raise UsageError("--json writes no HTML file: pass only one of --html and --json")
    if html is not None and html.resolve() == file.resolve():
        raise UsageError(f"--html {html} is the snapshot itself: pass another path")
    if profile is not None and after is not None:
        raise UsageError(
            f"--profile {profile} applies only to a single snapshot: leave {after} out"
        )
    if after is not None and (html is not None or hardware is not None):
        raise UsageError(
            f"--html and --hardware apply only to a single snapshot: leave them out, or leave "
            f"{after} out"
        )
    chip = None if hardware is None else named(hardware)
    snapshot = read_snapshot(file, device)
    explained = explain(snapshot, chip)
    if profile is not None:
        explained = replace(explained, by_module=memory_by_module(snapshot, load(profile)))
    if after is not None:
        diff = compare(explained, explain(read_snapshot(after, device)))
        if as_json:
            write_json(diff)
        else:
            draw(_lines(compared_lines(diff)))
    elif as_json:
        write_json(explained)
    elif html is not None:
        shown = snapshot_shown(snapshot, explained, chip)
        write(page_of_data(f"memory of {shown.title}", shown, "entry/snapshot"), html)
        typer.echo(html)
    else:
        draw(_lines(explained_lines(explained)))


def _lines(lines: Iterable[str]) -> RenderableType:
    shown = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        shown.append(prose(line.strip(), indent=indent))
    return Group(*shown)

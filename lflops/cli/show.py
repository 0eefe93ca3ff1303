"""`lflops show` and `lflops html`.

A profile on the terminal, or as a file that a browser opens, without a network.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from lflops.analysis.analysis import Analysis, analyze
from lflops.analysis.tree import SORT_KEYS, Row, share_of
from lflops.cli.output import (
    UsageError,
    draw,
    help_of,
    name_file,
    save_memory,
    write_json,
    write_lines,
)
from lflops.profile.json_file import load
from lflops.profile.records import PHASES, Phase
from lflops.report.explanation import profile_at
from lflops.report.html import page, write
from lflops.report.module_table import FORMATS, csv_table, latex_table, markdown_table
from lflops.report.payload.payload import payload
from lflops.report.report import report_of
from lflops.report.terminal.memory import render_checkpointed, render_memory
from lflops.report.terminal.modules import header, render, render_operators

HELP = help_of(__file__)


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=HELP["file"])],
    *,
    depth: Annotated[int, typer.Option(metavar="N", help=HELP["depth"])] = -1,
    sort: Annotated[
        str | None, typer.Option(metavar="KEY", help=HELP["sort"].format(", ".join(SORT_KEYS)))
    ] = None,
    own: Annotated[bool, typer.Option("--flat", help=HELP["own"])] = False,
    by_operator: Annotated[bool, typer.Option("--operators", help=HELP["by_operator"])] = False,
    memory: Annotated[bool, typer.Option("--memory", help=HELP["memory"])] = False,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help=HELP["figure"])] = None,
    phase: Annotated[
        str, typer.Option(metavar="NAME", help=HELP["phase"].format(", ".join(PHASES)))
    ] = "all",
    form: Annotated[str | None, typer.Option("--format", metavar="NAME", help=HELP["form"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Print a profile: totals, what they leave out, and its modules."""
    chosen = _checked(
        phase,
        own=own,
        depth=depth,
        sort=sort,
        by_operator=by_operator,
        memory=memory,
        figure=figure,
    )
    if form is not None and (form not in FORMATS or as_json or by_operator or memory):
        raise UsageError(
            f"format={form!r}: give one of {', '.join(FORMATS)}, without --json, --operators and --memory"
        )
    analysis = analyze(profile_at(file))
    try:
        if memory:
            _show_memory(analysis, figure, as_json=as_json)
        elif by_operator and as_json:
            write_json(
                _as_json(
                    analysis,
                    chosen,
                    operators=analysis.operators(chosen),
                    trace=analysis.profile.trace,
                )
            )
        elif by_operator:
            draw(render_operators(analysis, chosen))
        elif form is not None or as_json:
            rows = (
                analysis.flat(sort=sort, phase=chosen)
                if own
                else analysis.tree(depth=depth, sort=sort, phase=chosen)
            )
            write_json(_as_json(analysis, chosen, rows=rows)) if form is None else _write_table(
                analysis, form, rows, chosen
            )
        else:
            draw(render(analysis, depth=depth, sort=sort, own=own, phase=chosen))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RecursionError as error:
        raise UsageError(
            "the modules are nested too deeply for a tree: give --depth or --flat"
        ) from error


def _write_table(analysis: Analysis, form: str, rows: tuple[Row, ...], phase: Phase | None) -> None:
    table = {"markdown": markdown_table, "latex": latex_table}.get(form)
    text = csv_table(analysis, rows) if table is None else table(analysis, rows, phase)
    write_lines(text.splitlines())


def _checked(
    phase: str,
    *,
    own: bool,
    depth: int,
    sort: str | None,
    by_operator: bool,
    memory: bool,
    figure: Path | None,
) -> Phase | None:
    """The phase, where the options go together."""
    if phase not in (*PHASES, "all"):
        raise UsageError(f"phase={phase!r}: give one of {', '.join(PHASES)}, or all")
    if own and depth != -1:
        raise UsageError(f"depth={depth}: --flat has no depth, give one of the two")
    if by_operator and (own or depth != -1 or sort):
        raise UsageError(
            "--operators goes with --phase and --json, not with --depth, --sort or --flat"
        )
    if memory and (own or depth != -1 or sort or by_operator or phase != "all"):
        raise UsageError("--memory goes with --figure and --json alone")
    if figure is not None and not memory:
        raise UsageError("--figure draws what --memory shows: give both")
    return next((each for each in PHASES if each == phase), None)


def _show_memory(analysis: Analysis, figure: Path | None, *, as_json: bool) -> None:
    save_memory(analysis.profile, figure)
    if as_json:
        write_json(
            _as_json(
                analysis, None, memory=analysis.profile.memory, checkpointed=analysis.checkpointed
            )
        )
    else:
        draw(
            Group(
                header(analysis),
                "",
                render_memory(analysis),
                "",
                render_checkpointed(analysis.checkpointed),
            )
        )
    name_file(figure, as_json=as_json)


def _as_json(analysis: Analysis, phase: Phase | None, **listed: object) -> dict[str, object]:
    profile = analysis.profile
    return {
        "schema_version": profile.schema_version,
        "run": profile.run,
        "phase": phase or "all",
        "report": report_of(analysis),
        "pace": analysis.step_times,
        "utilization": analysis.utilization,
        "share_of": share_of(analysis.profile, phase),
        "totals": analysis.totals,
        **listed,
        "unsupported": analysis.unsupported,
        "uncalled": analysis.uncalled,
        "notes": profile.notes,
    }


def html(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help=HELP["files"])],
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help=HELP["out"])
    ] = None,
    data: Annotated[bool, typer.Option("--json", help=HELP["data"])] = False,
) -> None:
    """Write a profile, or several to compare, as one HTML file.

    It opens from disk, and in a mail or a ticket.
    """
    if data and out is not None:
        raise UsageError(f"out={str(out)!r}: --json writes no page, give one of the two")
    path = (
        files[-1].with_suffix(".html" if len(files) == 1 else ".compare.html")
        if out is None
        else out
    )
    if path.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"out={str(path)!r} is a profile itself: give another place with --out")
    analyses = [analyze(load(file)) for file in files]
    if data:
        shown = [payload(analysis) for analysis in analyses]
        write_json(shown[0] if len(shown) == 1 else shown)
    else:
        write(page(*analyses, names=_distinct_names(files) if len(files) > 1 else ()), path)
        typer.echo(path)


def _distinct_names(files: list[Path]) -> list[str]:
    names = [file.name for file in files]
    paths = names if len(set(names)) == len(names) else [str(file) for file in files]
    return [path if paths.index(path) == i else f"{path} ({i + 1})" for i, path in enumerate(paths)]

"""`lflops show`: a profile on the terminal."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from lflops.analyze.analysis import Analysis, analyze
from lflops.analyze.modules.tree import SORT_KEYS, Row
from lflops.cli.output import UsageError, draw, name_file, save_memory, write_json, write_lines
from lflops.profile.json_file import load
from lflops.profile.records import PHASES, Phase
from lflops.report.lines.module_table import FORMATS, csv_table, latex_table, markdown_table
from lflops.report.lines.report import report_of
from lflops.report.terminal.memory import render_checkpointed, render_memory
from lflops.report.terminal.modules import header, render, render_operators

Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="The table of modules alone: markdown or latex for a paper, csv with exact numbers in SI units."
    ),
]

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object: run, phase, pace (undisturbed steps), utilization, share_of, totals (by phase), rows, uncounted "
        "(operators without a formula), uncalled (modules) and notes. share_of is macs, or flops where the phase has no MACs. Rows are "
        "nested by children, with the exact counts and the seconds of each phase. With --operators it has operators and trace, "
        "with --memory memory and checkpointed (by block). A row with a repeat holds the figures of one of its names, "
        "and the mean of the times of all. Unknown is null.",
    ),
]


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile's JSON file.")],
    *,
    depth: Annotated[int, typer.Option(metavar="N", help="How many levels of the tree below the model; -1 is all.")] = -1,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help=f"Order the rows by {', '.join(SORT_KEYS)}: the most in the phase shown first, names from A to Z."
        ),
    ] = None,
    own: Annotated[bool, typer.Option("--flat", help="No tree: every module by its own work, the most MACs first.")] = False,
    by_operator: Annotated[bool, typer.Option("--operators", help="No modules: every operator, the most MACs first.")] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="No modules: the peak of live memory by category, module and tensor, and what checkpointing saves."),
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --memory: draw live memory over the step, as .png, .svg or .pdf.")
    ] = None,
    phase: Annotated[str, typer.Option(metavar="NAME", help=f"The phase of times, work and shares: {', '.join(PHASES)}, or all.")] = "all",
    form: Format = None,
    as_json: AsJson = False,
) -> None:
    """Print a profile: totals, what they leave out, and its modules."""
    chosen = _checked(phase, own=own, depth=depth, sort=sort, by_operator=by_operator, memory=memory, figure=figure)
    if form is not None and (form not in FORMATS or as_json or by_operator or memory):
        raise UsageError(f"format={form!r}: give one of {', '.join(FORMATS)}, without --json, --operators and --memory")
    analysis = analyze(load(file))
    try:
        if memory:
            _show_memory(analysis, figure, as_json=as_json)
        elif by_operator and as_json:
            write_json(_as_json(analysis, chosen, operators=analysis.operators(chosen), trace=analysis.profile.trace))
        elif by_operator:
            draw(render_operators(analysis, chosen))
        elif form is not None:
            rows = analysis.flat(sort=sort, phase=chosen) if own else analysis.tree(depth=depth, sort=sort, phase=chosen)
            _write_table(analysis, form, rows, chosen)
        elif as_json:
            rows = analysis.flat(sort=sort, phase=chosen) if own else analysis.tree(depth=depth, sort=sort, phase=chosen)
            write_json(_as_json(analysis, chosen, rows=rows))
        else:
            draw(render(analysis, depth=depth, sort=sort, own=own, phase=chosen))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RecursionError as error:
        raise UsageError("the modules are nested too deeply for a tree: give --depth or --flat") from error


def _write_table(analysis: Analysis, form: str, rows: tuple[Row, ...], phase: Phase | None) -> None:
    if form == "csv":
        text = csv_table(analysis, rows)
    else:
        text = markdown_table(analysis, rows, phase) if form == "markdown" else latex_table(analysis, rows, phase)
    write_lines(text.splitlines())


def _checked(phase: str, *, own: bool, depth: int, sort: str | None, by_operator: bool, memory: bool, figure: Path | None) -> Phase | None:
    """The phase, where the options go together."""
    if phase not in (*PHASES, "all"):
        raise UsageError(f"phase={phase!r}: give one of {', '.join(PHASES)}, or all")
    if own and depth != -1:
        raise UsageError(f"depth={depth}: --flat has no depth, give one of the two")
    if by_operator and (own or depth != -1 or sort):
        raise UsageError("--operators goes with --phase and --json, not with --depth, --sort or --flat")
    if memory and (own or depth != -1 or sort or by_operator or phase != "all"):
        raise UsageError("--memory goes with --figure and --json alone")
    if figure is not None and not memory:
        raise UsageError("--figure draws what --memory shows: give both")
    return next((each for each in PHASES if each == phase), None)


def _show_memory(analysis: Analysis, figure: Path | None, *, as_json: bool) -> None:
    save_memory(analysis.profile, figure)
    if as_json:
        write_json(_as_json(analysis, None, memory=analysis.profile.memory, checkpointed=analysis.checkpointed))
    else:
        draw(Group(header(analysis), "", render_memory(analysis), "", render_checkpointed(analysis.checkpointed)))
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
        "share_of": analysis.share_of(phase),
        "totals": analysis.totals,
        **listed,
        "uncounted": analysis.uncounted,
        "uncalled": analysis.uncalled,
        "notes": profile.notes,
    }

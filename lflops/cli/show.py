"""`lflops show` and `lflops html`: print a profile, or write it as an offline HTML file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from lflops.analysis.analysis import Analysis, analyze
from lflops.analysis.tree import SORT_KEYS, share_of
from lflops.cli.output import UsageError, draw, name_file, save_memory, write_json, write_lines
from lflops.cli.shared_options import Depth
from lflops.profile.records import PHASES, Phase
from lflops.report.explanation import profile_at, windows_in
from lflops.report.first_screen.screen import FirstScreen, first_screen
from lflops.report.first_screen.text import first_screen_rows
from lflops.report.first_screen.window import window_summary
from lflops.report.html import page, page_of_run, write
from lflops.report.module_columns import FORMATS, csv_table, latex_table, markdown_table
from lflops.report.payload.payload import ledger_in, payload
from lflops.report.summary_facts import report_of
from lflops.report.terminal.first_screen import render_rows
from lflops.report.terminal.memory import render_checkpointed, render_memory
from lflops.report.terminal.modules import header, render, render_operators

_JSON = (
    "Print one JSON object with the keys run, phase, first_screen, report, pace (figures of the "
    "unprofiled steps), utilization, share_of, totals (by phase), rows, unsupported (operators "
    "without a formula), uncalled (modules that did not run) and notes. `share_of` is `macs`, or "
    "`flops` if the phase has no MACs. Each row is a module. It has the exact counts and the "
    "seconds of each phase, and its submodules in the list `children`. A row with `repeat` stands "
    "for several identical modules: it has the counts of one module, and the mean time over all of "
    "these modules. With --operators, the object has `operators` and `trace` instead of `rows`. "
    "With --memory, it has `memory` and `checkpointed` (a row for each block) instead of `rows`. "
    "Unknown values are null."
)


def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A profile's JSON file, or the folder of a training run. From a folder, the "
            "profile of the last window is read.",
        ),
    ],
    *,
    depth: Depth = -1,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help=f"Sort the rows by this key: {', '.join(SORT_KEYS)}. The largest value in the "
            "shown phase comes first. Names are sorted from A to Z.",
        ),
    ] = None,
    flat: Annotated[
        bool,
        typer.Option(
            "--flat",
            help="Show a list of all modules instead of a tree. The module with the most MACs, "
            "without its submodules, comes first.",
        ),
    ] = False,
    by_operator: Annotated[
        bool,
        typer.Option(
            "--operators",
            help="Show operators instead of modules. The operator with the most MACs comes first.",
        ),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Show memory instead of modules: the peak of live memory by category, module and "
            "tensor, and the memory that activation checkpointing would save.",
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Draw the live memory over the step into this file: .png, .svg or .pdf. Only with "
            "--memory.",
        ),
    ] = None,
    phase: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Show the times, work and shares of one phase: {', '.join(PHASES)}. Default: "
            "all.",
        ),
    ] = "all",
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Print only the table of modules, as markdown, latex or csv. csv has exact "
            "numbers in SI units.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Print a profile: where the time of a step goes, its phases, the totals and the modules."""
    chosen = _phase(phase)
    _check_views(
        flat=flat, depth=depth, sort=sort, by_operator=by_operator, memory=memory, phase=chosen
    )
    if figure is not None and not memory:
        raise UsageError("--figure draws live memory: pass --memory as well")
    if form is not None:
        _check_format(form, is_table=not (as_json or by_operator or memory))
    analysis = analyze(profile_at(file))
    of_run = file.is_dir()
    ledger = None
    if of_run:
        ledger = ledger_in(file)
    screen = first_screen(window_summary(analysis), ledger)
    try:
        if memory:
            _show_memory(analysis, screen, figure, as_json=as_json)
        elif by_operator:
            _show_operators(analysis, screen, chosen, as_json=as_json)
        elif form is not None or as_json:
            _write_modules(analysis, screen, chosen, form, depth=depth, sort=sort, flat=flat)
        else:
            table = render(analysis, depth=depth, sort=sort, flat=flat, phase=chosen, of_run=of_run)
            if of_run:
                draw(Group(render_rows(first_screen_rows(screen, ledger)), "", table))
            else:
                draw(table)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RecursionError as error:
        raise UsageError(
            "the modules are nested too deeply for a tree: pass --depth or --flat"
        ) from error


def _check_views(
    *,
    flat: bool,
    depth: int,
    sort: str | None,
    by_operator: bool,
    memory: bool,
    phase: Phase | None,
) -> None:
    """Raise an error if options that belong to different tables are combined."""
    is_table = flat or depth != -1 or sort is not None
    if flat and depth != -1:
        raise UsageError(
            f"depth={depth}: --flat prints a list, and only a tree has a depth: "
            "pass only one of --depth and --flat"
        )
    if by_operator and is_table:
        raise UsageError(
            "--operators cannot be combined with --depth, --sort or --flat, because they apply to "
            "the table of modules: leave them out"
        )
    if memory and (is_table or by_operator or phase is not None):
        raise UsageError(
            "--memory can only be combined with --figure and --json: leave the other options out"
        )


def _check_format(form: str, *, is_table: bool) -> None:
    """Check `--format`. `is_table` is true if the command prints the table of modules."""
    if form not in FORMATS:
        raise UsageError(f"format={form!r}: pass one of {', '.join(FORMATS)}")
    if not is_table:
        raise UsageError(
            "--format cannot be combined with --json, --operators or --memory, because it prints "
            "only the table of modules: leave --format out"
        )


def _phase(name: str) -> Phase | None:
    """Return the phase that `--phase` names, or `None` for `all`."""
    if name == "all":
        return None
    for phase in PHASES:
        if phase == name:
            return phase
    raise UsageError(f"phase={name!r}: pass one of {', '.join(PHASES)}, or all")


def _write_modules(
    analysis: Analysis,
    screen: FirstScreen,
    phase: Phase | None,
    form: str | None,
    *,
    depth: int,
    sort: str | None,
    flat: bool,
) -> None:
    """Write the table of modules in one of `FORMATS`, or as JSON if `form` is `None`."""
    if flat:
        rows = analysis.flat(sort=sort, phase=phase)
    else:
        rows = analysis.tree(depth=depth, sort=sort, phase=phase)
    if form is None:
        write_json(_as_json(analysis, screen, phase, rows=rows))
    elif form == "markdown":
        write_lines(markdown_table(analysis, rows, phase).splitlines())
    elif form == "latex":
        write_lines(latex_table(analysis, rows, phase).splitlines())
    else:
        write_lines(csv_table(analysis, rows).splitlines())


def _show_operators(
    analysis: Analysis, screen: FirstScreen, phase: Phase | None, *, as_json: bool
) -> None:
    if as_json:
        operators = analysis.operators(phase)
        write_json(
            _as_json(analysis, screen, phase, operators=operators, trace=analysis.profile.trace)
        )
    else:
        draw(render_operators(analysis, phase))


def _show_memory(
    analysis: Analysis, screen: FirstScreen, figure: Path | None, *, as_json: bool
) -> None:
    save_memory(analysis.profile, figure)
    memory = analysis.profile.memory
    checkpointed = analysis.checkpointed
    if as_json:
        write_json(_as_json(analysis, screen, None, memory=memory, checkpointed=checkpointed))
    else:
        blocks = render_checkpointed(checkpointed)
        draw(Group(header(analysis), "", render_memory(analysis), "", blocks))
    name_file(figure, as_json=as_json)


def _as_json(
    analysis: Analysis, screen: FirstScreen, phase: Phase | None, **listed: object
) -> dict[str, object]:
    profile = analysis.profile
    return {
        "schema_version": profile.schema_version,
        "run": profile.run,
        "phase": phase or "all",
        "first_screen": screen,
        "report": report_of(analysis),
        "pace": analysis.step_times,
        "utilization": analysis.utilization,
        "share_of": share_of(profile, phase),
        "totals": analysis.totals,
        **listed,
        "unsupported": analysis.unsupported,
        "uncalled": analysis.uncalled,
        "notes": profile.notes,
    }


def html(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="A profile's JSON file, or the folder of a training run. For a folder, the page "
            "shows the ledger and the last windows of the run. For several files, the page starts "
            "with a comparison of the last two.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            help="Write the page to this file. Default: the name of FILE, with .html instead of "
            ".json. For several files, it is the name of the last FILE, with .compare.html instead "
            "of .json. For a folder, it is run.html in this folder.",
        ),
    ] = None,
    data: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the data of the page instead of writing the page. The data is one JSON "
            "object, or a list of objects for several files. Unknown values are null.",
        ),
    ] = False,
) -> None:
    """Write a profile, or several profiles to compare, as one HTML file.

    The file needs no server and no network.
    """
    if data and out is not None:
        raise UsageError(
            f"out={str(out)!r}: --json writes no HTML file, so pass only one of --out and --json"
        )
    path = out or _default_page(files)
    if path.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"out={str(path)!r} is one of the profiles: pass another path with --out")
    if len(files) == 1 and files[0].is_dir() and not data:
        text = page_of_run(windows_in(files[0]), ledger_in(files[0]))
        write(text, path, is_named=out is not None)
        typer.echo(path)
        return
    analyses = [analyze(profile_at(file)) for file in files]
    if not data:
        text = page(*analyses, names=_distinct_names(files))
        write(text, path, is_named=out is not None)
        typer.echo(path)
    elif len(analyses) == 1:
        write_json(payload(analyses[0]))
    else:
        write_json(list(map(payload, analyses)))


def _default_page(files: list[Path]) -> Path:
    """Return the path of the HTML file to write if the user does not pass `--out`."""
    if files[-1].is_dir():
        return files[-1] / "run.html"
    if len(files) == 1:
        return files[0].with_suffix(".html")
    return files[-1].with_suffix(".compare.html")


def _distinct_names(files: list[Path]) -> list[str]:
    """Return a name for each file: the file name, or the path if two files have the same name.

    If a path is passed twice, a number is added to the second name. For a single file, the result
    is empty.
    """
    if len(files) == 1:
        return []
    shown = [file.name for file in files]
    if len(set(shown)) < len(shown):
        shown = [str(file) for file in files]
    names: list[str] = []
    for index, name in enumerate(shown):
        is_first = shown.index(name) == index
        if is_first:
            names.append(name)
        else:
            names.append(f"{name} ({index + 1})")
    return names

"""Define the rows and columns of the table of modules, and format it as Markdown, LaTeX and CSV.

The most important columns come first, so the last columns can be left out. Markdown and LaTeX have
the same columns as the terminal. CSV has exact numbers in SI units.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.tree import TIMED_PHASES, ModuleRow, has_times, share_of
from lflops.profile.module_names import last_part, plain
from lflops.profile.records import PHASES, Phase
from lflops.profile.series import multiplied, ratio
from lflops.report.text import WORDS, times_mark

_SHORT: dict[str | None, str] = {None: "total"} | WORDS["short"]


class ModuleLine(NamedTuple):
    """A line of the table of modules.

    Attributes:
        row: The module. If the line stands for several identical modules, one of these modules.
        times: Number of modules that the line stands for. The table shows sums over these modules.
        path: The full name. For identical modules, it contains the range of their indices, such as
            `layers.0…11.mlp`.
    """

    row: ModuleRow
    times: int
    path: str


class ModuleColumn(NamedTuple):
    """A column of the table of modules.

    Attributes:
        heading: The heading, which can contain one line break.
        cell: A function that returns the text of the column in a given line.
    """

    heading: str
    cell: Callable[[ModuleLine], str]


def module_lines(
    rows: Iterable[ModuleRow], times: int = 1, above: str = ""
) -> Iterator[ModuleLine]:
    """Yield the lines of the table, in which a module comes directly before its submodules.

    Args:
        rows: The root of the module tree or, in a recursive call, the children of one module.
        times: Number of identical modules that the line of the parent stands for.
        above: The path of the parent.
    """
    for row in rows:
        path = row.name
        if not row.is_self:
            path = f"{above}.{_label(row)}".strip(".")
        yield ModuleLine(row, times * row.times, path)
        yield from module_lines(row.children, times * row.times, path)


def _label(row: ModuleRow) -> str:
    """Format the last part of a module's dotted name.

    For several identical modules, return the range of their indices, such as `0…11`. If their names
    differ in more than the index, up to three names are listed, such as `q, k, v`.
    """
    if row.repeat is None:
        return row.label
    labels = []
    stems = set()
    for name in row.names:
        label = last_part(name)
        labels.append(label)
        stems.add(label.rstrip("0123456789"))
    is_range = len(stems) == 1
    if is_range or len(labels) > 3:
        return f"{labels[0]}…{labels[-1]}"
    return ", ".join(labels)


def module_columns(analysis: Analysis, phase: Phase | None) -> list[ModuleColumn]:
    """Return the columns with the time and work of a phase. `None` means all phases together."""
    columns: list[ModuleColumn] = []
    if has_times(analysis.profile, phase):
        columns += _time(analysis, phase)
    columns += _work(analysis, phase)
    return columns


def _time(analysis: Analysis, phase: Phase | None) -> Iterator[ModuleColumn]:
    step = analysis.step_times.mean

    def share_of_step(line: ModuleLine) -> str:
        share = line.row.time_share
        if step:
            share = ratio(line.row.time(phase), step)
        return units.percent(multiplied(share, line.times))

    yield _duration(phase)
    heading = f"% of {_SHORT[phase]}\ntime"
    if step:
        heading = f"% of\n{analysis.evidence.unit}"
    yield ModuleColumn(heading, share_of_step)
    timed = [each for each in TIMED_PHASES if has_times(analysis.profile, each)]
    if phase is None and len(timed) > 1:
        yield from map(_duration, timed)


def _work(analysis: Analysis, phase: Phase | None) -> Iterator[ModuleColumn]:
    by_flops = share_of(analysis.profile, phase) == "flops"
    metric = "FLOPs" if by_flops else "MACs"
    if by_flops:
        yield _flops(phase)
    else:
        yield _macs(phase)
    yield ModuleColumn("params", lambda line: units.count(line.row.parameters * line.times))
    yield ModuleColumn(
        f"% of\n{metric}", lambda line: units.percent(multiplied(line.row.share, line.times))
    )
    if not by_flops and has_times(analysis.profile, phase):
        yield _rate(analysis, phase)
    counted = [each for each, counts in analysis.totals.items() if counts.macs]
    if phase is None and len(counted) > 1:
        yield from map(_macs, counted)
    if not by_flops:
        yield _flops(phase)
    yield ModuleColumn(
        f"{_SHORT[phase]} bytes\nmoved",
        lambda line: units.size(line.row.one(phase).bytes_moved * line.times),
    )


def _duration(phase: Phase | None) -> ModuleColumn:
    return ModuleColumn(
        f"{_SHORT[phase]}\ntime",
        lambda line: units.duration(multiplied(line.row.time(phase), line.times)),
    )


def _macs(phase: Phase | None) -> ModuleColumn:
    return ModuleColumn(
        f"{_SHORT[phase]}\nMACs", lambda line: units.count(line.row.one(phase).macs * line.times)
    )


def _flops(phase: Phase | None) -> ModuleColumn:
    return ModuleColumn(
        f"{_SHORT[phase]}\nFLOPs", lambda line: units.count(line.row.one(phase).flops * line.times)
    )


def _rate(analysis: Analysis, phase: Phase | None) -> ModuleColumn:
    """Return the column with the FLOP/s.

    The text of a value above the peak of the chip says so, because such a value cannot be right.
    """
    ceilings = analysis.roofline.ceilings
    peaks = [ceiling.flops_per_second for ceiling in ceilings if ceiling.is_reference]
    peak = max(peaks, default=None)
    return ModuleColumn(
        f"{_SHORT[phase]}\nFLOP/s",
        lambda line: units.rate(line.row.flops_per_second(phase), peak=peak),
    )


FORMATS = ("markdown", "latex", "csv")

_LATEX = str.maketrans(WORDS["latex"])

# A name that starts with one of these characters would be a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def markdown_table(analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None) -> str:
    """Format the table as GitHub Markdown, with all columns."""
    head, *lines = table_cells(analysis, rows, phase)
    written = _markdown_row(head) + _markdown_row(["---", "---", *["--:"] * (len(head) - 2)])
    for line in lines:
        written += _markdown_row(cell.replace("|", "\\|") for cell in line)
    return written


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def latex_table(analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None) -> str:
    """Format the table as a LaTeX tabular with booktabs, with all columns."""
    head, *lines = table_cells(analysis, rows, phase)
    columns = "ll" + "r" * (len(head) - 2)
    parts = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        _latex_row(head),
        "\\midrule",
        *map(_latex_row, lines),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "".join(f"{part}\n" for part in parts)


def _latex_row(cells: Iterable[str]) -> str:
    escaped = [cell.translate(_LATEX) for cell in cells]
    return f"{' & '.join(escaped)} \\\\"


def csv_table(analysis: Analysis, rows: Iterable[ModuleRow]) -> str:
    """Format the table as CSV, with exact numbers.

    If a line stands for several identical modules, its counts and seconds are sums over these
    modules. Unknown values are empty.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    heading = [
        "module",
        "class",
        "modules",
        "calls",
        "parameters",
        "total_seconds",
        "share_of_step",
    ]
    for phase in PHASES:
        for field in ("macs", "flops", "bytes_moved", "seconds"):
            heading.append(f"{phase}_{field}")
    writer.writerow(heading)
    for line in module_lines(rows):
        writer.writerow(_csv_row(analysis, line))
    return written.getvalue()


def _csv_row(analysis: Analysis, line: ModuleLine) -> list[str | float | None]:
    row = line.row
    total = multiplied(row.time(None), line.times)
    share = None
    if total is not None:
        share = analysis.step_times.share(total)
    cells: list[str | float | None] = [
        _without_formula(line.path),
        _without_formula(row.class_name),
        line.times,
        row.calls * line.times,
        row.parameters * line.times,
        total,
        share,
    ]
    for phase in PHASES:
        counts = row.phases[phase] * line.times
        seconds = multiplied(row.seconds[phase], line.times)
        cells += [counts.macs, counts.flops, counts.bytes_moved, seconds]
    return cells


def _without_formula(name: str) -> str:
    shown = plain(name)
    if shown.startswith(_FORMULA):
        return f"'{shown}"
    return shown


def table_cells(
    analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None
) -> Iterator[list[str]]:
    """Yield the headings of the columns, then the cells of each line of the table."""
    columns = module_columns(analysis, phase)
    headings = ["module", "class"]
    for column in columns:
        headings.append(" ".join(column.heading.split()))
    yield headings
    for line in module_lines(rows):
        name = plain(f"{line.path or '(model)'}{times_mark(line.times)}")
        cells = [name, plain(line.row.class_name)]
        for column in columns:
            cells.append(column.cell(line))
        yield cells

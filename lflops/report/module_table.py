"""The lines and columns of a table of modules.

The column that matters most comes first, and the last ones can be left out.

For a paper or a program, too: Markdown and LaTeX with the text's columns, CSV with exact numbers in
SI units.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.tree import TIMED_PHASES, ModuleRow, has_times, share_of
from lflops.profile.module_names import plain
from lflops.profile.records import PHASES, Phase
from lflops.report.text import WORDS

_SHORT: dict[str | None, str] = {None: "total"} | WORDS["short"]


class ModuleLine(NamedTuple):
    """A row of the table."""

    # one module, or one of several equal ones
    row: ModuleRow
    # how many modules the line stands for; its figures are those of all of them
    times: int
    # the whole name, with both ends of what repeats, as `layers.0…11.mlp`
    path: str


class ModuleColumn(NamedTuple):
    """A column: its heading in one or two lines, and the text of a cell."""

    heading: str
    cell: Callable[[ModuleLine], str]


def module_lines(
    rows: Iterable[ModuleRow], times: int = 1, above: str = ""
) -> Iterator[ModuleLine]:
    """A line for each row of a tree, each before those below it.

    `times` is how many modules the row above stands for, `above` its path.
    """
    for row in rows:
        every = times * row.times
        path = row.name if row.is_self else f"{above}.{_last(row)}".strip(".")
        yield ModuleLine(row, every, path)
        yield from module_lines(row.children, every, path)


def _last(row: ModuleRow) -> str:
    """The last part of the name: both ends of a run of numbers, or up to three other names."""
    if row.repeat is None:
        return row.label
    labels = [name.rpartition(".")[2] for name in row.names]
    numbered = len({label.rstrip("0123456789") for label in labels}) == 1
    return f"{labels[0]}…{labels[-1]}" if numbered or len(labels) > 3 else ", ".join(labels)


def module_columns(analysis: Analysis, phase: Phase | None) -> list[ModuleColumn]:
    """Time and work of a phase, or of all phases together.

    With the share of the step first, where there are times.
    """
    timed = list(_time(analysis, phase)) if has_times(analysis.profile, phase) else []
    return [*timed, *_work(analysis, phase)]


def _time(analysis: Analysis, phase: Phase | None) -> Iterator[ModuleColumn]:
    step = analysis.step_times.mean
    yield ModuleColumn(f"{_SHORT[phase]}\ntime", partial(_duration, phase))
    if step:
        one = "step" if analysis.profile.run.kind == "training" else "pass"
        yield ModuleColumn(
            f"% of\n{one}",
            lambda line: units.percent(multiplied(line.row.time(phase), line.times / step)),
        )
    else:
        yield ModuleColumn(
            f"% of {_SHORT[phase]}\ntime",
            lambda line: units.percent(multiplied(line.row.time_share, line.times)),
        )
    timed = [each for each in TIMED_PHASES if has_times(analysis.profile, each)]
    if phase is None and len(timed) > 1:
        for each in timed:
            yield ModuleColumn(f"{_SHORT[each]}\ntime", partial(_duration, each))


def _work(analysis: Analysis, phase: Phase | None) -> Iterator[ModuleColumn]:
    short, by_flops = _SHORT[phase], share_of(analysis.profile, phase) == "flops"
    share = ModuleColumn(
        f"% of\n{'FLOPs' if by_flops else 'MACs'}",
        lambda line: units.percent(multiplied(line.row.share, line.times)),
    )
    flops = ModuleColumn(
        f"{short}\nFLOPs", lambda line: units.count(line.row.one(phase).flops * line.times)
    )
    yield flops if by_flops else ModuleColumn(f"{short}\nMACs", partial(_macs, phase))
    yield ModuleColumn("params", lambda line: units.count(line.row.parameters * line.times))
    yield share
    if not by_flops and has_times(analysis.profile, phase):
        highest = max(
            (each.flops_per_second for each in analysis.roofline.ceilings if each.is_judged_by),
            default=None,
        )
        yield ModuleColumn(
            f"{short}\nFLOP/s",
            lambda line: units.rate(line.row.flops_per_second(phase), peak=highest),
        )
    ran = [each for each, counts in analysis.totals.items() if counts.macs]
    if phase is None and len(ran) > 1:
        for each in ran:
            yield ModuleColumn(f"{_SHORT[each]}\nMACs", partial(_macs, each))
    if not by_flops:
        yield flops
    yield ModuleColumn(
        f"{short} bytes\nmoved",
        lambda line: units.size(line.row.one(phase).bytes_moved * line.times),
    )


def _macs(phase: Phase | None, line: ModuleLine) -> str:
    return units.count(line.row.one(phase).macs * line.times)


def _duration(phase: Phase | None, line: ModuleLine) -> str:
    return units.duration(multiplied(line.row.time(phase), line.times))


def multiplied(value: float | None, factor: float) -> float | None:
    """The product; `None` where the value is unknown."""
    return None if value is None else value * factor


FORMATS = ("markdown", "latex", "csv")

_LATEX = str.maketrans(WORDS["latex"])
_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    # a name that begins so would be a formula to a spreadsheet
)


def markdown_table(analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None) -> str:
    """The table in GitHub's Markdown, all columns."""
    head, *lines = _cells(analysis, rows, phase)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---", "---", *("--:" for _ in head[2:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *escaped))


def latex_table(analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None) -> str:
    """The table as a tabular of the package booktabs, all columns."""
    head, *lines = (
        [cell.translate(_LATEX) for cell in line] for line in _cells(analysis, rows, phase)
    )
    body = [f"{' & '.join(line)} \\\\" for line in lines]
    columns = "ll" + "r" * (len(head) - 2)
    begin = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]
    return "".join(f"{line}\n" for line in (*begin, *body, "\\bottomrule", "\\end{tabular}"))


def csv_table(analysis: Analysis, rows: Iterable[ModuleRow]) -> str:
    """A line for each row: exact counts and seconds of all the modules that it stands for.

    Nothing where unknown.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    measured = [
        f"{phase}_{field}"
        for phase in PHASES
        for field in ("macs", "flops", "bytes_moved", "seconds")
    ]
    writer.writerow(
        [
            "module",
            "class",
            "modules",
            "calls",
            "parameters",
            "total_seconds",
            "share_of_step",
            *measured,
        ]
    )
    for line in module_lines(rows):
        row, total = line.row, multiplied(line.row.time(None), line.times)
        share = None if total is None else analysis.step_times.share(total)
        figures = [line.times, row.calls * line.times, row.parameters * line.times, total, share]
        for phase in PHASES:
            counts = row.phases[phase] * line.times
            figures += [
                counts.macs,
                counts.flops,
                counts.bytes_moved,
                multiplied(row.seconds[phase], line.times),
            ]
        writer.writerow([_text(line.path), _text(row.class_name), *figures])
    return written.getvalue()


def _cells(
    analysis: Analysis, rows: Iterable[ModuleRow], phase: Phase | None
) -> Iterator[list[str]]:
    columns = module_columns(analysis, phase)
    yield ["module", "class", *(" ".join(column.heading.split()) for column in columns)]
    for line in module_lines(rows):
        times = f" ×{line.times}" if line.times > 1 else ""
        yield [
            plain(f"{line.path or '(model)'}{times}"),
            plain(line.row.class_name),
            *(column.cell(line) for column in columns),
        ]


def _text(name: str) -> str:
    shown = plain(name)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown

"""The table of modules for a paper or a program: Markdown and LaTeX with the text's columns, CSV with exact numbers in SI units."""

import csv
import io
from collections.abc import Iterable, Iterator

from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import Row
from lflops.profile.records import PHASES, Phase
from lflops.report.lines.text import plain
from lflops.report.tables.module_columns import module_columns, module_lines, multiplied

FORMATS = ("markdown", "latex", "csv")

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "…": r"\ldots{}",
        "×": r"$\times$",
        "µ": r"$\mu$",
        "<": "$<$",
        ">": "$>$",
        "–": "--",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a name that begins so would be a formula to a spreadsheet


def markdown_table(analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> str:
    """The table in GitHub's Markdown, all columns."""
    head, *lines = _cells(analysis, rows, phase)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---", "---", *("--:" for _ in head[2:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *escaped))


def latex_table(analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> str:
    """The table as a tabular of the package booktabs, all columns."""
    head, *lines = ([cell.translate(_LATEX) for cell in line] for line in _cells(analysis, rows, phase))
    body = [f"{' & '.join(line)} \\\\" for line in lines]
    columns = "ll" + "r" * (len(head) - 2)
    begin = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule", f"{' & '.join(head)} \\\\", "\\midrule"]
    return "".join(f"{line}\n" for line in (*begin, *body, "\\bottomrule", "\\end{tabular}"))


def csv_table(analysis: Analysis, rows: Iterable[Row]) -> str:
    """A line for each row: exact counts and seconds of all the modules that it stands for; nothing where unknown."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    measured = [f"{phase}_{field}" for phase in PHASES for field in ("macs", "flops", "bytes_moved", "seconds")]
    writer.writerow(["module", "class", "modules", "calls", "parameters", "total_seconds", "share_of_step", *measured])
    for line in module_lines(rows):
        row, total = line.row, multiplied(line.row.time(None), line.times)
        share = None if total is None else analysis.step_times.share(total)
        figures = [line.times, row.calls * line.times, row.parameters * line.times, total, share]
        for phase in PHASES:
            counts = row.phases[phase] * line.times
            figures += [counts.macs, counts.flops, counts.bytes_moved, multiplied(row.seconds[phase], line.times)]
        writer.writerow([_text(line.path), _text(row.kind), *figures])
    return written.getvalue()


def _cells(analysis: Analysis, rows: Iterable[Row], phase: Phase | None) -> Iterator[list[str]]:
    columns = module_columns(analysis, phase)
    yield ["module", "class", *(" ".join(column.heading.split()) for column in columns)]
    for line in module_lines(rows):
        times = f" ×{line.times}" if line.times > 1 else ""
        yield [plain(f"{line.path or '(model)'}{times}"), plain(line.row.kind), *(column.cell(line) for column in columns)]


def _text(name: str) -> str:
    shown = plain(name)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown

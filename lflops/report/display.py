"""Define how profiles, explanations, ledgers and diffs look in `print` and in notebooks."""

from typing import Any

from lflops.analysis.analysis import Analysis, analyze
from lflops.analysis.compare.diff import Diff
from lflops.display import Table
from lflops.ledger.account import Ledger
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.report.diff import headline
from lflops.report.explanation import Explanation, lines_of
from lflops.report.ledger import ledger_lines
from lflops.report.log_text import log_text
from lflops.report.module_columns import table_cells
from lflops.report.text import labelled

DEPTH = 2
"""Number of module levels in a printed profile."""

MOST_ROWS = 40
"""Maximum number of modules in a printed profile."""


def parts_of(value: Any) -> list[str | Table]:
    """Return the texts and tables that are printed for a profile, explanation, ledger or diff."""
    if isinstance(value, Profile):
        return _parts_of_profile(value)
    if isinstance(value, Explanation):
        return [labelled(lines_of(value))]
    if isinstance(value, Ledger):
        return ["\n".join(ledger_lines(value))]
    if isinstance(value, Diff):
        return ["\n".join(headline(value))]
    raise TypeError(f"there is no report for the type {type(value).__name__}")


def _parts_of_profile(profile: Profile) -> list[str | Table]:
    analysis = analyze(profile)
    table = _table(analysis, depth=DEPTH, sort=None, phase=None)
    parts: list[str | Table] = [log_text(analysis), table]
    left_out = len(table.rows) - MOST_ROWS
    if left_out > 0:
        parts[1] = table._replace(rows=table.rows[:MOST_ROWS])
        parts.append(
            f"{left_out} more rows; to show all rows, use print(profile.table(depth={DEPTH}))"
        )
    return parts


def module_table(profile: Profile, *, depth: int, sort: str | None, phase: Phase | None) -> Table:
    """Return the modules of a profile as a table."""
    return _table(analyze(profile), depth=depth, sort=sort, phase=phase)


def _table(analysis: Analysis, *, depth: int, sort: str | None, phase: Phase | None) -> Table:
    rows = analysis.tree(depth=depth, sort=sort, phase=phase)
    head, *cells = table_cells(analysis, rows, phase)
    return Table(tuple(head), tuple(tuple(row) for row in cells))

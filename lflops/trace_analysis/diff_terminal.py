"""Two traces on a terminal: what changed in words, then tables of the device's states, idle time, categories, operators and kernels."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.compare.regression_limits import Limit
from lflops.report.lines.text import plain
from lflops.report.terminal.tables import FittedTable, margin, text
from lflops.trace_analysis.compare import TimeChange, TraceDiff
from lflops.trace_analysis.sentences import CAUSES, STATES, kernel_name

_NAME = 28
_LISTED = 3
_SMALL = 0.01
_TIMES = 9


def trace_headline(diff: TraceDiff) -> Iterator[str]:
    """How much longer the step or the window takes, whether that is noise, and where most of the change is."""
    what = "A step" if diff.per_step else "The window"
    before, after = (units.duration(each / 1e9) for each in (diff.window.before, diff.window.after))
    noise = "" if diff.is_beyond_noise is None or diff.is_beyond_noise else ", within the spread of the steps"
    yield f"{what} takes {after}, before {before} ({_signed(diff.window)}{noise})."
    states = [row for row in diff.states if abs(row.change) > _SMALL * diff.window.before]
    if states:
        yield "The device: " + ", ".join(f"{STATES[row.name]} {_more(row)}" for row in states) + "."
    moved = [row for row in diff.operators[:_LISTED] if abs(row.change) > _SMALL * diff.window.before]
    if moved:
        yield "Operators: " + ", ".join(f"{plain(row.name.removeprefix('aten::'))} {_more(row)}" for row in moved) + "."


def _more(row: TimeChange) -> str:
    return f"{'+' if row.change > 0 else '−'}{units.duration(abs(row.change) / 1e9)}"


def _signed(row: TimeChange) -> str:
    if not row.before or not row.after:
        return "new" if row.after else "gone" if row.before else ""
    share = row.change / row.before
    if share > _TIMES:
        return f"×{row.after / row.before:.0f}"
    return f"{'+' if share > 0 else '−'}{units.percent(abs(share))}" if share else "no change"


def render_trace_diff(diff: TraceDiff, limits: Iterable[Limit] = (), *, top: int) -> RenderableType:
    """Two traces as text for a terminal.

    Args:
        diff: What changed.
        limits: The limits that the second trace is checked against.
        top: How many lines of a table.
    """
    first, *others = trace_headline(diff)
    table = margin()
    if diff.hardware[0] != diff.hardware[1]:
        table.add_row("device", text(f"{plain(diff.hardware[0])} → {plain(diff.hardware[1])}", "yellow"))
    if any(each is not None for each in diff.mfu):
        table.add_row("MFU", text(" → ".join(units.of_peak(each) for each in diff.mfu)))
    if any(each is not None for each in diff.allocated_bytes):
        table.add_row("allocator's peak", text(" → ".join(units.size(each) for each in diff.allocated_bytes)))
    for limit in limits:
        name = limit.name.replace("_", " ")
        table.add_row("limit broken" if limit.broken else "limit held", text(f"{name}: {_found(limit)}", "red" if limit.broken else ""))
    of = "of a step" if diff.per_step else "of the window"
    groups: list[tuple[str, Sequence[TimeChange], dict[str, str]]] = [
        (f"device, {of}", diff.states, dict(STATES)),
        ("idle, lost to", diff.idle, {cause: label for cause, (label, _) in CAUSES.items()}),
        ("by category", diff.categories, {}),
        ("operators, own time", diff.operators, {}),
        ("kernels", diff.kernels, {row.name: kernel_name(row.name) for row in diff.kernels}),
    ]
    tables = [("", _table(heading, rows, names, top)) for heading, rows, names in groups if rows]
    blocks: list[RenderableType] = [text(first, "bold"), *(text(line) for line in others)]
    if table.row_count:
        blocks += ["", table]
    return Group(*blocks, *(part for each in tables for part in each))


def _found(limit: Limit) -> str:
    if limit.name == "max_memory":
        return f"{units.size(limit.found)}, {units.size(limit.allowed)} allowed"
    return f"{units.percent(limit.found)}, {units.percent(limit.allowed)} {'at least' if limit.name == 'min_mfu' else 'allowed'}"


def _table(heading: str, rows: Sequence[TimeChange], names: dict[str, str], top: int) -> RenderableType:
    shown = rows[:top]
    columns = {
        "before": [units.duration(row.before / 1e9) for row in shown],
        "after": [units.duration(row.after / 1e9) for row in shown],
        "change": [_more(row) if row.change else "0 s" for row in shown],
        "relative": [_signed(row) for row in shown],
    }
    labels = [names.get(row.name, row.name.removeprefix("aten::")) for row in shown]
    table = FittedTable(heading, labels, columns, room=_NAME)
    return table if len(shown) == len(rows) else Group(table, text(f"{len(rows) - len(shown)} more", "dim"))

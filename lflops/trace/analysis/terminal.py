"""Draw analyzed traces on a terminal: one trace, several ranks, a roofline or a comparison."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analysis.compare.diff import Limit
from lflops.profile.module_names import plain
from lflops.report.terminal.tables import FittedTable, margin, text
from lflops.report.text import kernel_name
from lflops.trace.analysis.collectives import RankSkew
from lflops.trace.analysis.compare import TimeChange, TraceDiff
from lflops.trace.analysis.operators import ShapeTimes
from lflops.trace.analysis.sentences import (
    CAUSE_LABELS,
    STATES,
    TraceTable,
    facts,
    ranks_tables,
    ranks_verdict,
    remarks,
    shapes_table,
    tables,
    verdict,
)
from lflops.trace.analysis.summary import TraceSummary
from lflops.trace.analysis.text import short_operator_name

_NAME_WIDTH = 28
_OVER_ROOFLINE = 1.05
"""If an operator is above this share of the roofline, a note explains its high speed."""

_LISTED = 3
"""Maximum number of operators that the headline of a comparison names."""
_SMALL = 0.01
"""The headline of a comparison leaves out changes below this share of the step."""
_TIMES = 9
"""If a value grows by more than this multiple, the change is shown as a factor such as ×12.

Other changes are shown as a percentage.
"""

_MarginRow = tuple[str, RenderableType]


def render_trace(summary: TraceSummary, *, top: int) -> RenderableType:
    """Render the analysis of one trace. Tables have at most `top` rows."""
    parts = _sentences(verdict(summary))
    parts += ["", margin(facts(summary))]
    for table in tables(summary, top):
        parts += ["", _render_table(table)]
    below = list(remarks(summary))
    if below:
        parts += ["", margin(below)]
    return Group(*parts)


def _sentences(sentences: Iterable[str]) -> list[RenderableType]:
    """Render the first sentence in bold, and the other sentences below it."""
    first, *others = sentences
    return [text(first, "bold"), *map(text, others)]


def _render_table(table: TraceTable) -> RenderableType:
    width = min(max(map(len, table.names), default=_NAME_WIDTH), _NAME_WIDTH)
    if len(table.names) < 2:
        width = max(width, len(table.heading))
    parts: list[RenderableType] = [
        FittedTable(table.heading, table.names, table.columns, room=width),
        *map(text, table.notes),
    ]
    if table.left_out:
        parts.append(text(f"{table.left_out} more rows (--top {table.total} shows them)", "dim"))
    return Group(*parts)


def render_ranks(skew: RankSkew, *, top: int) -> RenderableType:
    """Render a sentence and tables about the time that ranks wait for each other."""
    parts: list[RenderableType] = [text(ranks_verdict(skew), "bold")]
    if skew.collectives:
        for table in ranks_tables(skew, top):
            parts += ["", _render_table(table)]
    return Group(*parts)


def render_trace_roofline(summary: TraceSummary, *, top: int) -> RenderableType:
    """Render a chip's roofline and a trace's operators.

    The operators are sorted by potential speed-up in descending order.
    """
    rows = sorted(summary.shapes, key=_potential_seconds, reverse=True)
    parts: list[RenderableType] = [margin([*facts(summary), *_rooflines(summary, rows)]), ""]
    if rows:
        parts.append(_render_table(shapes_table(rows, top, roof=True)))
    else:
        parts.append(text("The trace has no shapes: record it with record_shapes=True.", "yellow"))
    if any(map(_is_over_roofline, rows)):
        parts.append(
            text(
                "More than 100 % of the roofline usually means that data stayed in the cache.",
                "dim",
            )
        )
    return Group(*parts)


def _is_over_roofline(row: ShapeTimes) -> bool:
    return row.share is not None and row.share > _OVER_ROOFLINE


def _potential_seconds(row: ShapeTimes) -> float:
    """Return the seconds that an operator takes beyond its minimum time on the roofline."""
    if row.roof_seconds is None:
        return 0.0
    return row.device / 1e9 - row.roof_seconds


def _rooflines(summary: TraceSummary, rows: Iterable[ShapeTimes]) -> Iterator[_MarginRow]:
    chip = summary.hardware
    if chip is None:
        unknown = "unknown: pass --hardware NAME, with a name that `lflops hardware` lists"
        yield "roof", text(unknown, "yellow")
        return
    bandwidth = units.quantity(chip.bandwidth_bytes_per_second, "B/s")
    precisions = [row.precision for row in rows if row.macs]
    for precision in dict.fromkeys(precisions):
        peak = chip.peak_flops_per_second.get(precision or "")
        if peak is not None:
            rate = units.quantity(peak, "FLOP/s")
            yield "roof", f"{rate} in {precision}, {bandwidth}: {chip.name}"


def trace_headline(diff: TraceDiff) -> Iterator[str]:
    """Yield sentences that say how the time of a step, or of the whole trace, has changed.

    They also name the device states and the operators whose times have changed most.
    """
    subject = "A step" if diff.per_step else "The trace"
    before = units.duration(diff.window.before / 1e9)
    after = units.duration(diff.window.after / 1e9)
    noise = ""
    if diff.is_beyond_noise is False:
        noise = ", within the spread of the steps"
    yield f"{subject} takes {after} instead of {before} ({_relative(diff.window)}{noise})."
    states = _large_changes(diff, diff.states)
    if states:
        yield f"Changes on the device: {_changes_text(states, STATES)}."
    operators = _large_changes(diff, diff.operators[:_LISTED])
    if operators:
        yield f"Changes of operators: {_changes_text(operators, {})}."


def _changes_text(rows: Iterable[TimeChange], names: Mapping[str, str]) -> str:
    """Return changes as text, for example `mm +1.2 ms, idle −3 ms`."""
    changes = []
    for row in rows:
        name = names.get(row.name, plain(short_operator_name(row.name)))
        changes.append(f"{name} {_absolute(row)}")
    return ", ".join(changes)


def _large_changes(diff: TraceDiff, rows: Iterable[TimeChange]) -> list[TimeChange]:
    return [row for row in rows if abs(row.change) > _SMALL * diff.window.before]


def _sign(change: float) -> str:
    return "+" if change > 0 else "−"


def _absolute(row: TimeChange) -> str:
    if not row.change:
        return "0 s"
    return f"{_sign(row.change)}{units.duration(abs(row.change) / 1e9)}"


def _relative(row: TimeChange) -> str:
    if not row.before:
        return "new" if row.after else ""
    if not row.after:
        return "gone"
    share = row.change / row.before
    if not share:
        return "no change"
    if share > _TIMES:
        return f"×{row.after / row.before:.0f}"
    return f"{_sign(share)}{units.percent(abs(share))}"


def render_trace_diff(diff: TraceDiff, limits: Iterable[Limit] = (), *, top: int) -> RenderableType:
    """Render the changes between two traces, and limits for the second trace.

    Tables have at most `top` rows.
    """
    parts = _sentences(trace_headline(diff))
    above = [*_changed_facts(diff), *map(_limit_line, limits)]
    if above:
        parts += ["", margin(above)]
    per = "per step" if diff.per_step else "in the whole trace"
    kernels = {row.name: kernel_name(row.name) for row in diff.kernels}
    groups: list[tuple[str, Sequence[TimeChange], Mapping[str, str]]] = [
        (f"device, {per}", diff.states, STATES),
        ("idle time by cause", diff.idle, CAUSE_LABELS),
        ("device time by category", diff.categories, {}),
        ("operators, self time", diff.operators, {}),
        ("kernels", diff.kernels, kernels),
    ]
    for heading, rows, names in groups:
        if rows:
            parts += ["", _render_changes(heading, rows, names, top)]
    return Group(*parts)


def _changed_facts(diff: TraceDiff) -> Iterator[_MarginRow]:
    if diff.hardware[0] != diff.hardware[1]:
        yield "device", text(" → ".join(diff.hardware), "yellow")
    if diff.mfu != (None, None):
        yield "MFU", " → ".join(map(units.of_peak, diff.mfu))
    if diff.allocated_bytes != (None, None):
        yield "peak memory", " → ".join(map(units.size, diff.allocated_bytes))


def _limit_line(limit: Limit) -> _MarginRow:
    name = limit.name.replace("_", " ")
    if limit.name == "max_memory":
        figures = f"{units.size(limit.found)}, {units.size(limit.allowed)} allowed"
    elif limit.name == "min_mfu":
        figures = f"{units.percent(limit.found)}, at least {units.percent(limit.allowed)} required"
    else:
        figures = f"{units.percent(limit.found)}, {units.percent(limit.allowed)} allowed"
    if limit.is_broken:
        return "limit violated", text(f"{name}: {figures}", "red")
    return "within limit", text(f"{name}: {figures}")


def _render_changes(
    heading: str, rows: Sequence[TimeChange], names: Mapping[str, str], top: int
) -> RenderableType:
    shown = rows[:top]
    table = TraceTable(heading)
    for row in shown:
        cells = {
            "before": units.duration(row.before / 1e9),
            "after": units.duration(row.after / 1e9),
            "change": _absolute(row),
            "relative": _relative(row),
        }
        table.add(names.get(row.name, short_operator_name(row.name)), cells)
    drawn = FittedTable(heading, table.names, table.columns, room=_NAME_WIDTH)
    if len(shown) == len(rows):
        return drawn
    return Group(drawn, text(f"{len(rows) - len(shown)} more rows (--all shows them)", "dim"))

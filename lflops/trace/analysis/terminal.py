"""Traces on a terminal.

One with its verdict, timeline, idle time, steps, categories and kernels; several ranks; and two
compared.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analysis.compare.diff import Limit
from lflops.report.terminal.tables import FittedTable, margin, text
from lflops.report.text import kernel_name, plain
from lflops.trace.analysis.collectives import RankSkew
from lflops.trace.analysis.compare import TimeChange, TraceDiff
from lflops.trace.analysis.sentences import (
    CAUSES,
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

_NAME = 28
_OVER = 1.05


def render_trace(summary: TraceSummary, *, top: int) -> RenderableType:
    """One trace as text for a terminal; tables have at most `top` rows."""
    first, *others = verdict(summary)
    blocks: list[RenderableType] = [margin(facts(summary)), *map(_drawn, tables(summary, top))]
    if below := list(remarks(summary)):
        blocks.append(margin(below))
    return Group(
        text(first, "bold"), *map(text, others), *(part for block in blocks for part in ("", block))
    )


def _drawn(table: TraceTable) -> RenderableType:
    room = min(max(map(len, table.names), default=_NAME), _NAME)
    drawn = FittedTable(
        table.heading,
        table.names,
        table.columns,
        room=max(room, len(table.heading)) if len(table.names) < 2 else room,
    )
    more = (
        [text(f"{table.left_out} more (--top {table.total} shows them)", "dim")]
        if table.left_out
        else []
    )
    return Group(drawn, *map(text, table.notes), *more)


def render_ranks(skew: RankSkew, *, top: int) -> RenderableType:
    """How several ranks wait for each other."""
    blocks: list[RenderableType] = [text(ranks_verdict(skew), "bold")]
    if skew.collectives:
        blocks += [part for table in ranks_tables(skew, top) for part in ("", _drawn(table))]
    return Group(*blocks)


def render_trace_roofline(summary: TraceSummary, *, top: int) -> RenderableType:
    """The chip's roofs, and the operators of a trace below them, those first that would win the most time."""
    chip = summary.hardware
    rows = sorted(
        summary.shapes,
        key=lambda row: (
            -(row.device / 1e9 - (row.roof_seconds or 0.0)) if row.roof_seconds is not None else 0.0
        ),
    )
    above: list[tuple[str, RenderableType]] = [*facts(summary)]
    if chip is None:
        above.append(
            (
                "roof",
                text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow"),
            )
        )
    else:
        bandwidth = units.quantity(chip.bandwidth_bytes_per_second, "B/s")
        for dtype in dict.fromkeys(
            row.precision
            for row in rows
            if row.macs and row.precision in chip.peak_flops_per_second
        ):
            peak = units.quantity(chip.peak_flops_per_second[dtype or ""], "FLOP/s")
            above.append(("roof", f"{peak} in {dtype}, {bandwidth}: {chip.name}"))
    unknown = text("no shapes were recorded: record with record_shapes=True", "yellow")
    over = (
        [text("over its roof: usually its data stayed in the cache", "dim")]
        if any((row.share or 0.0) > _OVER for row in rows)
        else []
    )
    return Group(
        margin(above), "", _drawn(shapes_table(rows, top, roof=True)) if rows else unknown, *over
    )


_LISTED = 3
_SMALL = 0.01
_TIMES = 9


def trace_headline(diff: TraceDiff) -> Iterator[str]:
    """How much longer the step or the window takes, whether that is noise, and where most of the change is."""
    what = "A step" if diff.per_step else "The window"
    before, after = (units.duration(each / 1e9) for each in (diff.window.before, diff.window.after))
    noise = (
        ""
        if diff.is_beyond_noise is None or diff.is_beyond_noise
        else ", within the spread of the steps"
    )
    yield f"{what} takes {after}, before {before} ({_signed(diff.window)}{noise})."
    states = [row for row in diff.states if abs(row.change) > _SMALL * diff.window.before]
    if states:
        yield "The device: " + ", ".join(f"{STATES[row.name]} {_more(row)}" for row in states) + "."
    moved = [
        row for row in diff.operators[:_LISTED] if abs(row.change) > _SMALL * diff.window.before
    ]
    if moved:
        yield (
            "Operators: "
            + ", ".join(f"{plain(row.name.removeprefix('aten::'))} {_more(row)}" for row in moved)
            + "."
        )


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
    """Two traces as text for a terminal, with the limits for the second one.

    Tables have at most `top` rows.
    """
    first, *others = trace_headline(diff)
    above: list[tuple[str, RenderableType]] = []
    if diff.hardware[0] != diff.hardware[1]:
        above.append(("device", text(" → ".join(diff.hardware), "yellow")))
    if any(each is not None for each in diff.mfu):
        above.append(("MFU", " → ".join(units.of_peak(each) for each in diff.mfu)))
    if any(each is not None for each in diff.allocated_bytes):
        above.append(
            ("allocator's peak", " → ".join(units.size(each) for each in diff.allocated_bytes))
        )
    for limit in limits:
        name, style = limit.name.replace("_", " "), "red" if limit.broken else ""
        above.append(
            (
                "limit broken" if limit.broken else "limit held",
                text(f"{name}: {_found(limit)}", style),
            )
        )
    of = "of a step" if diff.per_step else "of the window"
    groups: list[tuple[str, Sequence[TimeChange], dict[str, str]]] = [
        (f"device, {of}", diff.states, dict(STATES)),
        ("idle, lost to", diff.idle, {cause: each.label for cause, each in CAUSES.items()}),
        ("by category", diff.categories, {}),
        ("operators, own time", diff.operators, {}),
        ("kernels", diff.kernels, {row.name: kernel_name(row.name) for row in diff.kernels}),
    ]
    tables = [("", _table(heading, rows, names, top)) for heading, rows, names in groups if rows]
    lines = [text(first, "bold"), *map(text, others)]
    return Group(
        *lines, *(("", margin(above)) if above else ()), *(part for each in tables for part in each)
    )


def _found(limit: Limit) -> str:
    if limit.name == "max_memory":
        return f"{units.size(limit.found)}, {units.size(limit.allowed)} allowed"
    return f"{units.percent(limit.found)}, {units.percent(limit.allowed)} {'at least' if limit.name == 'min_mfu' else 'allowed'}"


def _table(
    heading: str, rows: Sequence[TimeChange], names: dict[str, str], top: int
) -> RenderableType:
    shown = rows[:top]
    columns = {
        "before": [units.duration(row.before / 1e9) for row in shown],
        "after": [units.duration(row.after / 1e9) for row in shown],
        "change": [_more(row) if row.change else "0 s" for row in shown],
        "relative": [_signed(row) for row in shown],
    }
    labels = [names.get(row.name, row.name.removeprefix("aten::")) for row in shown]
    table = FittedTable(heading, labels, columns, room=_NAME)
    return (
        table
        if len(shown) == len(rows)
        else Group(table, text(f"{len(rows) - len(shown)} more", "dim"))
    )

"""A trace on a terminal: the verdict, the device's timeline, what its idle time is lost to, steps, categories and kernels."""

from rich.console import Group, RenderableType

from lflops import units
from lflops.report.terminal.tables import FittedTable, margin, text
from lflops.trace_analysis.rank_skew import RankSkew
from lflops.trace_analysis.sentences import facts, ranks_verdict, remarks, verdict
from lflops.trace_analysis.summary import TraceSummary
from lflops.trace_analysis.tables import TraceTable, ranks_tables, shapes_table, tables

_NAME = 28
_OVER = 1.05


def render_trace(summary: TraceSummary, *, top: int) -> RenderableType:
    """One trace as text for a terminal; tables have at most `top` rows."""
    blocks = [_header(summary), *map(_drawn, tables(summary, top))]
    below = list(remarks(summary))
    if below:
        table = margin()
        for label, value in below:
            table.add_row(label, text(value))
        blocks.append(table)
    return Group(*(part for block in blocks[:-1] for part in (block, "")), blocks[-1])


def _header(summary: TraceSummary) -> RenderableType:
    table = margin()
    for label, value in facts(summary):
        table.add_row(label, text(value))
    return Group(*(text(sentence, "bold" if index == 0 else "") for index, sentence in enumerate(verdict(summary))), "", table)


def _drawn(table: TraceTable) -> RenderableType:
    """The table, its notes, and how many rows are not in it."""
    room = min(max(map(len, table.names), default=_NAME), _NAME)
    drawn = FittedTable(table.heading, table.names, table.columns, room=max(room, len(table.heading)) if len(table.names) < 2 else room)
    more = [text(f"{table.left_out} more (--top {table.total} shows them)", "dim")] if table.left_out else []
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
    rows = sorted(summary.shapes, key=lambda row: -(row.device / 1e9 - (row.roof_seconds or 0.0)) if row.roof_seconds is not None else 0.0)
    table = margin()
    for label, value in facts(summary):
        table.add_row(label, text(value))
    if chip is None:
        table.add_row("roof", text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow"))
    else:
        bandwidth = units.quantity(chip.bandwidth_bytes_per_second, "B/s")
        for dtype in dict.fromkeys(row.precision for row in rows if row.macs and row.precision in chip.peak_flops_per_second):
            peak = units.quantity(chip.peak_flops_per_second[dtype or ""], "FLOP/s")
            table.add_row("roof", text(f"{peak} in {dtype}, {bandwidth}: {chip.name}"))
    blocks: list[RenderableType] = [table, ""]
    blocks.append(
        _drawn(shapes_table(rows, top, roof=True)) if rows else text("no shapes were recorded: record with record_shapes=True", "yellow")
    )
    if any((row.share or 0.0) > _OVER for row in rows):
        blocks.append(text("over its roof: usually its data stayed in the cache", "dim"))
    return Group(*blocks)

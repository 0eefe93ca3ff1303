"""The lines above every table: what was profiled, its times and budget, what ran in each phase, and the remarks."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import WorkCounts
from lflops.profile.series import sum_known
from lflops.report.lines.budget import largest, sorted_parts
from lflops.report.lines.facts import facts, remarks
from lflops.report.lines.times import times
from lflops.report.terminal.tables import MARGIN, FittedTable, margin, prose, text

__all__ = ["header"]


def header(analysis: Analysis) -> Group:
    """The lines, as one block."""
    blocks: list[RenderableType] = [_facts(analysis), *_times(analysis), *_budget(analysis), _totals(analysis), _remarks(analysis)]
    return Group(*(part for block in blocks[:-1] for part in (block, "")), blocks[-1])


def _facts(analysis: Analysis) -> Table:
    table = margin()
    for label, value in facts(analysis.profile):
        table.add_row(label, prose(value))
    return table


def _times(analysis: Analysis) -> Iterator[Table]:
    """A table, unless no step but the counted one was timed."""
    if all(step.seconds is None or step.kind == "counted" for step in analysis.profile.steps):
        return
    lines = list(times(analysis))
    table = margin()
    value, spread = max(len(line.value) for line in lines), max(len(line.spread) for line in lines)
    for line in lines:
        table.add_row(line.label, text(f"{line.value:>{value}}  {line.spread:<{spread}}  {line.remark}".rstrip()))
    yield table


def _budget(analysis: Analysis) -> Iterator[RenderableType]:
    """All parts with their shares and seconds, the largest first; then what shortens the three largest, where there is a budget."""
    budget = analysis.budget
    if budget is None:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for index, (name, share) in enumerate(sorted_parts(budget)):
        row = units.percent(share), units.duration(share * budget.seconds), name.replace("_", " ")
        table.add_row("" if index else "budget", *map(text, row))
    yield table
    advice = margin()
    for index, line in enumerate(largest(analysis.profile, budget)):
        advice.add_row("" if index else "largest parts", prose(line))
    yield advice


def _totals(analysis: Analysis) -> FittedTable:
    """What ran in each phase."""
    ran: dict[str, WorkCounts] = {phase: counts for phase, counts in analysis.totals.items() if counts != WorkCounts()}
    if not ran and not analysis.profile.is_counted:
        return FittedTable(
            "totals", ["all"], {name: [units.UNKNOWN] for name in ("MACs", "FLOPs", "bytes moved", "operator calls")}, room=MARGIN
        )
    ran = ran or {"forward": WorkCounts()}
    if len(ran) > 1:
        ran["all"] = sum(ran.values(), WorkCounts())
    columns = {"MACs": [units.count(counts.macs) for counts in ran.values()]}
    if model := analysis.unsharded_macs:
        macs: dict[str, int | None] = {**model, "all": sum_known(model.values())}
        columns["MACs of model"] = [units.count(macs.get(phase, 0)) for phase in ran]
    if any(counts.executed_macs != counts.macs for counts in ran.values()):
        columns["executed MACs"] = [units.count(counts.executed_macs) for counts in ran.values()]
    columns["FLOPs"] = [units.count(counts.flops) for counts in ran.values()]
    columns["bytes moved"] = [units.size(counts.bytes_moved) for counts in ran.values()]
    columns["operator calls"] = [units.count(counts.calls) for counts in ran.values()]
    return FittedTable("totals", list(ran), columns, room=MARGIN)


def _remarks(analysis: Analysis) -> Table:
    table, above = margin(), ""
    for label, value, is_doubt in remarks(analysis):
        table.add_row("" if label == above else label, prose(value, "yellow" if is_doubt else ""))
        above = label
    return table

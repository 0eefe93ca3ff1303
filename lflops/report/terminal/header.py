"""The lines above every table: the verdict, what was profiled, its times and budget, what ran in each phase, and the remarks."""

from rich.console import Group, RenderableType
from rich.table import Table

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.analyze.modules.tree import WorkCounts
from lflops.profile.series import sum_known
from lflops.report.lines.report import Part, report_of, speed_lines, verdict_lines
from lflops.report.terminal.tables import MARGIN, FittedTable, margin, prose, text


def header(analysis: Analysis) -> Group:
    """The lines, as one block."""
    report = report_of(analysis)
    blocks: list[RenderableType] = [
        margin((label, prose(value)) for label, value in verdict_lines(report)),
        margin((fact.label, prose(fact.text)) for fact in report.subject),
        *([margin(speed_lines(report.speed))] if report.speed else []),
        *([_budget(report.budget)] if report.budget else []),
        _totals(analysis),
        margin((fact.label, prose(fact.said)) for fact in report.model if fact.name != "MACs"),
        margin((fact.label, prose(fact.text, "yellow" if fact.doubt else "")) for fact in report.remarks),
    ]
    return Group(*(part for block in blocks[:-1] for part in (block, "")), blocks[-1])


def _budget(parts: tuple[Part, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=MARGIN, no_wrap=True, style="bold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for index, part in enumerate(parts):
        table.add_row("" if index else "budget", *map(text, (units.percent(part.share), units.duration(part.seconds), part.label)))
    return table


def _totals(analysis: Analysis) -> FittedTable:
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

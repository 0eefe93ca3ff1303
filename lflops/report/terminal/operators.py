"""The operators of a profile on a terminal."""

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.analysis import Analysis
from lflops.profile.records import CompiledCode, Phase, Trace
from lflops.report.terminal.header import header
from lflops.report.terminal.tables import FittedTable, text

_MOST = 20  # kernels of compiled code that are shown


def render_operators(analysis: Analysis, phase: Phase | None = "forward") -> RenderableType:
    """The operators of a phase as text for a terminal, the most first; `None` is all the phases together."""
    rows = analysis.operators(phase)
    if not rows:
        return Group(header(analysis), "", text(f"no operators in {phase or 'any phase'}", "dim"))
    macs = {"MACs": [units.count(row.figures.macs) for row in rows]}
    flops = {"FLOPs": [units.count(row.figures.flops) for row in rows]}
    by_flops = analysis.share_of(phase) == "flops"
    share = {f"% of {'FLOPs' if by_flops else 'MACs'}": [units.percent(row.share) for row in rows]}
    columns = (flops | share if by_flops else macs | share | flops) | {
        "bytes moved": [units.size(row.figures.bytes_moved) for row in rows],
        "calls": [units.count(row.figures.calls) for row in rows],
    }
    tables = [FittedTable(f"operators, {phase or 'all'}", [row.operator for row in rows], columns)]
    trace = analysis.profile.trace
    if trace is not None and trace.operators:
        tables += [_traced(trace), *([_compiled(trace, trace.compiled)] if trace.compiled else [])]
    return Group(header(analysis), *(part for table in tables for part in ("", table)))


def _traced(trace: Trace) -> FittedTable:
    """The operators with the most own time, in the mean recorded batch; device time is attributed to the operator that launched it."""
    on_device = any(each.device_seconds for each in trace.operators)
    rows = trace.by_own_time(on_device=on_device)
    figures = {"device, own": "own_device_seconds", "device": "device_seconds"} if on_device else {}
    figures |= {"host, own": "own_host_seconds", "host": "host_seconds"}
    columns = {heading: [units.duration(trace.per_batch(getattr(row, name))) for row in rows] for heading, name in figures.items()}
    columns["calls"] = [units.count(trace.per_batch(row.calls)) for row in rows]
    return FittedTable("operators as traced, in a batch", [row.name for row in rows], columns)


def _compiled(trace: Trace, code: CompiledCode) -> FittedTable:
    """The kernels of compiled code with the most time, in the mean recorded batch; a fused one has a row in each of its modules."""
    rows = code.kernels[:_MOST]
    took = [row.seconds_on(code.timed_on) for row in rows]
    columns: dict[str, list[str]] = {
        "module": [row.module or "the model itself" for row in rows],
        "phase": [row.phase for row in rows],
        code.timed_on: [units.duration(trace.per_batch(seconds)) for seconds in took],
        "% of compiled": [units.percent(seconds / code.seconds if code.seconds else None) for seconds in took],
        "bytes, fused": [units.size(None if row.bytes_moved is None else trace.per_batch(row.bytes_moved)) for row in rows],
        "fused of": [f"{row.modules} modules" if row.modules > 1 else "1 module" for row in rows],
        "calls": [units.count(trace.per_batch(row.calls)) for row in rows],
    }
    return FittedTable("kernels of compiled code, in a batch", [row.name for row in rows], columns)

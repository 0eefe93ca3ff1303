"""A roofline on a terminal: the ceilings, then modules and operators below them."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from lflops import units
from lflops.analyze.modules.repeats import repeats
from lflops.analyze.speed.roofline import Ceiling, Over, Point, Roofline
from lflops.report.terminal.fitted_table import FittedTable
from lflops.report.terminal.text import margin, plain, text

__all__ = ["OVER", "render_roofline"]

_NAME = 26
_SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "recomp", "optimizer": "optim", "other": "other"}
OVER: dict[Over, str] = {
    "cache": "over its roof: what it works on fits the cache",
    "compiled": "over its roof: the bytes are those of the code as written, and it runs compiled",
    "cache_unknown": "over its roof: what it works on may fit the cache, whose size is not known; else a count, a time or a peak is wrong",
    "error": "over its roof: a count, a time or a peak is wrong",
}
_SIGNS: dict[Over, str] = {"cache": "c", "compiled": "t", "cache_unknown": "?", "error": "!"}


def render_roofline(roofline: Roofline, *, top: int) -> RenderableType:
    """The ceilings, the modules that would win the most seconds at their roof, and the operators that need the most.

    Args:
        roofline: What to show.
        top: How many modules, and how many operators.
    """
    modules = sorted(repeats(roofline.modules), key=lambda row: (-(row[1].seconds_to_win or 0.0), -(row[1].roof_seconds or 0.0)))
    operators = sorted(roofline.operators, key=lambda point: (-(point.roof_seconds or 0.0), -point.flops, -point.bytes_moved))
    return Group(
        _ceilings(roofline.ceilings),
        "",
        _points("module, with all below it", [(_module(number, point), point) for number, point in modules[:top]], timed=True),
        "",
        _points("operator, in all modules", [(_operator(point), point) for point in operators[:top]], timed=False),
        *_remarks(roofline, len(modules) - top, len(operators) - top),
    )


def _ceilings(ceilings: Sequence[Ceiling]) -> RenderableType:
    if not ceilings:
        return text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow")
    table = margin()
    for index, ceiling in enumerate(ceilings):
        peak, bandwidth = units.quantity(ceiling.flops_per_second, "FLOP/s"), units.quantity(ceiling.bandwidth_bytes_per_second, "B/s")
        source = f", {ceiling.source}" if ceiling.source else ""
        mine = "" if ceiling.is_judged_by else " (not what is judged by here)"
        table.add_row("" if index else "roof", text(f"{peak} in {ceiling.dtype}, {bandwidth}: {ceiling.hardware}{source}{mine}"))
    return table


def _points(heading: str, named: Sequence[tuple[str, Point]], *, timed: bool) -> FittedTable:
    points = [point for _, point in named]
    columns = {
        "phase": [_SHORT[point.phase] for point in points],
        "bound by": [point.bound or units.UNKNOWN for point in points],
        "FLOPs/byte": [units.count(point.intensity) for point in points],
    }
    if timed:
        columns |= {
            "time": [units.duration(point.seconds) for point in points],
            "of the roof": [units.percent(point.share) + (f" {_SIGNS[point.over]}" if point.over else "") for point in points],
            "to win": [units.duration(point.seconds_to_win) for point in points],
            "FLOP/s": [units.count(point.flops_per_second) for point in points],
        }
    columns |= {
        "roof FLOP/s": [units.count(point.roof_flops_per_second) for point in points],
        "at the roof": [units.duration(point.roof_seconds) for point in points],
        "FLOPs": [units.count(point.flops) for point in points],
        "bytes moved": [units.size(point.bytes_moved) for point in points],
    }
    return FittedTable(heading, [name for name, _ in named], columns, room=_NAME)


def _module(number: int, point: Point) -> str:
    return (plain(point.module) or "all of it") + (f" ×{number}" if number > 1 else "")


def _operator(point: Point) -> str:
    return f"{plain(point.operator or '')} {plain(point.dtype or '')}"


def _remarks(roofline: Roofline, more_modules: int, more_operators: int) -> Iterator[RenderableType]:
    over = {point.over for point in roofline.modules}
    lines = [f"{_SIGNS[each]}: {said}" for each, said in OVER.items() if each in over]
    left = [f"{number} more {noun}" for number, noun in ((more_modules, "lines of modules"), (more_operators, "operators")) if number > 0]
    if left:
        lines.append(f"{' and '.join(left)}; --top N lists more, --json all")
    if not any(point.seconds for point in roofline.modules):
        lines.append("nothing was timed: lflops.measure and FlopsMonitor do")
    if lines:
        yield ""
    for line in lines:
        yield text(line, "dim")

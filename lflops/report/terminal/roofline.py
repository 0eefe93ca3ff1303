"""Draw the roofline, the lower bound of a step and its predicted time on a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Fusion, LowerBound, Point
from lflops.analysis.tree import fold_parts
from lflops.estimation.prediction import Prediction
from lflops.profile.module_names import plain
from lflops.profile.series import ratio
from lflops.report.terminal.tables import FittedTable, margin, prose, text
from lflops.report.text import OVER, WORDS, counted, saved_by_fusion, times_mark

_NAME = 26
_LISTED = 10
# The signs that the table shows for modules and operators above their roofline limit, by reason.
_SIGNS = {"cache": "c", "compiled": "t", "cache_unknown": "?", "error": "!"}


def render_roofline(analysis: Analysis, *, top: int) -> RenderableType:
    """Draw the rooflines, and the modules and operators with the largest potential speed-up.

    If nothing was timed, the modules and operators that need the most time at their roofline limit
    come first.

    Args:
        analysis: The analysis of the profile.
        top: Maximum number of modules, and also the maximum number of operators.
    """
    overview = analysis.roofline
    modules = _modules(analysis)
    operators = _operators(overview.operators)
    is_timed = any(point.seconds is not None for point in overview.operators)
    left_out = []
    if len(modules) > top:
        left_out.append(counted(len(modules) - top, "module row"))
    if len(operators) > top:
        left_out.append(counted(len(operators) - top, "operator row"))
    return Group(
        _ceilings(overview.ceilings),
        "",
        _points("module, inclusive", modules[:top], timed=True),
        "",
        _points("operator, in all modules", operators[:top], timed=is_timed),
        *_remarks([point for _, point in modules], analysis.fusion, left_out),
    )


def _modules(analysis: Analysis) -> list[tuple[str, Point]]:
    """Return a name and a roofline point for each module. Identical modules share one point."""
    named = []
    for repeats in fold_parts(analysis.roofline.modules, analysis.patterns):
        name = plain(repeats.label) or "(model)"
        named.append((f"{name}{times_mark(len(repeats.parts))}", repeats.point))
    return sorted(named, key=lambda row: _most_seconds_first(row[1]))


def _operators(points: Iterable[Point]) -> list[tuple[str, Point]]:
    """Return a name and a roofline point for each operator, largest potential speed-up first."""

    def key(point: Point) -> tuple[float, ...]:
        return (*_most_seconds_first(point), -point.flops, -point.bytes_moved)

    named = []
    for point in sorted(points, key=key):
        named.append((f"{plain(point.operator or '')} {plain(point.dtype or '')}", point))
    return named


def _most_seconds_first(point: Point) -> tuple[float, float]:
    return -(point.potential_seconds or 0.0), -(point.roof_seconds or 0.0)


def _ceilings(ceilings: Sequence[Ceiling]) -> RenderableType:
    if not ceilings:
        return text(
            "the roofline is unknown: pass --hardware NAME (to list the names, "
            'run "lflops hardware")',
            "yellow",
        )
    rows = []
    for ceiling in ceilings:
        peak = units.quantity(ceiling.flops_per_second, "FLOP/s")
        bandwidth = units.quantity(ceiling.bandwidth_bytes_per_second, "B/s")
        source = ""
        if ceiling.source:
            source = f", {ceiling.source}"
        unused = ""
        if not ceiling.is_reference:
            unused = " (not used as the roofline)"
        line = f"{peak} in {ceiling.dtype}, {bandwidth}: {ceiling.hardware}{source}{unused}"
        rows.append(("roofline", prose(line)))
    return margin(rows)


def _points(heading: str, named: Sequence[tuple[str, Point]], *, timed: bool) -> FittedTable:
    has_fused_bytes = any(point.fused_bytes is not None for _, point in named)
    rows = []
    for name, point in named:
        cells = _cells(point, timed=timed)
        if has_fused_bytes:
            cells["fused bytes\nmoved"] = units.size(point.fused_bytes)
        rows.append((name, cells))
    return FittedTable.of_rows(heading, rows, room=_NAME)


def _cells(point: Point, *, timed: bool) -> dict[str, str]:
    cells = {"phase": WORDS["short"][point.phase]}
    if timed:
        cells["time"] = units.duration(point.seconds)
        cells["of the\nlimit"] = _share_of_limit(point)
        cells["potential\nspeed-up"] = units.duration(point.potential_seconds)
    cells["bound by"] = point.bound or units.UNKNOWN
    cells["FLOPs/byte"] = units.rate(point.intensity)
    if timed:
        cells["FLOP/s"] = units.rate(point.flops_per_second)
    cells["roofline\nFLOP/s"] = units.rate(point.roof_flops_per_second)
    cells["roofline-\nbound time"] = units.duration(point.roof_seconds)
    cells["FLOPs"] = units.count(point.flops)
    cells["bytes\nmoved"] = units.size(point.bytes_moved)
    return cells


def _share_of_limit(point: Point) -> str:
    share = units.percent(point.share)
    return f"{share} {_SIGNS[point.over]}" if point.over else share


def _remarks(
    modules: Sequence[Point], fusion: Sequence[Fusion], left_out: Sequence[str]
) -> Iterator[RenderableType]:
    reasons = {point.over for point in modules}
    lines = []
    for reason, sentence in OVER.items():
        if reason in reasons:
            lines.append(f"{_SIGNS[reason]}: {sentence}")
    saved = saved_by_fusion(fusion)
    if saved:
        lines.append(saved)
    if left_out:
        listed = " and ".join(left_out)
        lines.append(f"not shown: {listed} (--top N shows more rows, --json shows all rows)")
    if not any(point.seconds for point in modules):
        lines.append(
            "the profile has no times; use lflops.measure or FlopsMonitor to measure times"
        )
    if lines:
        yield ""
    for line in lines:
        yield text(line, "dim")


def render_lower_bound(bound: LowerBound) -> Group:
    """Draw the least time of a step, of each phase, and of the modules directly below the root.

    Only the modules with the longest times are shown.
    """
    sentence = (
        f"{units.duration(bound.seconds)} per step, if every operator runs at the peak or the "
        f"bandwidth of {bound.hardware}"
    )
    rows: list[tuple[str, RenderableType]] = [("at least", prose(sentence))]
    for phase, seconds in bound.by_phase.items():
        rows.append(("", _bound_line(seconds, bound, phase)))
    top = []
    for name, seconds in bound.by_module.items():
        is_below_root = name and "." not in name
        if is_below_root and seconds:
            top.append((seconds, name))
    for seconds, name in sorted(top, reverse=True)[:_LISTED]:
        rows.append(("by module", _bound_line(seconds, bound, name)))
    if bound.unknown:
        rows.append(("no peak for", text(", ".join(bound.unknown), "yellow")))
    return Group(margin(rows))


def render_prediction(
    predicted: Prediction | None, reason: str | None, more: Iterable[tuple[str, str]] = ()
) -> Group:
    """Draw the predicted time of a step with its interval and its parts.

    If there is no prediction, draw the reason for this.

    Args:
        predicted: The prediction, or `None`.
        reason: The reason why there is no prediction.
        more: Labels and texts of lines that come below the prediction.
    """
    if predicted is None:
        return Group(margin([("not predicted", prose(reason or ""))]))
    interval = f"between {units.duration(predicted.low)} and {units.duration(predicted.high)}"
    sentence = f"{units.duration(predicted.seconds)} per step on {predicted.hardware} ({interval})"
    rows: list[tuple[str, RenderableType]] = [("predicted", prose(sentence))]
    if predicted.widened:
        rows.append(("", prose(f"the interval is wide: {', '.join(predicted.widened)}", "dim")))
    kinds = [(seconds, kind) for kind, seconds in predicted.by_kind.items()]
    for seconds, kind in sorted(kinds, reverse=True):
        rows.append(("", _bound_line(seconds, predicted, kind)))
    for name, line in more:
        rows.append((name, prose(line)))
    return Group(margin(rows))


def _bound_line(seconds: float, bound: LowerBound | Prediction, name: str) -> Text:
    share = units.percent(ratio(seconds, bound.seconds))
    return text(f"{units.duration(seconds):>12}  {share:>6}  {name}")

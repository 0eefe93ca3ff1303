"""The roofline, the lower bound of a step and its predicted time, on a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Fusion, LowerBound, Point
from lflops.analysis.tree import fold_parts
from lflops.estimation.prediction import Prediction
from lflops.profile.module_names import plain
from lflops.report.terminal.tables import FittedTable, margin, prose, text
from lflops.report.text import OVER, WORDS, counted, saved_by_fusion

_NAME = 26
_LISTED = 10
_SIGNS = {"cache": "c", "compiled": "t", "cache_unknown": "?", "error": "!"}


def render_roofline(analysis: Analysis, *, top: int) -> RenderableType:
    """The ceilings, and the modules and operators with the largest potential speed-up.

    `top` is the number of modules, and of operators. Without times, those that need the most
    seconds at the roof come first.
    """
    overview = analysis.roofline
    folded = []
    for repeats in fold_parts(overview.modules, analysis.patterns):
        number = f" ×{len(repeats.parts)}" if len(repeats.parts) > 1 else ""
        folded.append((f"{plain(repeats.label) or '(model)'}{number}", repeats.point))
    modules = sorted(folded, key=lambda named: _most_seconds_first(named[1]))
    operators = sorted(
        overview.operators,
        key=lambda point: (*_most_seconds_first(point), -point.flops, -point.bytes_moved),
    )
    named = []
    for point in operators[:top]:
        named.append((f"{plain(point.operator or '')} {plain(point.dtype or '')}", point))
    is_timed = any(point.seconds is not None for point in operators)
    left_out = []
    if len(modules) > top:
        left_out.append(counted(len(modules) - top, "more module row"))
    if len(operators) > top:
        left_out.append(counted(len(operators) - top, "more operator"))
    return Group(
        _ceilings(overview.ceilings),
        "",
        _points("module, with all below it", modules[:top], timed=True),
        "",
        _points("operator, in all modules", named, timed=is_timed),
        *_remarks([point for _, point in modules], analysis.fusion, left_out),
    )


def _most_seconds_first(point: Point) -> tuple[float, float]:
    return -(point.potential_seconds or 0.0), -(point.roof_seconds or 0.0)


def _ceilings(ceilings: Sequence[Ceiling]) -> RenderableType:
    if not ceilings:
        return text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow")
    rows = []
    for ceiling in ceilings:
        peak = units.quantity(ceiling.flops_per_second, "FLOP/s")
        bandwidth = units.quantity(ceiling.bandwidth_bytes_per_second, "B/s")
        source = f", {ceiling.source}" if ceiling.source else ""
        unused = "" if ceiling.is_judged_by else " (not used below)"
        line = f"{peak} in {ceiling.dtype}, {bandwidth}: {ceiling.hardware}{source}{unused}"
        rows.append(("roof", prose(line)))
    return margin(rows)


def _points(heading: str, named: Sequence[tuple[str, Point]], *, timed: bool) -> FittedTable:
    points = [point for _, point in named]
    columns = {"phase": [WORDS["short"][point.phase] for point in points]}
    if timed:
        columns["time"] = [units.duration(point.seconds) for point in points]
        columns["of the roof"] = list(map(_share_of_roof, points))
        columns["to win"] = [units.duration(point.potential_seconds) for point in points]
    columns["bound by"] = [point.bound or units.UNKNOWN for point in points]
    columns["FLOPs/byte"] = [units.rate(point.intensity) for point in points]
    if timed:
        columns["FLOP/s"] = [units.rate(point.flops_per_second) for point in points]
    columns |= {
        "roof FLOP/s": [units.rate(point.roof_flops_per_second) for point in points],
        "at the roof": [units.duration(point.roof_seconds) for point in points],
        "FLOPs": [units.count(point.flops) for point in points],
        "bytes moved": [units.size(point.bytes_moved) for point in points],
    }
    if any(point.fused_bytes is not None for point in points):
        columns["bytes, fused"] = [units.size(point.fused_bytes) for point in points]
    return FittedTable(heading, [name for name, _ in named], columns, room=_NAME)


def _share_of_roof(point: Point) -> str:
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
        lines.append(f"{' and '.join(left_out)}; --top N lists more, --json all")
    if not any(point.seconds for point in modules):
        lines.append("nothing was timed: lflops.measure and FlopsMonitor do")
    if lines:
        yield ""
    for line in lines:
        yield text(line, "dim")


def render_lower_bound(bound: LowerBound) -> Group:
    """The step, its phases, and the modules directly below the root that take longest."""
    sentence = (
        f"{units.duration(bound.seconds)} a step, with every operator at the peak or the bandwidth "
        f"of {bound.hardware}"
    )
    rows: list[tuple[str, RenderableType]] = [("at least", prose(sentence))]
    for phase, seconds in bound.by_phase.items():
        rows.append(("", _bound_line(seconds, bound, phase)))
    below = []
    for name, seconds in bound.by_module.items():
        if name and "." not in name and seconds:
            below.append((seconds, name))
    for seconds, name in sorted(below, reverse=True)[:_LISTED]:
        rows.append(("by module", _bound_line(seconds, bound, name)))
    if bound.unknown:
        rows.append(("no peak for", text(", ".join(bound.unknown), "yellow")))
    return Group(margin(rows))


def render_prediction(
    predicted: Prediction | None, reason: str | None, more: Iterable[tuple[str, str]] = ()
) -> Group:
    """The predicted time of a step, its interval and its parts, or why it is not predicted.

    `more` are further labels and lines.
    """
    if predicted is None:
        return Group(margin([("not predicted", prose(reason or ""))]))
    interval = f"{units.duration(predicted.low)} to {units.duration(predicted.high)}"
    sentence = (
        f"{units.duration(predicted.seconds)} a step on {predicted.hardware}, "
        f"{interval} in four of five training runs"
    )
    rows: list[tuple[str, RenderableType]] = [("about", prose(sentence))]
    kinds = [(seconds, kind) for kind, seconds in predicted.by_kind.items()]
    for seconds, kind in sorted(kinds, reverse=True):
        rows.append(("", _bound_line(seconds, predicted, kind)))
    for name, line in more:
        rows.append((name, prose(line)))
    return Group(margin(rows))


def _bound_line(seconds: float, bound: LowerBound | Prediction, name: str) -> Text:
    share = seconds / bound.seconds if bound.seconds else None
    return text(f"{units.duration(seconds):>12}  {units.percent(share):>6}  {name}")

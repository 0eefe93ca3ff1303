"""What a chip allows, on a terminal: the roofline, and the lower bound of a step."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lflops import units
from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Fusion, LowerBound, Point
from lflops.analysis.tree import fold_parts
from lflops.estimation.prediction import Prediction
from lflops.report.terminal.tables import FittedTable, margin, prose, text
from lflops.report.text import OVER, WORDS, counted, plain, saved_by_fusion

_NAME = 26
_LISTED = 10
_SIGNS = {"cache": "c", "compiled": "t", "cache_unknown": "?", "error": "!"}


def render_roofline(analysis: Analysis, *, top: int) -> RenderableType:
    """The ceilings, and the `top` modules and operators that would win the most seconds at their roof, or need the most."""
    overview = analysis.roofline
    folded = []
    for repeats in fold_parts(overview.modules, analysis.patterns):
        number = f" ×{len(repeats.parts)}" if len(repeats.parts) > 1 else ""
        folded.append((f"{plain(repeats.label) or '(model)'}{number}", repeats.point))
    modules = sorted(
        folded,
        key=lambda named: (-(named[1].seconds_to_win or 0.0), -(named[1].roof_seconds or 0.0)),
    )
    operators = sorted(
        overview.operators,
        key=lambda point: (
            -(point.seconds_to_win or 0.0),
            -(point.roof_seconds or 0.0),
            -point.flops,
            -point.bytes_moved,
        ),
    )
    is_timed = any(point.seconds is not None for point in operators)
    return Group(
        _ceilings(overview.ceilings),
        "",
        _points("module, with all below it", modules[:top], timed=True),
        "",
        _points(
            "operator, in all modules",
            [
                (f"{plain(point.operator or '')} {plain(point.dtype or '')}", point)
                for point in operators[:top]
            ],
            timed=is_timed,
        ),
        *_remarks(
            [point for _, point in modules],
            analysis.fusion,
            len(modules) - top,
            len(operators) - top,
        ),
    )


def _ceilings(ceilings: Sequence[Ceiling]) -> RenderableType:
    if not ceilings:
        return text("no roof is known: give --hardware NAME, one of lflops hardware", "yellow")
    rows = []
    for ceiling in ceilings:
        peak, bandwidth = (
            units.quantity(ceiling.flops_per_second, "FLOP/s"),
            units.quantity(ceiling.bandwidth_bytes_per_second, "B/s"),
        )
        source = f", {ceiling.source}" if ceiling.source else ""
        mine = "" if ceiling.is_judged_by else " (not what is judged by here)"
        rows.append(
            (
                "roof",
                prose(f"{peak} in {ceiling.dtype}, {bandwidth}: {ceiling.hardware}{source}{mine}"),
            )
        )
    return margin(rows)


def _points(heading: str, named: Sequence[tuple[str, Point]], *, timed: bool) -> FittedTable:
    points = [point for _, point in named]
    columns = {"phase": [WORDS["short"][point.phase] for point in points]}
    if timed:
        columns |= {
            "time": [units.duration(point.seconds) for point in points],
            "of the roof": [
                units.percent(point.share) + (f" {_SIGNS[point.over]}" if point.over else "")
                for point in points
            ],
            "to win": [units.duration(point.seconds_to_win) for point in points],
        }
    columns |= {
        "bound by": [p.bound or units.UNKNOWN for p in points],
        "FLOPs/byte": [units.rate(p.intensity) for p in points],
    }
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


def _remarks(
    modules: Sequence[Point], fusion: Sequence[Fusion], more_modules: int, more_operators: int
) -> Iterator[RenderableType]:
    over = {point.over for point in modules}
    lines = [f"{_SIGNS[each]}: {sentence}" for each, sentence in OVER.items() if each in over]
    if saved := saved_by_fusion(fusion):
        lines.append(saved)
    left = [
        counted(number, f"more {noun}")
        for number, noun in ((more_modules, "module row"), (more_operators, "operator"))
        if number > 0
    ]
    if left:
        lines.append(f"{' and '.join(left)}; --top N lists more, --json all")
    if not any(point.seconds for point in modules):
        lines.append("nothing was timed: lflops.measure and FlopsMonitor do")
    if lines:
        yield ""
    for line in lines:
        yield text(line, "dim")


def render_lower_bound(bound: LowerBound) -> Group:
    """The step, its phases, and the modules directly below the root that take longest."""
    sentence = f"{units.duration(bound.seconds)} a step, with every operator at the peak or the bandwidth of {bound.hardware}"
    rows: list[tuple[str, RenderableType]] = [("at least", prose(sentence))]
    rows += [("", _bound_line(seconds, bound, phase)) for phase, seconds in bound.by_phase.items()]
    below = sorted(
        ((seconds, row) for row, seconds in bound.by_module.items() if row and "." not in row),
        reverse=True,
    )
    rows += [
        ("by module", _bound_line(seconds, bound, row))
        for seconds, row in below[:_LISTED]
        if seconds
    ]
    if bound.unknown:
        rows.append(("no peak for", text(", ".join(bound.unknown), "yellow")))
    return Group(margin(rows))


def render_prediction(
    predicted: Prediction | None, reason: str | None, more: Iterable[tuple[str, str]] = ()
) -> Group:
    """The time of a step with its interval and what it goes to, or why it is not predicted.

    And more lines by their names.
    """
    if predicted is None:
        return Group(margin([("not predicted", prose(reason or ""))]))
    low, high = units.duration(predicted.low), units.duration(predicted.high)
    sentence = f"{units.duration(predicted.seconds)} a step on {predicted.hardware}, {low} to {high} in four trainings of five"
    rows: list[tuple[str, RenderableType]] = [("about", prose(sentence))]
    kinds = sorted(((seconds, kind) for kind, seconds in predicted.by_kind.items()), reverse=True)
    rows += [("", _bound_line(seconds, predicted, kind)) for seconds, kind in kinds]
    return Group(margin([*rows, *((name, prose(line)) for name, line in more)]))


def _bound_line(seconds: float, bound: LowerBound | Prediction, of: str) -> Text:
    share = seconds / bound.seconds if bound.seconds else None
    return text(f"{units.duration(seconds):>12}  {units.percent(share):>6}  {of}")

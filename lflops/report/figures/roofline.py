"""A roofline as a figure: intensity to the right, FLOP/s upwards, both by powers of ten."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from lflops import units
from lflops.analyze.modules.repeats import fold_points
from lflops.analyze.speed.roofline import Ceiling, Point, Roofline
from lflops.report.figures.design import PHASES, QUIET, TEXT, drawn_on

__all__ = ["FORMATS", "roofline_figure", "save"]

FORMATS = ("svg", "png", "pdf")

_NAMED = 8
_LETTER, _LINE = 7, 14
"""Pixels of a letter and of a line."""
_ALL = "#e0a13c"
_SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "recomp", "optimizer": "optim", "other": "other", "all": ""}
_DECADE = 10.0


def save(roofline: Roofline, path: Path, patterns: Mapping[str, str]) -> None:
    """Write the figure, in the format that the name ends with.

    Raises:
        ValueError: It ends with none of `FORMATS`.
    """
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} ends with none of {', '.join('.' + each for each in FORMATS)}")
    roofline_figure(roofline, patterns).savefig(path, bbox_inches="tight")


def roofline_figure(roofline: Roofline, patterns: Mapping[str, str]) -> Figure:
    """Modules without what is below them, an area for their seconds; where none was timed, operators on the roof that they could reach."""
    figure, axes = drawn_on(9, 6)
    timed = [point for _, point, _ in fold_points(roofline.own, patterns) if point.intensity and point.flops_per_second]
    reachable = [] if timed else [point for point in roofline.operators if point.intensity and point.roof_flops_per_second]
    shown = timed or reachable
    left, right = _range(point.intensity for point in shown)
    for ceiling in roofline.ceilings:
        _roof(axes, ceiling, left, right)
    longest = max((point.seconds or 0.0 for point in timed), default=0.0)
    for phase, colour in (*PHASES.items(), ("all", _ALL)):
        points = [point for point in shown if point.phase == phase]
        heights = [point.flops_per_second if timed else point.roof_flops_per_second for point in points]
        if points:
            axes.scatter(
                [point.intensity or 0.0 for point in points],
                [height or 0.0 for height in heights],
                s=[20 + 180 * (point.seconds or 0.0) / longest if longest else 30 for point in points],
                facecolors=colour if timed else "none",
                edgecolors=["red" if point.over == "error" else colour for point in points],
                alpha=0.75,
                label=phase if timed else f"{phase}, reachable",
            )
    axes.set(xscale="log", yscale="log", xlabel="intensity, FLOPs per byte moved")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.quantity(value, "FLOP/s").replace(".00", "")))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    _label(axes, timed, patterns)
    if roofline.ceilings or shown:
        axes.legend(fontsize=8, loc="lower right", frameon=False, labelcolor=QUIET)
    return figure


def _label(axes: Axes, timed: Sequence[Point], patterns: Mapping[str, str]) -> None:
    """The names of the points with the most to win, as long as no two of them overlap."""
    taken: list[Bbox] = []
    for point in sorted(timed, key=lambda point: -(point.seconds_to_win or 0.0)):
        if len(taken) == _NAMED:
            break
        at = axes.transData.transform((point.intensity or 0.0, point.flops_per_second or 0.0))
        name = f"{patterns.get(point.module, point.module) or 'all of it'} {_SHORT[point.phase]}"
        box = Bbox.from_bounds(at[0] + 10, at[1] + 2, _LETTER * len(name), _LINE)
        if not any(box.overlaps(other) for other in taken):
            taken.append(box)
            spot = point.intensity or 0.0, point.flops_per_second or 0.0
            axes.annotate(name, spot, xytext=(8, 4), textcoords="offset points", fontsize=8, color=TEXT, parse_math=False)


def _roof(axes: Axes, ceiling: Ceiling, left: float, right: float) -> None:
    peak, slope = ceiling.flops_per_second, ceiling.bandwidth_bytes_per_second
    label = f"{ceiling.hardware}, {ceiling.dtype}: {units.quantity(peak, 'FLOP/s')}, {units.quantity(slope, 'B/s')}"
    ridge = peak / slope if slope else left
    xs = sorted({left, min(max(ridge, left), right), right})
    axes.plot(
        xs, [min(peak, x * slope) if slope else peak for x in xs], "-" if ceiling.is_judged_by else "--", color=TEXT, lw=1.2, label=label
    )


def _range(intensities: Iterable[float | None]) -> tuple[float, float]:
    """A decade to either side, and both sides of what roofs usually turn at."""
    known = [each for each in chain(intensities, (0.1, 1000.0)) if each]
    return min(known) / _DECADE, max(known) * _DECADE

"""A roofline as a figure: intensity to the right, FLOP/s upwards, both by powers of ten."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from lflops import units
from lflops.analyze.modules.repeats import fold_parts
from lflops.analyze.speed.roofline import Ceiling, LazyRoofline, Point
from lflops.figures.design import PHASES, QUIET, TEXT, drawn_on

FORMATS = ("svg", "png", "pdf")

_NAMED = 8
_LETTER, _LINE = 7, 14  # pixels of a letter and of a line
_GAP, _DOT = 14, 5  # pixels from a point to its name, and around a point that no name of another one covers
_RING: Mapping[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": "#b3261e"}
_ALL = "#e0a13c"
_SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "recomp", "optimizer": "optim", "other": "other", "all": ""}
_DECADE = 10.0


def save_roofline_figure(roofline: LazyRoofline, path: Path, patterns: Mapping[str, str]) -> None:
    """Write the figure, in the format that the name ends with; a `ValueError` where it ends with none of `FORMATS`."""
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} ends with none of {', '.join('.' + each for each in FORMATS)}")
    roofline_figure(roofline, patterns).savefig(path, bbox_inches="tight")


def roofline_figure(roofline: LazyRoofline, patterns: Mapping[str, str]) -> Figure:
    """Modules without what is below them, an area for their seconds; where none was timed, operators on the roof that they could reach."""
    figure, axes = drawn_on(9, 6)
    points = [repeats.point for repeats in fold_parts(roofline.own, patterns)]
    timed = [point for point in points if point.intensity and point.flops_per_second]
    reachable = [] if timed else [point for point in roofline.operators if point.intensity and point.roof_flops_per_second]
    shown = timed or reachable
    left, right = _range(point.intensity for point in shown)
    handles = [_roof(axes, ceiling, left, right) for ceiling in roofline.ceilings]
    longest = max((point.seconds or 0.0 for point in timed), default=0.0)
    for phase, colour in (*PHASES.items(), ("all", _ALL)):
        points = [point for point in shown if point.phase == phase]
        heights = [point.flops_per_second if timed else point.roof_flops_per_second for point in points]
        if points:
            axes.scatter(
                [point.intensity or 0.0 for point in points],
                [height or 0.0 for height in heights],
                s=[20 + 180 * (point.seconds or 0.0) / longest if longest else 30 for point in points],
                facecolors=to_rgba(colour, 0.35) if timed else "none",
                edgecolors=colour,
            )
            handles.append(_handle(colour, phase if timed else f"{phase}, reachable", is_filled=bool(timed)))
    if over := [point for point in timed if point.over == "error"]:
        axes.plot([point.intensity or 0.0 for point in over], [point.flops_per_second or 0.0 for point in over], **_RING)
        handles.append(Line2D([], [], label="over its roof", **_RING))
    axes.set(xscale="log", yscale="log", xlabel="intensity, FLOPs per byte moved")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.quantity(value, "FLOP/s").replace(".00", "")))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    _label(axes, timed, patterns)
    if handles:
        axes.legend(handles=handles, fontsize=8, loc="lower right", frameon=False, labelcolor=QUIET)
    return figure


def _label(axes: Axes, timed: Sequence[Point], patterns: Mapping[str, str]) -> None:
    """The names of the points with the most to win: to the right, or to the left, so that no two overlap and no point is covered."""
    axes.autoscale_view()
    spots = {id(point): axes.transData.transform((point.intensity or 0.0, point.flops_per_second or 0.0)) for point in timed}
    dots = {key: Bbox.from_bounds(x - _DOT, y - _DOT, 2 * _DOT, 2 * _DOT) for key, (x, y) in spots.items()}
    taken: list[Bbox] = []
    for point in sorted(timed, key=lambda point: -(point.seconds_to_win or 0.0)):
        if len(taken) == _NAMED:
            break
        x, y = spots[id(point)]
        name = f"{patterns.get(point.module, point.module) or '(model)'} {_SHORT[point.phase]}"
        width = _LETTER * len(name)
        others = [box for key, box in dots.items() if key != id(point)]
        for start, aligned in ((x + _GAP, "left"), (x - _GAP - width, "right")):
            box = Bbox.from_bounds(start, y - _LINE / 2, width, _LINE)
            if not any(box.overlaps(other) for other in (*taken, *others)):
                taken.append(box)
                offset = _GAP if aligned == "left" else -_GAP
                axes.annotate(
                    name,
                    (point.intensity or 0.0, point.flops_per_second or 0.0),
                    xytext=(offset, 0),
                    textcoords="offset pixels",
                    ha=aligned,
                    va="center",
                    fontsize=8,
                    color=TEXT,
                    parse_math=False,
                )
                break


def _handle(colour: str, label: str, *, is_filled: bool) -> Line2D:
    """A row of the legend; those that matplotlib makes would be as large as the largest point."""
    face = to_rgba(colour, 0.35) if is_filled else "none"
    return Line2D([], [], linestyle="none", marker="o", markersize=7, markerfacecolor=face, markeredgecolor=colour, label=label)


def _roof(axes: Axes, ceiling: Ceiling, left: float, right: float) -> Line2D:
    peak, slope = ceiling.flops_per_second, ceiling.bandwidth_bytes_per_second
    label = f"{ceiling.hardware}, {ceiling.dtype}: {units.quantity(peak, 'FLOP/s')}, {units.quantity(slope, 'B/s')}"
    ridge = peak / slope if slope else left
    xs = sorted({left, min(max(ridge, left), right), right})
    (line,) = axes.plot(
        xs, [min(peak, x * slope) if slope else peak for x in xs], "-" if ceiling.is_judged_by else "--", color=TEXT, lw=1.2, label=label
    )
    return line


def _range(intensities: Iterable[float | None]) -> tuple[float, float]:
    """A decade to either side, and both sides of what roofs usually turn at."""
    known = [each for each in chain(intensities, (0.1, 1000.0)) if each]
    return min(known) / _DECADE, max(known) * _DECADE

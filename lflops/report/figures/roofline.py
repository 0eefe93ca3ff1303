"""A roofline as a figure: intensity to the right, FLOP/s upwards, both by powers of ten."""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lflops import units
from lflops.analyze.speed.roofline import Ceiling, Roofline
from lflops.report.figures.memory import COLOURS

__all__ = ["FORMATS", "roofline_figure", "save"]

FORMATS = ("svg", "png", "pdf")

_NAMED = 6
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
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    timed = [point for point in roofline.own if point.intensity and point.flops_per_second]
    reachable = [] if timed else [point for point in roofline.operators if point.intensity and point.roof_flops_per_second]
    shown = timed or reachable
    left, right = _range(point.intensity for point in shown)
    for ceiling in roofline.ceilings:
        _roof(axes, ceiling, left, right)
    longest = max((point.seconds or 0.0 for point in timed), default=0.0)
    for phase, colour in COLOURS.items():
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
    spots = {(point.intensity, point.phase): point for point in sorted(timed, key=lambda point: point.seconds_to_win or 0.0)}
    for point in sorted(spots.values(), key=lambda point: -(point.seconds_to_win or 0.0))[:_NAMED]:
        name = patterns.get(point.module, point.module)
        at = point.intensity or 0.0, point.flops_per_second or 0.0
        axes.annotate(name or "all of it", at, xytext=(8, 8), textcoords="offset points", fontsize=7, parse_math=False)
    axes.set(xscale="log", yscale="log", xlabel="intensity, FLOPs per byte moved", ylabel="FLOP/s")
    axes.grid(visible=True, which="both", alpha=0.2)
    if roofline.ceilings or shown:
        axes.legend(fontsize=7, loc="lower right")
    return figure


def _roof(axes: Axes, ceiling: Ceiling, left: float, right: float) -> None:
    peak, slope = ceiling.flops_per_second, ceiling.bandwidth_bytes_per_second
    label = f"{ceiling.hardware}, {ceiling.dtype}: {units.quantity(peak, 'FLOP/s')}, {units.quantity(slope, 'B/s')}"
    ridge = peak / slope if slope else left
    xs = sorted({left, min(max(ridge, left), right), right})
    axes.plot(
        xs, [min(peak, x * slope) if slope else peak for x in xs], "-" if ceiling.is_judged_by else "--", color="black", lw=1, label=label
    )


def _range(intensities: Iterable[float | None]) -> tuple[float, float]:
    """A decade to either side, and both sides of what roofs usually turn at."""
    known = [each for each in chain(intensities, (0.1, 1000.0)) if each]
    return min(known) / _DECADE, max(known) * _DECADE

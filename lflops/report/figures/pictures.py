"""Draw the roofline and the live memory of a profile as the HTML page does.

Each figure has a separate canvas, so the global state of matplotlib does not change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator
from matplotlib.transforms import Bbox

from lflops import units
from lflops.analysis.analysis import Analysis, analyze
from lflops.analysis.roofline import Ceiling, LazyRoofline, Point
from lflops.analysis.tree import fold_parts
from lflops.errors import ProfileError
from lflops.profile.profile import Memory, Profile
from lflops.profile.records import ByCategory

TEXT = "#1c2430"
QUIET = "#5b6674"
LINE = "#d8dde4"

_COLOURS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, str]]
)

PHASES = _COLOURS["phases"]

CATEGORIES = _COLOURS["categories"]
"""Colours of the categories of memory.

The categories are drawn as stacked areas, the first at the bottom. Categories of tensors that live
long, such as parameters, come first.
"""


def drawn_on(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the given size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LINE)
    axes.tick_params(colors=QUIET, labelsize=9, length=0)
    axes.xaxis.label.set_color(QUIET)
    axes.yaxis.label.set_color(QUIET)
    axes.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


class Picture(NamedTuple):
    """A figure as the content of a PNG file. The width and height are in pixels."""

    name: str
    width: int
    height: int
    png: bytes


def pictures(analysis: Analysis) -> Iterator[Picture]:
    """Yield the figures that can be drawn for a profile.

    These are the roofline if the chip's peak is known, and live memory if memory was counted.
    """
    memory = analysis.profile.memory
    if analysis.roofline.ceilings:
        yield _picture("roofline", roofline_figure(analysis.roofline, analysis.patterns))
    if memory is not None and memory.timeline:
        yield _picture("memory", memory_figure(analysis))


def _picture(name: str, figure: Figure) -> Picture:
    # Most methods of the canvas have no type annotations.
    canvas: Any = FigureCanvasAgg(figure)
    file = BytesIO()
    canvas.print_png(file)
    width, height = canvas.get_width_height()
    return Picture(name, width, height, file.getvalue())


_BAND = (1.02, 1.07)
"""Bottom and top of the coloured band with the phases, as fractions of the height of the axes."""

_NARROWEST_LABELLED = 0.08
"""Minimum width at which a phase gets a label, as a share of the width of the axes."""

_TICKS = 6

_AFTER_OPERATOR = 0.5
"""Distance on the x-axis from an operator to the peak that was reached while it ran.

The x-axis counts operators, so the peak is drawn halfway between this operator and the next one.
"""

_LATE = 0.75
"""If the peak is after this share of the step, the label of the peak is drawn to its left.

On its right, the label would not fit into the figure.
"""


def memory_figure(analysis: Analysis) -> Figure:
    """Draw the live bytes before each operator, as stacked categories, and mark the peak.

    Raises:
        ProfileError: Memory was not counted.
    """
    memory = analysis.profile.memory
    if memory is None or not memory.timeline:
        raise ProfileError("the profile has no memory data, so no figure can be drawn")
    reached = None
    for number, moment in enumerate(memory.timeline):
        if moment is analysis.peak_moment:
            reached = number
    figure, axes = drawn_on(10, 4.2)
    operators: list[float] = [moment.index for moment in memory.timeline]
    first = operators[0]
    last = operators[-1]
    _areas(axes, memory, operators, reached)
    _phases(axes, memory, operators)
    peak = None
    if reached is not None:
        peak = operators[reached] + _AFTER_OPERATOR
    _mark_peak(axes, memory.peak_bytes, peak, last)
    axes.set(
        xlabel="operator, in the order of execution",
        xlim=(first, max(last, 1)),
        ylim=(0, 1.12 * memory.peak_bytes or 1),
    )
    step = 2 ** (memory.peak_bytes // _TICKS).bit_length()
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: units.size(round(value)).replace(".00", ""))
    )
    return figure


def _areas(axes: Axes, memory: Memory, operators: Sequence[float], reached: int | None) -> None:
    """Draw the live bytes of each category as stacked areas, long-lived tensors at the bottom.

    `reached` is the index in `memory.timeline` of the operator that reached the peak. `None` if the
    operator is unknown.
    """
    positions = list(operators)
    parts = [moment.by_category for moment in memory.timeline]
    if reached is not None and memory.by_category:
        parts.insert(reached + 1, ByCategory.of(memory.by_category))
        positions.insert(reached + 1, operators[reached] + _AFTER_OPERATOR)
    columns = []
    colours = []
    handles = []
    for name, colour in CATEGORIES.items():
        column = [getattr(part, name) for part in parts]
        if any(column):
            columns.append(column)
            colours.append(colour)
            handles.append(Patch(color=colour, label=name.replace("_", " ")))
    axes.stackplot(positions, columns, colors=colours, linewidth=0)
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=QUIET,
    )


def _phases(axes: Axes, memory: Memory, operators: Sequence[float]) -> None:
    """Draw the phases of the step as a coloured band above the axes."""
    phases = [moment.phase for moment in memory.timeline]
    number = 0
    for phase, moments in groupby(phases):
        start = operators[number]
        number += len(list(moments))
        # A phase ends where the next phase starts.
        end = operators[min(number, len(operators) - 1)]
        axes.fill_between(
            [start, end],
            *_BAND,
            color=PHASES[phase],
            linewidth=0,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
        if end - start > _NARROWEST_LABELLED * (operators[-1] or 1):
            axes.text(
                (start + end) / 2,
                sum(_BAND) / 2,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                fontsize=8,
            )


def _mark_peak(axes: Axes, nbytes: int, at: float | None, last: float) -> None:
    """Mark the peak as a point with a label, or as a horizontal line if its position is unknown.

    Args:
        axes: The axes of the figure.
        nbytes: The peak in bytes.
        at: The position of the peak on the x-axis, or `None` if it is unknown.
        last: The position of the last operator on the x-axis.
    """
    label = f"peak {units.size(nbytes)}"
    style: dict[str, Any] = {
        "fontsize": 9,
        "color": TEXT,
        "textcoords": "offset points",
        "parse_math": False,
    }
    if at is None:
        axes.axhline(nbytes, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(label, (last, nbytes), xytext=(-2, 4), va="bottom", ha="right", **style)
        return
    axes.plot([at, at], [0, nbytes], color=TEXT, linewidth=0.8, linestyle=":")
    axes.plot(at, nbytes, "o", markersize=6, markerfacecolor="white", markeredgecolor=TEXT)
    is_late = at > _LATE * last
    axes.annotate(
        label,
        (at, nbytes),
        xytext=(-8 if is_late else 8, 2),
        va="bottom",
        ha="right" if is_late else "left",
        weight="bold",
        **style,
    )


def save_memory_figure(profile: Profile, path: Path) -> None:
    """Write the figure of live memory to a file.

    The suffix of the path determines the format.

    Raises:
        ProfileError: Memory was not counted, or the file cannot be written.
    """
    figure = memory_figure(analyze(profile))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: the figure cannot be written: {error}") from error


FORMATS = ("svg", "png", "pdf")

_NAMED = 8
"""Maximum number of points in the roofline figure that have a name next to them."""

# In pixels: width of a character, height of a line, distance from a point to its name, and the
# margin around a point that no name may cover.
_CHARACTER = 7
_LINE = 14
_GAP = 14
_DOT = 5

_RING: Mapping[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 10,
    "markerfacecolor": "none",
    "markeredgecolor": "#b3261e",
}
_ALL = "#e0a13c"

_SHORT = {
    "forward": "fwd",
    "backward": "bwd",
    "recompute": "recomp",
    "optimizer": "optim",
    "all": "",
}

_DECADE = 10.0


def save_roofline_figure(roofline: LazyRoofline, path: Path, patterns: Mapping[str, str]) -> None:
    """Write the figure of the roofline to a file.

    The suffix of the path determines the format.

    Raises:
        ValueError: The suffix is not in `FORMATS`.
    """
    if path.suffix[1:].lower() not in FORMATS:
        suffixes = ", ".join(f".{name}" for name in FORMATS)
        raise ValueError(f"{str(path)!r}: the file name must end with one of {suffixes}")
    roofline_figure(roofline, patterns).savefig(path, bbox_inches="tight")


def roofline_figure(roofline: LazyRoofline, patterns: Mapping[str, str]) -> Figure:
    """Draw a point for each module in each phase, and the rooflines of the chip.

    A point shows the work of a module without its submodules. Identical modules share a point. The
    more time a point stands for, the larger it is. If nothing was timed, the points are operators,
    drawn at the FLOP/s that they can reach at most.
    """
    figure, axes = drawn_on(9, 6)
    timed = []
    for repeats in fold_parts(roofline.self_work, patterns):
        point = repeats.point
        if point.intensity and point.flops_per_second:
            timed.append(point)
    points = timed
    if not timed:
        points = [point for point in roofline.operators if _height(point, timed=False)]
    intensities = list(map(_intensity, points))
    handles = []
    for ceiling in roofline.ceilings:
        handles.append(_roofline(axes, ceiling, intensities))
    longest = max((point.seconds or 0.0 for point in timed), default=0.0)
    for phase, colour in (PHASES | {"all": _ALL}).items():
        of_phase = [point for point in points if point.phase == phase]
        if of_phase:
            handles.append(_scatter(axes, of_phase, colour, longest, timed=bool(timed)))
    above = [point for point in timed if point.over == "error"]
    if above:
        axes.plot(*_positions(above, timed=True), **_RING)
        handles.append(Line2D([], [], label="above its roofline limit", **_RING))
    axes.set(xscale="log", yscale="log", xlabel="intensity, FLOPs per byte moved")
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: units.quantity(value, "FLOP/s").replace(".00", ""))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    _label(axes, timed, patterns)
    if handles:
        axes.legend(handles=handles, fontsize=8, loc="lower right", frameon=False, labelcolor=QUIET)
    return figure


def _intensity(point: Point) -> float:
    return point.intensity or 0.0


def _height(point: Point, *, timed: bool) -> float:
    """Return the height of a point in FLOP/s, or 0 if it cannot be drawn.

    The height is the measured rate if the point was timed, and otherwise the rate at the roofline
    limit of the point.
    """
    if not point.intensity:
        return 0.0
    rate = point.flops_per_second if timed else point.roof_flops_per_second
    return rate or 0.0


def _positions(points: Sequence[Point], *, timed: bool) -> tuple[list[float], list[float]]:
    """Return the coordinates of points: their intensities, and their heights in FLOP/s."""
    xs = []
    ys = []
    for point in points:
        xs.append(_intensity(point))
        ys.append(_height(point, timed=timed))
    return xs, ys


def _scatter(
    axes: Axes, points: Sequence[Point], colour: str, longest: float, *, timed: bool
) -> Line2D:
    """Draw the points of a phase, and return their entry in the legend.

    `longest` is the time of the slowest point in the figure, which is drawn largest. If nothing was
    timed, it is 0 and all points have the same size.
    """
    sizes = [30.0] * len(points)
    if longest:
        sizes = [20 + 180 * (point.seconds or 0.0) / longest for point in points]
    face = to_rgba(colour, 0.35) if timed else "none"
    axes.scatter(
        *_positions(points, timed=timed),
        s=sizes,
        facecolors=face,
        edgecolors=colour,
    )
    phase = points[0].phase
    # The legend entries that matplotlib makes would be as large as the largest point.
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        markersize=7,
        markerfacecolor=face,
        markeredgecolor=colour,
        label=phase if timed else f"{phase}, reachable",
    )


def _label(axes: Axes, timed: Sequence[Point], patterns: Mapping[str, str]) -> None:
    """Name the points with the largest potential speed-up.

    Each name is placed to the right or left of its point, so that it covers no other name or point.
    """
    axes.autoscale_view()
    spots = []
    dots = []
    for point in sorted(timed, key=lambda point: -(point.potential_seconds or 0.0)):
        x, y = axes.transData.transform((_intensity(point), _height(point, timed=True)))
        spots.append((point, (x, y)))
        dots.append(Bbox.from_bounds(x - _DOT, y - _DOT, 2 * _DOT, 2 * _DOT))
    names: list[Bbox] = []
    for number, (point, (x, y)) in enumerate(spots):
        if len(names) == _NAMED:
            break
        module = patterns.get(point.module, point.module) or "(model)"
        name = f"{module} {_SHORT.get(point.phase, point.phase)}"
        width = _CHARACTER * len(name)
        obstacles = [*names, *dots[:number], *dots[number + 1 :]]
        for aligned, start in (("left", x + _GAP), ("right", x - _GAP - width)):
            box = Bbox.from_bounds(start, y - _LINE / 2, width, _LINE)
            if not any(box.overlaps(other) for other in obstacles):
                names.append(box)
                _annotate(axes, point, name, aligned)
                break


def _annotate(axes: Axes, point: Point, name: str, aligned: str) -> None:
    axes.annotate(
        name,
        (_intensity(point), _height(point, timed=True)),
        xytext=(_GAP if aligned == "left" else -_GAP, 0),
        textcoords="offset pixels",
        ha=aligned,
        va="center",
        fontsize=8,
        color=TEXT,
        parse_math=False,
    )


def _roofline(axes: Axes, ceiling: Ceiling, intensities: Iterable[float]) -> Line2D:
    """Draw the roofline of one dtype, and return its entry in the legend.

    The roofline extends beyond all points by a factor of ten, so that its ridge is usually visible.
    """
    values = [0.1, 1000.0, *intensities]
    left = min(values) / _DECADE
    right = max(values) * _DECADE
    peak = ceiling.flops_per_second
    bandwidth = ceiling.bandwidth_bytes_per_second
    xs = [left, right]
    ys = [peak, peak]
    if bandwidth:
        ridge = min(max(peak / bandwidth, left), right)
        xs = sorted({left, ridge, right})
        ys = [min(peak, x * bandwidth) for x in xs]
    rates = f"{units.quantity(peak, 'FLOP/s')}, {units.quantity(bandwidth, 'B/s')}"
    (line,) = axes.plot(
        xs,
        ys,
        "-" if ceiling.is_reference else "--",
        color=TEXT,
        lw=1.2,
        label=f"{ceiling.hardware}, {ceiling.dtype}: {rates}",
    )
    return line

"""A profile's figures as the page draws them: roofline and live memory.

Each has its own canvas, so matplotlib's state does not change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain, groupby
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

TEXT, QUIET, LINE = "#1c2430", "#5b6674", "#d8dde4"

_COLOURS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, str]]
)
PHASES, CATEGORIES = (
    _COLOURS["phases"],
    _COLOURS["categories"],
    # from the bottom of a stack: what stays, then what comes and goes
)


def drawn_on(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of a size in inches, and its axes."""
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
    """A figure as a PNG file; its width and height are in pixels."""

    name: str
    width: int
    height: int
    png: bytes


def pictures(analysis: Analysis) -> Iterator[Picture]:
    """The roofline, where the chip's peak is known; and live memory, where it was counted."""
    profile, roofline = analysis.profile, analysis.roofline
    if roofline.ceilings:
        yield _drawn("roofline", roofline_figure(roofline, analysis.patterns))
    if profile.memory is not None and profile.memory.timeline:
        yield _drawn("memory", memory_figure(analysis))


def _drawn(name: str, figure: Figure) -> Picture:
    # much of it has no annotations
    canvas: Any = FigureCanvasAgg(figure)
    file = BytesIO()
    canvas.print_png(file)
    width, height = canvas.get_width_height()
    return Picture(name, width, height, file.getvalue())


# where the phases are, in heights of the axes
_BAND = (1.02, 1.07)
_TICKS = 6
# the peak lies between the operator that reached it and the next one
_WITHIN = 0.5
# behind this share of the step there is no room for a text to the right
_LATE = 0.75


def memory_figure(analysis: Analysis) -> Figure:
    """Bytes alive before each operator by category, where these are known, and the peak.

    A `ProfileError` where memory was not counted.
    """
    memory, peak = analysis.profile.memory, analysis.peak_moment
    if memory is None or not memory.timeline:
        raise ProfileError("the profile has no memory to draw: it was not counted")
    figure, axes = drawn_on(10, 4.2)
    operators: list[float] = [moment.index for moment in memory.timeline]
    reached = next((place for place, moment in enumerate(memory.timeline) if moment is peak), None)
    _areas(axes, memory, operators, reached)
    for phase, run in groupby(
        range(len(operators)), key=lambda place: memory.timeline[place].phase
    ):
        first, *others = run
        start, end = (
            operators[first],
            operators[min(first + len(others) + 1, len(operators) - 1)],
            # up to the first of the next
        )
        axes.fill_between(
            [start, end],
            *_BAND,
            color=PHASES[phase],
            linewidth=0,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
        if end - start > 0.08 * (operators[-1] or 1):
            axes.text(
                (start + end) / 2,
                sum(_BAND) / 2,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                fontsize=8,
            )
    _mark_peak(
        axes,
        memory.peak_bytes,
        None if reached is None else operators[reached] + _WITHIN,
        operators[-1],
    )
    axes.set(
        xlabel="operator, in the order of execution",
        xlim=(operators[0], max(operators[-1], 1)),
        ylim=(0, 1.12 * memory.peak_bytes or 1),
    )
    axes.yaxis.set_major_locator(
        MultipleLocator(2 ** max((memory.peak_bytes // _TICKS).bit_length(), 0))
    )
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: units.size(round(value)).replace(".00", ""))
    )
    return figure


def _mark_peak(axes: Axes, nbytes: int, at: float | None, last: float) -> None:
    """A point with its size next to it; where it is unknown when the peak was, a line across."""
    style: dict[str, Any] = {
        "fontsize": 9,
        "color": TEXT,
        "textcoords": "offset points",
        "parse_math": False,
    }
    if at is None:
        axes.axhline(nbytes, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            f"peak {units.size(nbytes)}",
            (last, nbytes),
            xytext=(-2, 4),
            va="bottom",
            ha="right",
            **style,
        )
        return
    axes.plot([at, at], [0, nbytes], color=TEXT, linewidth=0.8, linestyle=":")
    axes.plot(at, nbytes, "o", markersize=6, markerfacecolor="white", markeredgecolor=TEXT)
    is_late = at > _LATE * last
    side = (-8, "right") if is_late else (8, "left")
    axes.annotate(
        f"peak {units.size(nbytes)}",
        (at, nbytes),
        xytext=(side[0], 2),
        va="bottom",
        ha=side[1],
        weight="bold",
        **style,
    )


def _areas(axes: Axes, memory: Memory, operators: Sequence[float], reached: int | None) -> None:
    """A stack of categories, the lasting ones below, over the places of `operators`.

    `reached` is the moment after which the peak lies.
    """
    parts = [moment.by_category for moment in memory.timeline]
    if reached is not None and memory.by_category:
        peak = ByCategory(**{name: memory.by_category.get(name, 0) for name in ByCategory._fields})
        parts.insert(reached + 1, peak)
        operators = [
            *operators[: reached + 1],
            operators[reached] + _WITHIN,
            *operators[reached + 1 :],
        ]
    shown = {
        name: colour
        for name, colour in CATEGORIES.items()
        if any(getattr(part, name) for part in parts)
    }
    columns = [[getattr(part, name) for part in parts] for name in shown]
    axes.stackplot(operators, columns, colors=list(shown.values()), linewidth=0)
    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in shown.items()]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=QUIET,
    )


def save_memory_figure(profile: Profile, path: Path) -> None:
    """Write it, in the format of the file's ending.

    A `ProfileError` where memory was not counted, or the file cannot be written.
    """
    figure = memory_figure(analyze(profile))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: the figure cannot be written: {error}") from error


FORMATS = ("svg", "png", "pdf")

_NAMED = 8
# pixels of a letter and of a line
_LETTER, _LINE = 7, 14
_GAP, _DOT = (
    14,
    5,
    # pixels from a point to its name, and around a point that no name of another one covers
)
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
    "other": "other",
    "all": "",
}
_DECADE = 10.0


def save_roofline_figure(roofline: LazyRoofline, path: Path, patterns: Mapping[str, str]) -> None:
    """Write the figure, in the format that the name ends with.

    A `ValueError` where it ends with none of `FORMATS`.
    """
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(
            f"{str(path)!r} ends with none of {', '.join('.' + each for each in FORMATS)}"
        )
    roofline_figure(roofline, patterns).savefig(path, bbox_inches="tight")


def roofline_figure(roofline: LazyRoofline, patterns: Mapping[str, str]) -> Figure:
    """Modules without what is below them, an area for their seconds.

    Where none was timed, operators on the roof that they could reach.
    """
    figure, axes = drawn_on(9, 6)
    points = [repeats.point for repeats in fold_parts(roofline.self_work, patterns)]
    timed = [point for point in points if point.intensity and point.flops_per_second]
    reachable = (
        []
        if timed
        else [
            point for point in roofline.operators if point.intensity and point.roof_flops_per_second
        ]
    )
    shown = timed or reachable
    left, right = _range(point.intensity for point in shown)
    handles = [_roof(axes, ceiling, left, right) for ceiling in roofline.ceilings]
    longest = max((point.seconds or 0.0 for point in timed), default=0.0)
    for phase, colour in (*PHASES.items(), ("all", _ALL)):
        points = [point for point in shown if point.phase == phase]
        heights = [
            point.flops_per_second if timed else point.roof_flops_per_second for point in points
        ]
        if points:
            axes.scatter(
                [point.intensity or 0.0 for point in points],
                [height or 0.0 for height in heights],
                s=[
                    20 + 180 * (point.seconds or 0.0) / longest if longest else 30
                    for point in points
                ],
                facecolors=to_rgba(colour, 0.35) if timed else "none",
                edgecolors=colour,
            )
            handles.append(
                _handle(colour, phase if timed else f"{phase}, reachable", is_filled=bool(timed))
            )
    if over := [point for point in timed if point.over == "error"]:
        axes.plot(
            [point.intensity or 0.0 for point in over],
            [point.flops_per_second or 0.0 for point in over],
            **_RING,
        )
        handles.append(Line2D([], [], label="over its roof", **_RING))
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


def _label(axes: Axes, timed: Sequence[Point], patterns: Mapping[str, str]) -> None:
    """The names of the points with the most to win.

    To the right, or to the left, so that no two overlap and no point is covered.
    """
    axes.autoscale_view()
    spots = {
        id(point): axes.transData.transform((point.intensity or 0.0, point.flops_per_second or 0.0))
        for point in timed
    }
    dots = {
        key: Bbox.from_bounds(x - _DOT, y - _DOT, 2 * _DOT, 2 * _DOT)
        for key, (x, y) in spots.items()
    }
    taken: list[Bbox] = []
    for point in sorted(timed, key=lambda point: -(point.potential_seconds or 0.0)):
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
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        markersize=7,
        markerfacecolor=face,
        markeredgecolor=colour,
        label=label,
    )


def _roof(axes: Axes, ceiling: Ceiling, left: float, right: float) -> Line2D:
    peak, slope = ceiling.flops_per_second, ceiling.bandwidth_bytes_per_second
    label = f"{ceiling.hardware}, {ceiling.dtype}: {units.quantity(peak, 'FLOP/s')}, {units.quantity(slope, 'B/s')}"
    ridge = peak / slope if slope else left
    xs = sorted({left, min(max(ridge, left), right), right})
    (line,) = axes.plot(
        xs,
        [min(peak, x * slope) if slope else peak for x in xs],
        "-" if ceiling.is_judged_by else "--",
        color=TEXT,
        lw=1.2,
        label=label,
    )
    return line


def _range(intensities: Iterable[float | None]) -> tuple[float, float]:
    """A decade to either side, and both sides of what roofs usually turn at."""
    known = [each for each in chain(intensities, (0.1, 1000.0)) if each]
    return min(known) / _DECADE, max(known) * _DECADE

"""Live memory over a step, drawn: an area for each category over the operators, and the phases above, as the page draws it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from lflops import units
from lflops.analyze.analysis import Analysis, analyze
from lflops.errors import ProfileError
from lflops.figures.design import CATEGORIES, PHASES, QUIET, TEXT, drawn_on
from lflops.profile.model import Memory, Moment, Profile
from lflops.profile.records import ByCategory, Phase

_BAND = (1.02, 1.07)  # where the phases are, in heights of the axes
_TICKS = 6
_WITHIN = 0.5  # the peak lies between the operator that reached it and the next one
_LATE = 0.75  # behind this share of the step there is no room for a text to the right


def memory_figure(analysis: Analysis) -> Figure:
    """Bytes alive before each operator by category, where these are known, and the peak; a `ProfileError` where memory was not counted."""
    memory, peak = analysis.profile.memory, analysis.peak_moment
    if memory is None or not memory.timeline:
        raise ProfileError("the profile has no memory to draw: it was not counted")
    figure, axes = drawn_on(10, 4.2)
    operators: list[float] = [position if moment.index is None else moment.index for position, moment in enumerate(memory.timeline)]
    reached = next((place for place, moment in enumerate(memory.timeline) if moment is peak), None)
    _areas(axes, memory, operators, reached)
    for phase, indices in _runs(memory.timeline):
        start, end = operators[indices[0]], operators[indices[-1]]
        axes.fill_between([start, end], *_BAND, color=PHASES[phase], linewidth=0, transform=axes.get_xaxis_transform(), clip_on=False)
        if end - start > 0.08 * (operators[-1] or 1):
            axes.text((start + end) / 2, sum(_BAND) / 2, phase, transform=axes.get_xaxis_transform(), ha="center", va="center", fontsize=8)
    _mark_peak(axes, memory.peak_bytes, None if reached is None else operators[reached] + _WITHIN, operators[-1])
    axes.set(
        xlabel="operator, in the order of execution", xlim=(operators[0], max(operators[-1], 1)), ylim=(0, 1.12 * memory.peak_bytes or 1)
    )
    axes.yaxis.set_major_locator(MultipleLocator(2 ** max((memory.peak_bytes // _TICKS).bit_length(), 0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(round(value)).replace(".00", "")))
    return figure


def _mark_peak(axes: Axes, nbytes: int, at: float | None, last: float) -> None:
    """A point with its size next to it; where it is unknown when the peak was, a line across."""
    style: dict[str, Any] = {"fontsize": 9, "color": TEXT, "textcoords": "offset points", "parse_math": False}
    if at is None:
        axes.axhline(nbytes, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(f"peak {units.size(nbytes)}", (last, nbytes), xytext=(-2, 4), va="bottom", ha="right", **style)
        return
    axes.plot([at, at], [0, nbytes], color=TEXT, linewidth=0.8, linestyle=":")
    axes.plot(at, nbytes, "o", markersize=6, markerfacecolor="white", markeredgecolor=TEXT)
    is_late = at > _LATE * last
    side = (-8, "right") if is_late else (8, "left")
    axes.annotate(f"peak {units.size(nbytes)}", (at, nbytes), xytext=(side[0], 2), va="bottom", ha=side[1], weight="bold", **style)


def _areas(axes: Axes, memory: Memory, operators: Sequence[float], reached: int | None) -> None:
    """A stack of categories, the lasting ones below; of an older file, without categories, one area.

    `operators` are the places of the moments; the peak lies behind the moment that `reached` it, where that is known.
    """
    moments = memory.timeline
    parts = [moment.by_category for moment in moments if moment.by_category is not None]
    if len(parts) < len(moments):
        axes.fill_between(operators, [moment.live_bytes for moment in moments], color=CATEGORIES["optimizer_state"], linewidth=0)
        return
    if reached is not None and memory.by_category:
        peak = ByCategory(**{name: memory.by_category.get(name, 0) for name in ByCategory._fields})
        parts.insert(reached + 1, peak)
        operators = [*operators[: reached + 1], operators[reached] + _WITHIN, *operators[reached + 1 :]]
    shown = {name: colour for name, colour in CATEGORIES.items() if any(getattr(part, name) for part in parts)}
    columns = [[getattr(part, name) for part in parts] for name in shown]
    axes.stackplot(operators, columns, colors=list(shown.values()), linewidth=0)
    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in shown.items()]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(handles), frameon=False, fontsize=9, labelcolor=QUIET
    )


def _runs(timeline: Sequence[Moment]) -> Iterator[tuple[Phase, list[int]]]:
    """Consecutive indices of the timeline in one phase, up to the first of the next."""
    start = 0
    for index in range(1, len(timeline) + 1):
        if index == len(timeline) or timeline[index].phase != timeline[start].phase:
            yield timeline[start].phase, list(range(start, min(index + 1, len(timeline))))
            start = index


def save_memory_figure(profile: Profile, path: Path) -> None:
    """Write it, in the format of the file's ending; a `ProfileError` where memory was not counted, or the file cannot be written."""
    figure = memory_figure(analyze(profile))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: the figure cannot be written: {error}") from error

"""Live memory over a step, drawn: an area for each category over the operators, and the phases above, as the page draws it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from lflops import units
from lflops.errors import ProfileError
from lflops.profile.model import Memory, Moment, Profile
from lflops.profile.records import Phase
from lflops.report.figures.design import CATEGORIES, PHASES, QUIET, TEXT, drawn_on

__all__ = ["memory_figure", "save_memory_figure"]

_BAND = (1.02, 1.07)
"""Where the phases are, in heights of the axes."""
_TICKS = 6


def memory_figure(profile: Profile) -> Figure:
    """Bytes alive before each operator of the timeline by category, where these are known, and the peak.

    Raises:
        ProfileError: Memory was not counted.
    """
    memory = profile.memory
    if memory is None or not memory.timeline:
        raise ProfileError("the profile has no memory to draw: it was not counted")
    figure, axes = drawn_on(10, 4.2)
    operators = [position if moment.index is None else moment.index for position, moment in enumerate(memory.timeline)]
    _areas(axes, memory, operators)
    for phase, indices in _runs(memory.timeline):
        start, end = operators[indices[0]], operators[indices[-1]]
        axes.fill_between([start, end], *_BAND, color=PHASES[phase], linewidth=0, transform=axes.get_xaxis_transform(), clip_on=False)
        if end - start > 0.08 * (operators[-1] or 1):
            axes.text((start + end) / 2, sum(_BAND) / 2, phase, transform=axes.get_xaxis_transform(), ha="center", va="center", fontsize=8)
    axes.axhline(memory.peak_bytes, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
    peak = f"peak {units.size(memory.peak_bytes)}"
    axes.annotate(peak, (operators[-1], memory.peak_bytes), va="bottom", ha="right", fontsize=9, color=TEXT, parse_math=False)
    axes.set(
        xlabel="operator, in the order of execution", xlim=(operators[0], max(operators[-1], 1)), ylim=(0, 1.12 * memory.peak_bytes or 1)
    )
    axes.yaxis.set_major_locator(MultipleLocator(2 ** max((memory.peak_bytes // _TICKS).bit_length(), 0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(round(value)).replace(".00", "")))
    return figure


def _areas(axes: Axes, memory: Memory, operators: Sequence[int]) -> None:
    """A stack of categories, the lasting ones below; of an older file, without categories, one area."""
    moments = memory.timeline
    parts = [moment.by_category for moment in moments if moment.by_category is not None]
    if len(parts) < len(moments):
        axes.fill_between(operators, [moment.live_bytes for moment in moments], color=CATEGORIES["optimizer_state"], linewidth=0)
        return
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
    """Write it, in the format of the file's ending.

    Raises:
        ProfileError: Memory was not counted, or the file cannot be written.
    """
    figure = memory_figure(profile)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: the figure cannot be written: {error}") from error

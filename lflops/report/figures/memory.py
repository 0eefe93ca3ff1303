"""Live memory over a step, drawn: an area over the operators, in the colour of the phase that runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lflops import units
from lflops.errors import ProfileError
from lflops.profile.model import Moment, Profile
from lflops.profile.records import Phase

__all__ = ["memory_figure", "save_memory_figure"]

COLOURS: dict[Phase, str] = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "recompute": "tab:green",
    "optimizer": "tab:purple",
    "other": "tab:gray",
}


def memory_figure(profile: Profile) -> Figure:
    """Bytes alive before each operator of the timeline, and the peak.

    Raises:
        ProfileError: Memory was not counted.
    """
    memory = profile.memory
    if memory is None or not memory.timeline:
        raise ProfileError("the profile has no memory to draw: it was not counted")
    gibibytes = [moment.live_bytes / 2**30 for moment in memory.timeline]
    peak = memory.peak_bytes / 2**30
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for phase, indices in _runs(memory.timeline):
        axes.fill_between(indices, [gibibytes[index] for index in indices], color=COLOURS[phase], linewidth=0)
    shown = {moment.phase: None for moment in memory.timeline}
    axes.legend(handles=[Patch(color=COLOURS[phase], label=phase) for phase in shown], loc="lower right", fontsize="small")
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(f"peak {units.size(memory.peak_bytes)}", (0, peak), va="bottom", fontsize="small")
    axes.set(xlabel="operators", ylabel="live memory, GiB", xlim=(0, max(len(gibibytes) - 1, 1)), ylim=(0, 1.1 * peak or 1))
    return figure


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

"""The look that all figures share with the page: colours, fonts, thin axes."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lflops.profile.records import Phase

TEXT, QUIET, LINE = "#1c2430", "#5b6674", "#d8dde4"

PHASES: Mapping[Phase, str] = {
    "forward": "#6aa9e9",
    "backward": "#8f86e0",
    "recompute": "#e08fbc",
    "optimizer": "#58b98b",
    "other": "#c3c9d1",
}

CATEGORIES: Mapping[str, str] = {
    "parameters": "#6a97d6",
    "optimizer_state": "#86aede",
    "other": "#c3c9d1",
    "gradients": "#d9743f",
    "activations": "#ecc76a",
    "temporary": "#a265b0",
}
"""From the bottom of a stack: what stays, then what comes and goes."""


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

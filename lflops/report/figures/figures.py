"""A profile's figures as pictures. They are drawn on canvases of their own: what a training has set up in matplotlib stays as it is."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lflops.analyze.speed.roofline import placed_once
from lflops.profile.model import Profile
from lflops.report.figures.memory import memory_figure
from lflops.report.figures.roofline import roofline_figure

__all__ = ["Picture", "pictures"]


class Picture(NamedTuple):
    """A figure as a PNG file; its width and height are in pixels."""

    name: str
    width: int
    height: int
    png: bytes


def pictures(profile: Profile) -> Iterator[Picture]:
    """The roofline, where the chip's roof is known; and live memory, where that was counted."""
    found = placed_once(profile)
    if found.ceilings:
        yield _drawn("roofline", roofline_figure(found))
    if profile.memory is not None and profile.memory.timeline:
        yield _drawn("memory", memory_figure(profile))


def _drawn(name: str, figure: Figure) -> Picture:
    canvas: Any = FigureCanvasAgg(figure)  # much of it has no annotations
    file = BytesIO()
    canvas.print_png(file)
    width, height = canvas.get_width_height()
    return Picture(name, width, height, file.getvalue())

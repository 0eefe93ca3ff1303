"""A profile's figures as PNG files. Each has its own canvas, so matplotlib's global state does not change."""

from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lflops.analyze.analysis import Analysis
from lflops.figures.memory import memory_figure
from lflops.figures.roofline import roofline_figure


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
    canvas: Any = FigureCanvasAgg(figure)  # much of it has no annotations
    file = BytesIO()
    canvas.print_png(file)
    width, height = canvas.get_width_height()
    return Picture(name, width, height, file.getvalue())

"""Build the page's Roofline view: rooflines, and points by module, repeated module and operator."""

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple, TypeVar

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Point, RooflinePart, point_of
from lflops.analysis.tree import Repeats, fold_parts
from lflops.profile.series import positions
from lflops.report.payload.columns import Columns, column, table
from lflops.report.text import OVER, saved_by_fusion, why_no_limit

Timed = TypeVar("Timed", RooflinePart, Repeats, Point)

MAX_POINTS = 2000
"""Maximum number of points in a table.

More points would be too many for a chart and for the size of the page.
"""

_FIGURES = (
    "flops",
    "bytes_moved",
    "fused_bytes",
    "intensity",
    "seconds",
    "roof_seconds",
    "share",
    "bound",
    "flops_per_second",
    "roof_flops_per_second",
    "potential_seconds",
)


class Points(Struct, frozen=True, kw_only=True):
    """The points with the most time, or, without times, with the largest roofline-bound time.

    Attributes:
        table: Columns of the points: `phase`, always a list; `module`, a row of the table of
            modules; `label`, if the name is not the module's; `times`, the number of modules that
            the point stands for; `has_below`, true if there are submodules, which the point does
            not include; figures in SI units; and `over`, the reason in words if the point is above
            its roofline limit.
        left_out: Number of points that are not in the table.
    """

    table: Columns
    left_out: int


class Roofs(Struct, frozen=True, kw_only=True):
    """A roofline.

    Attributes:
        ceilings: The rooflines; the roofline that limits the points comes first.
        why_unknown: Reason why the points have no limit. Empty if they have a limit.
        modules: Modules by phase, without submodules.
        repeats: Modules by phase, with repeated modules as one point.
        operators: Operators by phase and dtype, over all modules; their times are known only from a
            trace.
        fusion: A sentence about the bytes that compiled code moves. Empty if they are unknown.
    """

    ceilings: tuple[Ceiling, ...]
    why_unknown: str
    modules: Points
    repeats: Points
    operators: Points
    fusion: str


class _PointRow(NamedTuple):
    """A point and the row of its module in the table of modules.

    For repeated modules, it is the row of the first module.
    """

    point: Point
    module: int | None
    label: str | None = None
    times: int = 1
    has_below: bool = False


def roofs(analysis: Analysis) -> Roofs | None:
    """Build the view, or return `None` if nothing was counted."""
    profile = analysis.profile
    overview = analysis.roofline
    if not profile.is_counted or not overview.self_work:
        return None
    rows = positions(profile.modules)
    below = {name.rpartition(".")[0] for name in profile.modules if name}
    self_work = []
    for part in _longest(overview.self_work):
        has_below = part.module in below
        self_work.append(_PointRow(point_of(part), rows[part.module], has_below=has_below))
    folded = list(fold_parts(overview.self_work, analysis.patterns))
    repeats = []
    for group in _longest(folded):
        first = group.parts[0].module
        times = len(group.parts)
        repeats.append(
            _PointRow(
                group.point,
                rows[first],
                label=group.label if times > 1 else None,
                times=times,
                has_below=first in below,
            )
        )
    operators = [
        _PointRow(point, None, label=f"{point.operator} {point.dtype}")
        for point in _longest(overview.operators)
    ]
    return Roofs(
        ceilings=overview.ceilings,
        why_unknown=why_no_limit(profile.run, overview.ceilings),
        modules=_points(self_work, len(overview.self_work)),
        repeats=_points(repeats, len(folded)),
        operators=_points(operators, len(overview.operators)),
        fusion=saved_by_fusion(analysis.fusion),
    )


def _longest(items: Sequence[Timed]) -> list[Timed]:
    return nlargest(MAX_POINTS, items, key=_seconds)


def _seconds(item: RooflinePart | Repeats | Point) -> float:
    seconds = item.roof_seconds if item.seconds is None else item.seconds
    return seconds or 0.0


def _points(rows: Sequence[_PointRow], number: int) -> Points:
    """Make a table of the given rows; `number` is the number of all points."""
    points = [row.point for row in rows]
    columns: Columns = {
        "phase": [point.phase for point in points],
        **table(rows, ("module", "label", "times", "has_below")),
        **table(points, _FIGURES),
        "over": column(OVER.get(point.over or "") for point in points),
    }
    return Points(table=columns, left_out=number - len(rows))

"""Build the data of the page's Roofline view.

A point is a module, a group of identical modules, or an operator. The rooflines show the FLOP/s
that a point can reach at most.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple, TypeVar

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Point, RooflinePart, point_of
from lflops.analysis.tree import Repeats, fold_parts
from lflops.profile.module_names import parent_of
from lflops.profile.series import positions
from lflops.report.payload.columns import Columns, column, lists, table
from lflops.report.text import OVER, saved_by_fusion, why_no_limit

Timed = TypeVar("Timed", RooflinePart, Repeats, Point)

MAX_POINTS = 2000
"""Maximum number of points in a table. More points make a chart unreadable and the page large."""

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
    """A table of the points with the most time.

    If nothing was timed, the table has the points that need the most time at their roofline limit.

    Attributes:
        table: Columns with a value for each point. `phase` is always a list. `module` is the index
            of a row in the table of modules. `label` is the name of the point if it differs from
            the name of this module. `times` is the number of modules that the point stands for.
            `has_below` is true if the module has submodules, whose work the point does not include.
            `over` explains why a point is above its roofline limit. All other columns are numbers
            in SI units.
        left_out: Number of points that are not in the table.
    """

    table: Columns
    left_out: int


class Roofs(Struct, frozen=True, kw_only=True):
    """The data of the Roofline view.

    Attributes:
        ceilings: The rooflines. Rooflines that limit the points come first.
        why_unknown: Reason why the points have no roofline limit. Empty if they have a limit.
        modules: A point for each module and phase, without the work of submodules.
        repeats: The same points, except that identical modules are combined into one point.
        operators: A point for each operator, phase and dtype, summed over all modules. Times of
            operators are only known if the step was traced.
        fusion: A sentence about the bytes that compiled code moves. Empty if they are unknown.
    """

    ceilings: tuple[Ceiling, ...]
    why_unknown: str
    modules: Points
    repeats: Points
    operators: Points
    fusion: str


class _PointRow(NamedTuple):
    """A row of a table of points. `Points` describes the columns.

    Attributes:
        module: The index of the module's row in the table of modules. If the point stands for
            several identical modules, the row of the first module. `None` for an operator.
    """

    point: Point
    module: int | None
    label: str | None = None
    times: int = 1
    has_below: bool = False


def roofs(analysis: Analysis) -> Roofs | None:
    """Return the data of the Roofline view, or `None` if nothing was counted."""
    profile = analysis.profile
    overview = analysis.roofline
    if not profile.is_counted or not overview.self_work:
        return None
    rows = positions(profile.modules)
    below = {parent_of(name) for name in profile.modules if name}
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
    operators = []
    for point in _longest(overview.operators):
        operators.append(_PointRow(point, None, label=f"{point.operator} {point.dtype}"))
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
    """Make a table of the points in `rows`.

    `number` is the number of all points, including the points that are not in `rows`.
    """
    points = [row.point for row in rows]
    columns = {
        **lists(points, ("phase",)),
        **table(rows, ("module", "label", "times", "has_below")),
        **table(points, _FIGURES),
        "over": column(OVER.get(point.over or "") for point in points),
    }
    return Points(table=columns, left_out=number - len(rows))

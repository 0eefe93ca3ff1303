"""The page's Roofline view.

The roofs, and the points by module, by repeated module and by operator.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple, TypeVar

from msgspec import Struct

from lflops.analysis.analysis import Analysis
from lflops.analysis.roofline import Ceiling, Part, Point, point_of
from lflops.analysis.tree import Repeats, fold_parts
from lflops.report.payload.columns import Columns, column
from lflops.report.text import OVER, saved_by_fusion, why_no_roof

Timed = TypeVar("Timed", Part, Repeats, Point)

# points that a chart can show, and that the page has room for
MAX_POINTS = 2000

_FIGURES = (
    "flops",
    "bytes_moved",
    "fused_bytes",
    "intensity",
    "seconds",
    "roof_seconds",
    "share",
    "bound",
)
_RENAMED = {
    "achieved": "flops_per_second",
    "reachable": "roof_flops_per_second",
    "to_win": "seconds_to_win",
}


class Points(Struct, frozen=True, kw_only=True):
    """The points with the most time, or with the most time at their roofs."""

    # For each point its `phase`, always a list; `module`, a row of the table of modules; and a
    # `label`, if it has another name. Then how many modules it stands for, and whether modules
    # below it are left out. Then its figures in SI units, and the reason in words if it is above
    # its roof.
    table: Columns
    # how many more points there are
    left_out: int


class Roofs(Struct, frozen=True, kw_only=True):
    """A roofline."""

    # those that points are judged by first
    ceilings: tuple[Ceiling, ...]
    # why the points have no roof, if they have none
    why_unknown: str
    # of each module by phase, without what is below it
    modules: Points
    # the same with the layers of a stack as one
    repeats: Points
    # by phase and dtype, over all modules; their times are unknown
    operators: Points
    # what compiled code moves in place of its operators' bytes, as a sentence; empty where that is
    # unknown
    fusion: str


class _PointRow(NamedTuple):
    """A point and its row in the table of modules; for repeated modules that of the first."""

    point: Point
    module: int | None
    label: str | None = None
    times: int = 1
    has_below: bool = False


def roofs(analysis: Analysis) -> Roofs | None:
    """The view; `None` where nothing was counted."""
    profile, overview = analysis.profile, analysis.roofline
    if not profile.is_counted or not overview.own:
        return None
    rows = {name: row for row, name in enumerate(profile.modules)}
    below = {name.rpartition(".")[0] for name in profile.modules if name}
    own = [
        _PointRow(point_of(part), rows[part.module], has_below=part.module in below)
        for part in _longest(overview.own)
    ]
    folded = list(fold_parts(overview.own, analysis.patterns))
    repeats = []
    for each in _longest(folded):
        first, times = each.parts[0].module, len(each.parts)
        label = each.label if times > 1 else None
        repeats.append(
            _PointRow(each.point, rows[first], label=label, times=times, has_below=first in below)
        )
    operators = [
        _PointRow(point, None, label=f"{point.operator} {point.dtype}")
        for point in _longest(overview.operators)
    ]
    return Roofs(
        ceilings=overview.ceilings,
        why_unknown=why_no_roof(profile.run, overview.ceilings),
        modules=_points(own, len(overview.own)),
        repeats=_points(repeats, len(folded)),
        operators=_points(operators, len(overview.operators)),
        fusion=saved_by_fusion(analysis.fusion),
    )


def _longest(items: Sequence[Timed]) -> list[Timed]:
    return nlargest(
        MAX_POINTS,
        items,
        key=lambda item: (item.roof_seconds if item.seconds is None else item.seconds) or 0.0,
    )


def _points(kept: Sequence[_PointRow], number: int) -> Points:
    columns: Columns = {"phase": [each.point.phase for each in kept]}
    columns |= {
        field: column(getattr(each, field) for each in kept)
        for field in ("module", "label", "times", "has_below")
    }
    named = dict(zip(_FIGURES, _FIGURES, strict=True)) | _RENAMED
    columns |= {
        name: column(getattr(each.point, field) for each in kept) for name, field in named.items()
    }
    columns["over"] = column(OVER[each.point.over] if each.point.over else None for each in kept)
    return Points(table=columns, left_out=number - len(kept))

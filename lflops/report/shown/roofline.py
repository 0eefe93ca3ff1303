"""What the page's Roofline shows: the roofs, and the points below them in three ways."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from lflops.analyze.repeats import repeats
from lflops.analyze.roofline import Ceiling, Point, Roofline, roofline
from lflops.profile import Profile
from lflops.report.roofline import OVER
from lflops.report.shown.columns import Columns, Value, column

__all__ = ["MOST", "Points", "Roofs", "roofs"]

MOST = 2000
"""Points that a chart can show, and that the page has room for."""

_FIGURES = {
    "flops": "flops",
    "bytes_moved": "bytes_moved",
    "intensity": "intensity",
    "seconds": "seconds",
    "achieved": "flops_per_second",
    "roof_seconds": "roof_seconds",
    "reachable": "roof_flops_per_second",
    "share": "share",
    "to_win": "seconds_to_win",
    "bound": "bound",
}


class Points(Struct, frozen=True, kw_only=True):
    """Those with the most time, or that need the most at their roofs.

    Attributes:
        table: Of each its `phase`, always a list; `module`, a row of the table of modules, and `label`, where it is not the module's
            name; how many `times` it stands for; whether there are modules below whose work is not in it; its figures in SI units; and why
            it is over its roof, in words.
        left_out: How many there are beside them.
    """

    table: Columns
    left_out: int


class Roofs(Struct, frozen=True, kw_only=True):
    """A roofline.

    Attributes:
        ceilings: Those that points are judged by first.
        why_unknown: Why the points have no roof, if they have none.
        modules: Of each module by phase, without what is below it.
        repeats: The same with the layers of a stack as one.
        operators: By phase and dtype, over all modules; no clock tells their times.
    """

    ceilings: tuple[Ceiling, ...]
    why_unknown: str
    modules: Points
    repeats: Points
    operators: Points


def roofs(profile: Profile) -> Roofs | None:
    """What there is to place; `None` where nothing was counted."""
    found = roofline(profile)
    if not profile.is_counted or not found.own:
        return None
    rows = {name: row for row, name in enumerate(profile.modules)}
    below = {name.rpartition(".")[0] for name in profile.modules if name}
    own, left_out = _most(found.own)
    whole = repeats(found.own)
    kept, folded_out = _most([each.sum for each in whole])
    of_sum = {id(each.sum): each for each in whole}
    folded = [of_sum[id(point)] for point in kept]
    operators, operators_out = _most(found.operators)

    def of_modules(points: Sequence[Point], labels: Iterable[str | None], times: Iterable[int]) -> Columns:
        places = {
            "module": [rows[point.module] for point in points],
            "label": labels,
            "times": times,
            "has_below": [point.module in below for point in points],
        }
        return _table(points, places)

    return Roofs(
        ceilings=found.ceilings,
        why_unknown=_why_unknown(profile, found),
        modules=Points(table=of_modules(own, [None] * len(own), [1] * len(own)), left_out=left_out),
        repeats=Points(
            table=of_modules(kept, [each.label if each.times > 1 else None for each in folded], [each.times for each in folded]),
            left_out=folded_out,
        ),
        operators=Points(
            table=_table(operators, {"label": [f"{point.operator} {point.dtype}" for point in operators]}), left_out=operators_out
        ),
    )


def _most(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Those with the most time, and how many others there are."""
    kept = sorted(points, key=lambda point: -(point.roof_seconds or 0.0 if point.seconds is None else point.seconds))[:MOST]
    return kept, len(points) - len(kept)


def _table(points: Sequence[Point], places: Mapping[str, Iterable[Value]]) -> Columns:
    columns: Columns = {"phase": [point.phase for point in points]}
    columns |= {name: column(values) for name, values in places.items()}
    columns |= {name: column(getattr(point, field) for point in points) for name, field in _FIGURES.items()}
    columns["over"] = column(OVER[point.over] if point.over else None for point in points)
    return columns


def _why_unknown(profile: Profile, found: Roofline) -> str:
    run = profile.run
    if run.hardware is None:
        return (
            f'what {run.device_name} can do is not known; run FlopsMonitor or lflops.measure with hardware="measure", or with a name that '
            "lflops hardware lists"
        )
    if not any(ceiling.is_judged_by for ceiling in found.ceilings):
        return f"{run.hardware.name} has no known peak in any of the dtypes that were multiplied"
    if run.hardware.bandwidth_bytes_per_second is None:
        return f"the bandwidth of {run.hardware.name} is not known"
    return ""

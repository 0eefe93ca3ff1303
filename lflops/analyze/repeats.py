"""Points of modules that repeat, as one: of the layers of a stack there is one for all that did the same work."""

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from lflops.analyze.roofline import TOLERANCE, Bound, Point
from lflops.observations import Phase

__all__ = ["Repeated", "repeats"]


class Repeated(Struct, frozen=True, kw_only=True):
    """Points that differ in their times alone, and in the numbers within their modules' names.

    Attributes:
        label: The names, with `*` for a number where there are several.
        times: How many there are.
        sum: All of them; its module is the first one's.
    """

    label: str
    times: int
    sum: Point


def repeats(points: Iterable[Point]) -> tuple[Repeated, ...]:
    """Each point of a module in one of what repeats, in the order of the first ones."""
    groups: defaultdict[tuple[str, Phase, int, int, int, Bound | None], list[Point]] = defaultdict(list)
    for point in points:
        name = ".".join("*" if part.isdecimal() else part for part in point.module.split("."))
        groups[name, point.phase, point.calls, point.flops, point.bytes_moved, point.bound].append(point)
    return tuple(
        Repeated(label=str(key[0]) if len(group) > 1 else group[0].module, times=len(group), sum=_sum(group))
        for key, group in groups.items()
    )


def _sum(points: list[Point]) -> Point:
    """Rates, the bound and the intensity of equals are those of one; what is over its roof in the mean says why one of them is."""
    first, times = points[0], len(points)
    roof = None if first.roof_seconds is None else sum(point.roof_seconds or 0.0 for point in points)
    seconds = None if any(point.seconds is None for point in points) else sum(point.seconds or 0.0 for point in points)
    share = roof / seconds if roof is not None and seconds else None
    return replace(
        first,
        calls=first.calls * times,
        flops=first.flops * times,
        bytes_moved=first.bytes_moved * times,
        seconds=seconds,
        flops_per_second=first.flops * times / seconds if seconds else None,
        roof_seconds=roof,
        share=share,
        seconds_to_win=max(seconds - roof, 0.0) if seconds is not None and roof is not None else None,
        over=next((point.over for point in points if point.over), None) if share is not None and share > 1 + TOLERANCE else None,
    )

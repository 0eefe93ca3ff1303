"""Points of a roofline that did the same work, as one: those of modules whose names differ in numbers alone, as of 48 layers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lflops.analyze.speed.roofline import Bound, Over, Point
from lflops.profile.queries import pattern

__all__ = ["repeats"]

_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_WORST_FIRST: tuple[Over, ...] = ("error", "cache_unknown", "compiled", "cache")


def repeats(points: Iterable[Point]) -> Iterator[tuple[int, Point]]:
    """How many modules, and their sum under the name they share: bound as most of it is, over its roof where one is."""
    alike: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        alike[pattern(point.module), point.operator, point.dtype, point.phase, point.flops, point.bytes_moved].append(point)
    for found in alike.values():
        yield len(found), found[0] if len(found) == 1 else _together(found)


def _together(points: Sequence[Point]) -> Point:
    flops, moved = sum(point.flops for point in points), sum(point.bytes_moved for point in points)
    seconds, roof = _sum(point.seconds for point in points), _sum(point.roof_seconds for point in points)
    return replace(
        points[0],
        module=pattern(points[0].module),
        calls=sum(point.calls for point in points),
        flops=flops,
        bytes_moved=moved,
        intensity=flops / moved if moved else None,
        seconds=seconds,
        flops_per_second=flops / seconds if seconds else None,
        roof_seconds=roof,
        roof_flops_per_second=flops / roof if roof else None,
        share=roof / seconds if roof is not None and seconds else None,
        bound=max(_BOUNDS, key=lambda bound: sum(point.roof_seconds or 0.0 for point in points if point.bound == bound)) if roof else None,
        seconds_to_win=_sum(point.seconds_to_win for point in points),
        over=next((over for over in _WORST_FIRST if any(point.over == over for point in points)), None),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Unknown where one of them is."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)

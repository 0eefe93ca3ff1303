"""What repeats in a model, as its 48 layers, so that one row or one point stands for all of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace

from lflops.analyze.speed.roofline import Bound, Over, Point, Total, point_of
from lflops.profile.model import COUNTS, PHASES, ModuleProfile, Profile
from lflops.profile.module_names import fold_repeats
from lflops.profile.series import sum_known

__all__ = ["FoldedPoint", "fold_points", "identical_subtrees"]

_COMPARED = (*COUNTS, *(f"own_{count}" for count in COUNTS), "logical_macs", "own_logical_macs")
_FACTS = (
    "kind",
    "calls",
    "compiled",
    "parameters",
    "trainable_parameters",
    "parameter_bytes",
    "trainable_parameter_bytes",
    "own_parameters",
    "local_parameters",
    "local_parameter_bytes",
)


_FACTS_OF, _WORKS_OF, _COUNTS_OF = attrgetter(*_FACTS), attrgetter(*PHASES), attrgetter(*_COMPARED)  # five times as fast as loops

_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_WORST_FIRST: tuple[Over, ...] = ("error", "cache_unknown", "compiled", "cache")


def identical_subtrees(profile: Profile, below: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A number for each module; two modules have the same where their counts are equal, and the labels and counts of all below them.

    Args:
        profile: The modules.
        below: The names directly below each name.
    """
    numbers: dict[str, int] = {}
    seen: dict[Any, int] = {}
    for name in sorted(profile.modules, key=len, reverse=True):  # longer names first: children before their parents
        children = tuple((child.rpartition(".")[2], numbers[child]) for child in below[name])
        numbers[name] = seen.setdefault((_counts(profile.modules[name]), children), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    """The values that identical modules share: neither times nor the peak, which depend on when a module runs."""
    dtypes = ((dtype, share.parameters, share.bytes) for dtype, share in sorted(module.dtypes.items()))
    return (module.owner is None, _FACTS_OF(module), *map(_COUNTS_OF, _WORKS_OF(module)), *dtypes)


class FoldedPoint(NamedTuple):
    """A point for modules that repeat at one place and did the same work.

    Attributes:
        modules: How many they are.
        point: Their sum under the names' pattern, or the only one.
        first: The point of the first of them.
    """

    modules: int
    point: Point
    first: Point


_MODULE_AND_WORK = attrgetter("module", "operator", "dtype", "phase", "flops", "bytes_moved")


def fold_points(points: Iterable[Point], patterns: Mapping[str, str]) -> Iterator[FoldedPoint]:
    """One point for modules that repeat at one place and did the same work, in the order of the first ones.

    The point is their sum. Its bound is that of most of its time. It is above its roof if one of them is.

    Args:
        points: Of modules.
        patterns: Each module's name with `*` for the numbers of what repeats.
    """
    for label, group in fold_repeats(points, _MODULE_AND_WORK, patterns):
        yield FoldedPoint(len(group), group[0] if len(group) == 1 else _sum_of(label, group), group[0])


def _sum_of(label: str, points: Sequence[Point]) -> Point:
    first, over = points[0], {point.over for point in points}
    total = Total(
        calls=sum(point.calls for point in points),
        flops=sum(point.flops for point in points),
        bytes_moved=sum(point.bytes_moved for point in points),
        seconds=sum_known(point.roof_seconds for point in points),
        bound=max(_BOUNDS, key=lambda bound: sum(point.roof_seconds or 0.0 for point in points if point.bound == bound)),
        costs=(),
    )
    seconds, fused = sum_known(point.seconds for point in points), sum_known(point.fused_bytes for point in points)
    return replace(
        point_of(total, label, first.phase, operator=first.operator, dtype=first.dtype, seconds=seconds, fused=fused),
        seconds_to_win=sum_known(point.seconds_to_win for point in points),
        over=next((each for each in _WORST_FIRST if each in over), None),
    )

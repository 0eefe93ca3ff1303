"""What repeats in a model, as its 48 layers, so that one row or one point stands for all of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from lflops.analyze.speed.roofline import Bound, Over, Point, rates
from lflops.profile.model import COUNTS, PHASES, ModuleProfile, Profile
from lflops.profile.module_names import fold_repeats
from lflops.profile.series import sum_known

__all__ = ["fold_points", "identical_subtrees"]

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


_works_of, _facts_of = attrgetter(*_COMPARED), attrgetter(*_FACTS)  # five times as fast as a loop

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
    works = (_works_of(module.work(phase)) for phase in PHASES)
    dtypes = ((dtype, share.parameters, share.bytes) for dtype, share in sorted(module.dtypes.items()))
    return (module.owner is None, _facts_of(module), *dtypes, *works)


def fold_points(points: Iterable[Point], patterns: Mapping[str, str]) -> Iterator[tuple[int, Point]]:
    """One point for modules that repeat at one place and did the same work, with how many they are.

    The point is their sum under the names' pattern. Its bound is that of most of its time. It is above its roof if one of them is.

    Args:
        points: Of modules.
        patterns: Each module's name with `*` for the numbers of what repeats.
    """
    folded = fold_repeats(
        points, lambda point: (point.module, point.operator, point.dtype, point.phase, point.flops, point.bytes_moved), patterns
    )
    return ((len(group), group[0] if len(group) == 1 else _sum_of(label, group)) for label, group in folded)


def _sum_of(label: str, points: Sequence[Point]) -> Point:
    seconds, roof = sum_known(point.seconds for point in points), sum_known(point.roof_seconds for point in points)
    return replace(
        points[0],
        module=label,
        calls=sum(point.calls for point in points),
        **rates(sum(point.flops for point in points), sum(point.bytes_moved for point in points), seconds, roof),
        bound=max(_BOUNDS, key=lambda bound: sum(point.roof_seconds or 0.0 for point in points if point.bound == bound)) if roof else None,
        seconds_to_win=sum_known(point.seconds_to_win for point in points),
        over=next((over for over in _WORST_FIRST if any(point.over == over for point in points)), None),
        fused_bytes=sum_known(point.fused_bytes for point in points),
    )

"""What repeats in a model, as its 48 layers, so that one row or one point stands for all of them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace

from lflops.analyze.speed.roofline import AboveRoofReason, Bound, Part, Point, Total, point_of
from lflops.profile.model import COUNTS, ModuleProfile, Profile
from lflops.profile.module_names import fold_repeats
from lflops.profile.records import PHASES
from lflops.profile.series import sum_known, sums

_COMPARED = (*COUNTS, *(f"own_{count}" for count in COUNTS), "logical_macs", "own_logical_macs")
_FACTS = (
    *("kind", "calls", "compiled", "parameters", "trainable_parameters", "parameter_bytes", "trainable_parameter_bytes"),
    *("own_parameters", "local_parameters", "local_parameter_bytes"),
)

_FACTS_OF, _WORKS_OF, _COUNTS_OF = attrgetter(*_FACTS), attrgetter(*PHASES), attrgetter(*_COMPARED)  # five times as fast as loops

_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_WORST_FIRST: tuple[AboveRoofReason, ...] = ("error", "cache_unknown", "compiled", "cache")


def identical_subtrees(profile: Profile, below: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A number for each module; two modules have the same where their counts are equal, and the labels and counts of all below them."""
    return numbered(below, lambda name: _counts(profile.modules[name]))


def numbered(below: Mapping[str, Sequence[str]], key: Callable[[str], Hashable]) -> dict[str, int]:
    """A number for each module; two modules have the same where their keys are equal, and the labels and keys of all below them."""
    numbers: dict[str, int] = {}
    seen: dict[Hashable, int] = {}
    for name in sorted(below, key=len, reverse=True):  # longer names first: children before their parents
        children = tuple((child.rpartition(".")[2], numbers[child]) for child in below[name])
        numbers[name] = seen.setdefault((key(name), children), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    """The values that identical modules share: neither times nor the peak, which depend on when a module runs."""
    return (module.owner is None, _FACTS_OF(module), *map(_COUNTS_OF, _WORKS_OF(module)), frozenset(module.dtypes.items()))


class Repeats(NamedTuple):
    """The parts of modules that repeat at one place and did the same work, in the model's order, with their pattern or only name."""

    label: str
    parts: Sequence[Part]

    @property
    def seconds(self) -> float | None:
        """The sum over the parts; `None` where one is unknown."""
        return sum_known(part.seconds for part in self.parts)

    @property
    def roof_seconds(self) -> float | None:
        """The sum over the parts; `None` where one is unknown."""
        return sum_known(part.roof_seconds for part in self.parts)

    @property
    def point(self) -> Point:
        """Their sum. Its bound is that of most of its time. It is above its roof if one of them is."""
        first, *others = self.parts
        if not others:
            return point_of(first)
        over = {part.over for part in self.parts}
        total = Total(
            **sums([part.total for part in self.parts], "calls", "flops", "bytes_moved"),
            seconds=self.roof_seconds,
            bound=max(_BOUNDS, key=lambda bound: sum(part.roof_seconds or 0.0 for part in self.parts if part.total.bound == bound)),
            costs=(),
        )
        fused = sum_known(part.fused_bytes for part in self.parts)
        return replace(
            point_of(Part(total, self.label, first.phase, seconds=self.seconds, fused_bytes=fused)),
            seconds_to_win=sum_known(part.seconds_to_win for part in self.parts),
            over=next((each for each in _WORST_FIRST if each in over), None),
        )


_MODULE_AND_WORK = attrgetter("module", "phase", "total.flops", "total.bytes_moved")


def fold_parts(parts: Iterable[Part], patterns: Mapping[str, str]) -> Iterator[Repeats]:
    """Group the parts of modules that repeat at one place and did the same work, in the order of the first ones."""
    return starmap(Repeats, fold_repeats(parts, _MODULE_AND_WORK, patterns))

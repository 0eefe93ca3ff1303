"""Modules that take much longer than the others at their place, which do the same work: one slow layer of a stack."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from lflops.profile.model import ModuleProfile, Profile
from lflops.profile.records import Phase

__all__ = ["Outlier", "outliers"]

_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")
_LEAST_MODULES = 3
_LEAST_RATIO = 1.5
_LEAST_SHARE = 0.02
"""The least excess, as a share of all modules' time."""
_MOST_OF = 0.7
"""A module below explains an outlier if it has this share of its excess."""


class Outlier(Struct, frozen=True, kw_only=True):
    """A module that is slower than its repeats.

    Attributes:
        module: Its name.
        others: How many others do the same work at its place.
        seconds: Of forward and backward, with all below it.
        usual_seconds: The median of all at its place.
    """

    module: str
    others: int
    seconds: float
    usual_seconds: float

    @property
    def excess(self) -> float:
        """Seconds beyond the median."""
        return self.seconds - self.usual_seconds


def outliers(
    profile: Profile, patterns: Mapping[str, str], identical: Mapping[str, int], below: Mapping[str, Sequence[str]]
) -> tuple[Outlier, ...]:
    """The outliers, the largest excess first; of a block and a part of it that explains it, the part.

    Args:
        profile: With times.
        patterns: Each module's name with `*` for the numbers of what repeats.
        identical: A number for each module, the same for modules that do the same work.
        below: The names directly below each module.
    """
    seconds = {name: _seconds(module) for name, module in profile.modules.items()}
    groups: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for name, each in seconds.items():
        if each is not None and patterns[name] != name:
            groups[patterns[name], identical[name]].append(name)
    total = seconds.get("") or sum(each or 0.0 for name, each in seconds.items() if "." not in name)
    found: dict[str, Outlier] = {}
    for names in groups.values():
        if len(names) < _LEAST_MODULES:
            continue
        usual = statistics.median(seconds[name] or 0.0 for name in names)
        for name in names:
            took = seconds[name] or 0.0
            if usual and took >= _LEAST_RATIO * usual and took - usual >= _LEAST_SHARE * total:
                found[name] = Outlier(module=name, others=len(names) - 1, seconds=took, usual_seconds=usual)
    tops = [each for name, each in found.items() if name.rpartition(".")[0] not in found]
    deepest = {each.module: each for each in (_deepest(top, found, below) for top in tops)}
    return tuple(sorted(deepest.values(), key=lambda each: -each.excess))


def _seconds(module: ModuleProfile) -> float | None:
    """Of forward and backward; `None` where a phase that ran has no time, or none ran."""
    works = [work for work in map(module.work, _PHASES) if work.calls]
    known = [work.seconds.median for work in works if work.seconds is not None]
    return sum(known) if works and len(known) == len(works) else None


def _deepest(outlier: Outlier, found: Mapping[str, Outlier], below: Mapping[str, Sequence[str]]) -> Outlier:
    """The outlier itself, or what explains it below."""
    inner = [found[name] for name in below[outlier.module] if name in found and found[name].excess >= _MOST_OF * outlier.excess]
    return _deepest(max(inner, key=lambda each: each.excess), found, below) if inner else outlier

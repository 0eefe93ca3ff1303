"""The steps of a run of several ranks: each as long as it took the slowest of them."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from lflops.profile.records import Spread, Step

__all__ = ["MergedSteps"]


class MergedSteps:
    """The steps of all ranks: each lasts until the last of them is done with it, and what disturbed one has disturbed it."""

    def __init__(self) -> None:
        self._longest: dict[tuple[int, str], Step] = {}
        self._marks: dict[tuple[int, str], dict[str, None]] = {}
        self._slowest: dict[int, tuple[float, int]] = {}
        self._tellers: Counter[int] = Counter()
        self._ranks = 0

    def add(self, rank: int, steps: Sequence[Step]) -> tuple[Spread | None, Spread | None, Spread | None]:
        """Take those of the next rank. Returns what the typical ones of it took, in all, for data, and of CPU time."""
        self._ranks += 1
        for step in steps:
            key = step.index, step.kind
            if key not in self._longest or _length(step) > _length(self._longest[key]):
                self._longest[key] = step
            self._marks.setdefault(key, {}).update(dict.fromkeys(step.marks))
        clean = {step.index: step.seconds for step in steps if step.kind == "clean" and step.seconds is not None}
        self._tellers.update(clean.keys())
        for index, seconds in clean.items():
            if index not in self._slowest or seconds > self._slowest[index][0]:
                self._slowest[index] = seconds, rank
        typical = [step for step in steps if step.is_typical]
        return (
            Spread.of(step.seconds for step in typical if step.seconds is not None),
            Spread.of(step.phases["data"] for step in typical if "data" in step.phases),
            Spread.of(each.cpu_user + each.cpu_system for each in typical if each.cpu_user is not None and each.cpu_system is not None),
        )

    def longest(self) -> tuple[Step, ...]:
        """Each as the rank saw it that took longest, with the marks of all."""
        in_order = sorted(self._longest, key=lambda key: key[0])
        return tuple(replace(self._longest[key], marks=tuple(self._marks[key])) for key in in_order)

    def slowest(self) -> Counter[int] | None:
        """How often each rank was the slowest in the clean steps that all of them tell of; `None` where there is nothing to compare."""
        common = [index for index, tellers in self._tellers.items() if tellers == self._ranks]
        return Counter(self._slowest[index][1] for index in common) if common and self._ranks > 1 else None


def _length(step: Step) -> float:
    """A time that is unknown is not the longest."""
    return -1.0 if step.seconds is None else step.seconds

"""Store a time of each rank in each step, and calculate with these times.

The times of a rank are a plain tuple of seconds. There may be thousands of ranks, and Python's
garbage collector does not track such tuples.
"""

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Self

# Maximum number of ranks for which the median of the other ranks is computed for each rank. With
# more ranks, the median of all ranks is close enough.
FEW = 17

Steps = tuple[float, ...]
"""Seconds, with one value for each step."""


def plus(one: Sequence[float], other: Sequence[float]) -> Steps:
    """Add two series step by step."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def minus(one: Sequence[float], other: Sequence[float]) -> Steps:
    """Subtract the second series from the first step by step."""
    return tuple(a - b for a, b in zip(one, other, strict=True))


def total(parts: Iterable[Sequence[float]]) -> Steps:
    """Add up several series, step by step."""
    return tuple(map(sum, zip(*parts, strict=True)))


def positive(seconds: Iterable[float]) -> Steps:
    """Replace negative values by 0."""
    return tuple(max(each, 0.0) for each in seconds)


def mean_excess(seconds: Iterable[float]) -> float:
    """Return the mean over the steps. Negative values count as 0."""
    return statistics.fmean(positive(seconds))


class RankSeries(dict[int, Steps]):
    """A time in seconds, such as the time in one module, for each rank and each step.

    The key is the rank. All ranks have the same steps.
    """

    @classmethod
    def zeros(cls, steps: dict[int, int]) -> Self:
        """Return zeros for each rank and step. `steps` has the number of steps, by rank."""
        return cls({rank: (0.0,) * number for rank, number in steps.items()})

    @classmethod
    def sum_of(cls, parts: Collection["RankSeries"], ranks: Iterable[int]) -> Self:
        """Add up several series step by step, for the given ranks."""
        sums = cls()
        for rank in ranks:
            sums[rank] = total([part[rank] for part in parts])
        return sums

    def by_step(self) -> list[Steps]:
        """Return one tuple for each step, with the seconds of all ranks."""
        return list(zip(*self.values(), strict=True))

    def add(self, other: "RankSeries") -> None:
        """Add `other` to this series in place; `other` may have fewer ranks."""
        for rank, seconds in other.items():
            self[rank] = plus(self[rank], seconds)

    def minus(self, other: "RankSeries") -> "RankSeries":
        """Return this series minus `other`, for the ranks that `other` has."""
        return RankSeries({rank: minus(self[rank], other[rank]) for rank in other})

    def median_of_others(self) -> "RankSeries":
        """Return, for each rank and step, the median of the other ranks.

        With many ranks, the median of all ranks is returned instead.
        """
        by_step = self.by_step()
        if not by_step:
            return RankSeries()
        if len(self) > FEW:
            medians = tuple(map(statistics.median, by_step))
            return RankSeries(dict.fromkeys(self, medians))
        others = RankSeries()
        for place, rank in enumerate(self):
            without_rank = [step[:place] + step[place + 1 :] for step in by_step]
            others[rank] = tuple(map(statistics.median, without_rank))
        return others

    def excess_over_others(self) -> "RankSeries":
        """Return, for each rank and step, the seconds minus the median of the other ranks."""
        return self.minus(self.median_of_others())

    def excess_of_slowest(self) -> list[float]:
        """Return, for each step, how many seconds longer the slowest rank took than the median."""
        excesses = []
        for step in self.by_step():
            excesses.append(max(step) - statistics.median_low(step))
        return excesses

    def means(self) -> dict[int, float]:
        """Return the mean over the steps, for each rank."""
        return {rank: statistics.fmean(seconds) for rank, seconds in self.items()}

    def medians(self) -> dict[int, float]:
        """Return the median over the steps, for each rank."""
        return {rank: statistics.median(seconds) for rank, seconds in self.items()}

    def values_except(self, excluded: int) -> list[float]:
        """Return one list with the seconds of all ranks in all steps, without rank `excluded`."""
        values: list[float] = []
        for rank, seconds in self.items():
            if rank != excluded:
                values += seconds
        return values

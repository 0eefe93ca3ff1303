"""Sets of moments as sorted, disjoint stretches of integer nanoseconds."""

import math
from collections.abc import Iterable, Sequence

Intervals = list[tuple[int, int]]


def joined(spans: Iterable[tuple[int, int]]) -> Intervals:
    """The spans in their order, without overlaps."""
    stretches: Intervals = []
    end = -math.inf
    for start, stop in sorted(spans):
        if start > end:
            stretches.append((start, stop))
            end = stop
        elif stop > end:
            stretches[-1] = stretches[-1][0], stop
            end = stop
    return stretches


def length(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


def outside(stretches: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Intervals:
    """The parts of the stretches that lie in none of the others."""
    left, first = [], 0
    for start, end in stretches:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(others) and others[index][0] < end:
            if at < others[index][0]:
                left.append((at, others[index][0]))
            at, index = max(at, others[index][1]), index + 1
        if at < end:
            left.append((at, end))
    return left


def shares(stretches: Intervals, *others: Intervals) -> list[int]:
    """How much of the stretches lies in each of the others; a moment belongs to the first that has it.

    Behind them, what is in none.
    """
    found = []
    for each in others:
        left = outside(stretches, each)
        found.append(length(stretches) - length(left))
        stretches = left
    return [*found, length(stretches)]

"""Combine sets of time intervals.

A set is a sorted list of disjoint intervals. An interval is a pair of its start and its end in
integer nanoseconds.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Intervals = list[Interval]


def joined(spans: Iterable[Interval]) -> Intervals:
    """Return the union of intervals, which may overlap and come in any order."""
    intervals: Intervals = []
    for start, end in sorted(spans):
        if not intervals or start > intervals[-1][1]:
            intervals.append((start, end))
        elif end > intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], end)
    return intervals


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def outside(intervals: Iterable[Interval], others: Sequence[Interval]) -> Intervals:
    """Return the parts of `intervals` that `others` does not cover."""
    left: Intervals = []
    # The index of the first interval in `others` that does not end before the current interval.
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        covered_until = start
        index = first
        while index < len(others) and others[index][0] < end:
            other_start, other_end = others[index]
            if covered_until < other_start:
                left.append((covered_until, other_start))
            covered_until = max(covered_until, other_end)
            index += 1
        if covered_until < end:
            left.append((covered_until, end))
    return left


def lengths_inside(intervals: Intervals, *others: Intervals) -> list[int]:
    """Return how many nanoseconds of `intervals` lie inside each of the sets `others`.

    The result has one more value at its end: the nanoseconds that lie in none of the sets. Time
    that lies in several sets counts only for the first of these sets.
    """
    found = []
    for each in others:
        left = outside(intervals, each)
        found.append(length(intervals) - length(left))
        intervals = left
    return [*found, length(intervals)]

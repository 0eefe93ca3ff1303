"""Combine sets of time intervals.

A set is a sorted list of disjoint intervals, in integer nanoseconds.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Intervals = list[Interval]


def joined(spans: Iterable[Interval]) -> Intervals:
    """Return the union of spans, sorted and without overlaps."""
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
    # The index of the first other interval that does not end before the current interval.
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


def shares(intervals: Intervals, *others: Intervals) -> list[int]:
    """Return the total length of the parts of `intervals` that lie inside each of the `others`.

    The last value is the length of the parts that lie in none of them. Time that lies in several
    of the `others` counts only for the first of them.
    """
    found = []
    for each in others:
        left = outside(intervals, each)
        found.append(length(intervals) - length(left))
        intervals = left
    return [*found, length(intervals)]

"""Series of numbers: a sum in which some may be unknown, and a long series made short without losing its extremes."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = ["extremes", "sum_known"]

Number = TypeVar("Number", int, float)


def sum_known(values: Iterable[Number | None]) -> Number | None:
    """The sum of the values; `None` where one of them is unknown."""
    terms = list(values)
    return None if None in terms else sum(terms)  # type: ignore[arg-type]


def extremes(values: Sequence[int], most: int, keep: Iterable[int] = ()) -> list[int]:
    """Indices of a series to keep: all of them, or the minimum and the maximum of each of equal buckets.

    There are `most` at the most. The first, the last and those of `keep` are always among them.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1, *keep}
    width = -(-len(values) // ((most - len(kept)) // 2))
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        kept.update((min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)))
    return sorted(kept)

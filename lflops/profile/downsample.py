"""A long series made short without losing what stands out of it."""

from collections.abc import Iterable, Sequence

__all__ = ["extremes"]


def extremes(values: Sequence[int], most: int, keep: Iterable[int] = ()) -> list[int]:
    """The places to keep of a series: all, or the lowest and the highest of each of equal buckets.

    Args:
        values: In their order.
        most: So many places are kept, at most.
        keep: Places that are kept whatever their values are, beside both ends.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1, *keep}
    width = -(-len(values) // ((most - len(kept)) // 2))
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        kept.update((min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)))
    return sorted(kept)

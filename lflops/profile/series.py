"""Group items by a key, add up numbers of which some are unknown, and shorten long series."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by the result of `key`.

    The keys are in the order in which they first occur.
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def gathered(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Group the items of `(key, item)` pairs by key.

    The keys are in the order in which they first occur.
    """
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def sums(items: Sequence[object], *fields: str) -> dict[str, int]:
    """Add up the values of some fields over all items, and return the sums by field name."""
    totals: dict[str, int] = {}
    for field in fields:
        totals[field] = sum(getattr(item, field) for item in items)
    return totals


def summed(pairs: Iterable[tuple[Key, Number]]) -> dict[Key, Number]:
    """Add up the numbers of `(key, number)` pairs by key.

    The keys are in the order in which they first occur.
    """
    totals: dict[Key, Number] = {}
    for key, number in pairs:
        if key in totals:
            totals[key] += number
        else:
            totals[key] = number
    return totals


def sum_known(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of the values; `None` if any value is unknown."""
    terms = list(values)
    if None in terms:
        return None
    return sum(terms)  # type: ignore[arg-type]


def largest_known(values: Iterable[int | None]) -> int | None:
    """Return the largest of the known values; `None` if no value is known."""
    return max(without_none(values), default=None)


def without_none(values: Iterable[Item | None]) -> list[Item]:
    """Return the values that are not `None`, in the same order."""
    return [value for value in values if value is not None]


def positions(items: Iterable[Key]) -> dict[Key, int]:
    """Return the position of each item, keyed by item."""
    return {item: position for position, item in enumerate(items)}


def scaled(numbers: Mapping[Key, float], factor: float) -> dict[Key, float]:
    """Multiply each number by a factor."""
    return {key: number * factor for key, number in numbers.items()}


def multiplied(value: Number | None, factor: Number) -> Number | None:
    """Return `value` times `factor`; `None` if the value is unknown."""
    if value is None:
        return None
    return value * factor


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return `part` divided by `whole`; `None` if either is unknown or `whole` is 0."""
    if part is None or not whole:
        return None
    return part / whole


def robust_deviation(values: Sequence[float]) -> float:
    """Estimate the standard deviation, without the influence of a few outliers.

    The result is 1.4826 times the median of the distances from the median. For normally distributed
    values, this equals the standard deviation.
    """
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def spelled_runs(numbers: Iterable[int]) -> list[str]:
    """Return numbers as text, with consecutive numbers as a range: `["4-7", "9"]`.

    The numbers must be in ascending order.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return list(map(_spelled, runs))


def _spelled(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}"


def extremes(values: Sequence[int], most: int, keep: Iterable[int] = ()) -> list[int]:
    """Return at most `most` indices whose values show the shape of the whole series in a plot.

    The series is divided into sections of equal length. The result has the indices of the minimum
    and the maximum of each section, the first and the last index, and the indices in `keep`. If the
    series has at most `most` values, the result has all indices.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1, *keep}
    width = -(-len(values) // ((most - len(kept)) // 2))
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        kept.add(min(bucket, key=values.__getitem__))
        kept.add(max(bucket, key=values.__getitem__))
    return sorted(kept)


def dtype_of(op_counts: Iterable[Any]) -> str | None:
    """Return the dtype in which forward and backward run the most MACs; `None` without MACs."""
    macs: Counter[str] = Counter()
    for each in op_counts:
        if each.phase in {"forward", "backward"} and each.macs:
            macs[each.dtype] += each.macs
    return max(macs, key=macs.__getitem__, default=None)

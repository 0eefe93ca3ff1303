"""Series: sums in which some may be unknown, or by field or key.

Groups by key; a long series made short without losing its extremes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by a key, in the order of the first ones."""
    return gathered((key(item), item) for item in items)


def gathered(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The items of each key, in the order of the first ones."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def sums(items: Sequence[object], *fields: str) -> dict[str, int]:
    return {field: sum(getattr(item, field) for item in items) for field in fields}


def summed(pairs: Iterable[tuple[Key, Number]]) -> dict[Key, Number]:
    """The sum of the numbers of each key, in the order of the first ones."""
    found: dict[Key, Number] = {}
    for key, number in pairs:
        found[key] = found[key] + number if key in found else number
    return found


def sum_known(values: Iterable[Number | None]) -> Number | None:
    """The sum of the values; `None` where one of them is unknown."""
    terms = list(values)
    return None if None in terms else sum(terms)  # type: ignore[arg-type]


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last number of each run of consecutive numbers, in rising order."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def extremes(values: Sequence[int], most: int, keep: Iterable[int] = ()) -> list[int]:
    """At most `most` indices of a series.

    Minimum and maximum of equal buckets, the first, the last and those of `keep`; or all.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1, *keep}
    width = -(-len(values) // ((most - len(kept)) // 2))
    for start in range(0, len(values), width):
        bucket = range(start, min(start + width, len(values)))
        kept.update((min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)))
    return sorted(kept)


def dtype_of(cells: Iterable[Any]) -> str | None:
    """The dtype of most MACs of forward and backward; `None` where there are none."""
    macs = summed(
        (cell.dtype, cell.macs)
        for cell in cells
        if cell.phase in {"forward", "backward"} and cell.macs
    )
    return max(macs, key=macs.__getitem__, default=None)

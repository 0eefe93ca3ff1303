"""The payload's format: its version, and its tables, column by column.

Counts that JavaScript's numbers would round are strings of digits. Unknown values are null. A
column with the same value in every row is that value, so that a page of 20,000 modules is small
enough for a mail.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

VERSION = 4
"""Version of the payload's format. The payload begins with it; the server rejects other versions."""

_EXACT = 2**53

Value = int | float | str | bool | None
Columns = dict[str, list[Value] | Value]


def column(values: Iterable[Value]) -> list[Value] | Value:
    """The values as a list, or a single value if all rows have it."""
    rows = list(values)
    if rows and rows[0] == rows[-1] and rows.count(rows[0]) == len(rows):
        return exact(rows[0])
    # Most columns have no counts, and need no conversion.
    if int not in set(map(type, rows)):
        return rows
    counts = [value for value in rows if type(value) is int]
    return list(map(exact, rows)) if max(counts) >= _EXACT else rows


def table(rows: Sequence[object], fields: Iterable[str], *, prefix: str = "") -> Columns:
    """A column for each attribute, such as `work.macs`, with its name after the prefix."""
    return {prefix + field: column(map(attrgetter(field), rows)) for field in fields}


def lists(rows: Sequence[object], fields: Iterable[str]) -> Columns:
    """A table of these fields in which every column is a list."""
    return {field: [exact(getattr(row, field)) for row in rows] for field in fields}


def exact(value: Value) -> Value:
    """The value, as digits if JavaScript's numbers would round it."""
    return str(value) if type(value) is int and value >= _EXACT else value

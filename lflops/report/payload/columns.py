"""The payload's format: its version, and its tables, column by column.

A count that is no exact number in JavaScript is a string of its digits. An unknown value is null. A
column in which every row has the same value is that value, so that a page of 20,000 modules is
small enough for a mail.
"""

from collections.abc import Iterable, Sequence

# of the payload's format. The payload begins with it, and the server refuses another one by name.
VERSION = 3

_EXACT = 2**53

Value = int | float | str | bool | None
Columns = dict[str, list[Value] | Value]


def column(values: Iterable[Value]) -> list[Value] | Value:
    """A list, or the one value that all rows have."""
    rows = list(values)
    if rows and rows[0] == rows[-1] and rows.count(rows[0]) == len(rows):
        return exact(rows[0])
    kinds = set(map(type, rows))
    if int not in kinds:
        return rows
    counts = rows if len(kinds) == 1 else [value for value in rows if type(value) is int]
    return [exact(value) for value in rows] if max(counts) >= _EXACT else rows  # type: ignore[type-var, operator]  # all are counts


def lists(rows: Sequence[object], fields: Iterable[str]) -> Columns:
    return {field: [exact(getattr(row, field)) for row in rows] for field in fields}


def exact(value: Value) -> Value:
    """The value, as digits where JavaScript's numbers would round it."""
    return str(value) if type(value) is int and value >= _EXACT else value

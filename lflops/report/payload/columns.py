"""Define the format of the payload: its version, and its tables, which are stored by column.

Counts that JavaScript's numbers would round are strings of digits. Unknown values are null. If
every row of a column has the same value, the column is stored as this value. So a page with 20,000
modules is small enough to be sent by mail.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

VERSION = 4
"""Version of the payload's format.

The payload begins with this number, and the server rejects other versions.
"""

_EXACT = 2**53

Value = int | float | str | bool | None
Columns = dict[str, list[Value] | Value]


def column(values: Iterable[Value]) -> list[Value] | Value:
    """Return the values as a list, or a single value if all rows have the same value."""
    rows = list(values)
    if rows and rows[0] == rows[-1] and rows.count(rows[0]) == len(rows):
        return exact(rows[0])
    # Most columns have no counts and need no conversion.
    if int not in set(map(type, rows)):
        return rows
    counts = [value for value in rows if type(value) is int]
    return list(map(exact, rows)) if max(counts) >= _EXACT else rows


def table(rows: Sequence[object], fields: Iterable[str], *, prefix: str = "") -> Columns:
    """Make a column for each attribute, such as `work.macs`; column names start with the prefix."""
    return {prefix + field: column(map(attrgetter(field), rows)) for field in fields}


def lists(rows: Sequence[object], fields: Iterable[str]) -> Columns:
    """Make a table of the given fields in which every column is a list."""
    return {field: [exact(getattr(row, field)) for row in rows] for field in fields}


def exact(value: Value) -> Value:
    """Return the value, or its digits as text if JavaScript's numbers would round it."""
    return str(value) if type(value) is int and value >= _EXACT else value

"""Define the format of the payload: its version, and its tables, which are stored by column.

The payload is the JSON that the page draws. JavaScript would round large integers, so large counts
are stored as strings of digits. Unknown values are null. If all rows have the same value in a
column, the column is this single value instead of a list. So a page with 20,000 modules is small
enough to be sent by mail.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

VERSION = 4
"""Version of the payload's format.

The payload begins with the version, and the TensorBoard tab rejects other versions.
"""

_EXACT = 2**53

Value = int | float | str | bool | None
Columns = dict[str, list[Value] | Value]


def column(values: Iterable[Value]) -> list[Value] | Value:
    """Return a column: the list of the values or, if all values are equal, this single value."""
    rows = list(values)
    if rows and rows[0] == rows[-1] and rows.count(rows[0]) == len(rows):
        return exact(rows[0])
    # Most columns have no counts and need no conversion.
    if int not in set(map(type, rows)):
        return rows
    largest = max(value for value in rows if type(value) is int)
    if largest < _EXACT:
        return rows
    return list(map(exact, rows))


def table(rows: Sequence[object], fields: Iterable[str], *, prefix: str = "") -> Columns:
    """Return a table with a column for each attribute of the rows.

    Args:
        rows: The objects whose attributes are stored.
        fields: The attributes, such as `work.macs`.
        prefix: Text that is put before the name of each column.
    """
    columns: Columns = {}
    for field in fields:
        columns[prefix + field] = column(map(attrgetter(field), rows))
    return columns


def lists(rows: Sequence[object], fields: Iterable[str]) -> Columns:
    """Return a table with a column for each of the fields (attributes) of the rows.

    Every column is a list, even if all rows have the same value.
    """
    columns: Columns = {}
    for field in fields:
        columns[field] = [exact(getattr(row, field)) for row in rows]
    return columns


def exact(value: Value) -> Value:
    """Return the value, or its digits as text if JavaScript would round the number."""
    return str(value) if type(value) is int and value >= _EXACT else value

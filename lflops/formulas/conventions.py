"""The convention for all that is no multiply-accumulate.

`conventions.toml` explains it, and lists the operators.
"""

from pathlib import Path

import msgspec
from msgspec import Struct


class _Tables(Struct, forbid_unknown_fields=True):
    """The tables of `conventions.toml`.

    Names of operators as words, and by how many operations they are.
    """

    free: str
    moves: str
    per_output: dict[int, str]
    per_input: dict[int, str]


def _operations(table: dict[int, str]) -> dict[str, int]:
    return {name: operations for operations, names in table.items() for name in names.split()}


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)

FREE, MOVES = frozenset(_TABLES.free.split()), frozenset(_TABLES.moves.split())
PER_OUTPUT, PER_INPUT = _operations(_TABLES.per_output), _operations(_TABLES.per_input)

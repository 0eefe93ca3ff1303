"""Define the cost of operators that have no formula, such as pointwise operators and reductions.

These operators have no multiply-accumulates. By convention, each operator costs a fixed number of
operations per element. `conventions.toml` explains the convention and lists the operators.
"""

from pathlib import Path

import msgspec
from msgspec import Struct


class _Tables(Struct, forbid_unknown_fields=True):
    """The tables of `conventions.toml`. A string has names of operators, separated by spaces.

    In `per_output` and `per_input`, each key is a number of operations per element.
    """

    free: str
    moves: str
    per_output: dict[int, str]
    per_input: dict[int, str]


def _operations_by_operator(table: dict[int, str]) -> dict[str, int]:
    operations_by_operator = {}
    for operations, operators in table.items():
        for operator in operators.split():
            operations_by_operator[operator] = operations
    return operations_by_operator


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)

FREE = frozenset(_TABLES.free.split())
"""Names of operators without arithmetic and without memory traffic, such as views."""

MOVES = frozenset(_TABLES.moves.split())
"""Names of operators that move bytes but compute nothing, such as copies."""

PER_OUTPUT = _operations_by_operator(_TABLES.per_output)
"""Number of operations per element of an operator's first result, keyed by operator."""

PER_INPUT = _operations_by_operator(_TABLES.per_input)
"""Number of operations per element of an operator's first input, keyed by operator."""

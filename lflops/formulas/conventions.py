"""The convention for all that is no multiply-accumulate: it goes into FLOPs, never into MACs.

* A pointwise operator is one operation an element of its floating result, for every function; one that is two at once (`addcmul`,
  `lerp`) is two. Comparing, selecting and converting are none.
* A reduction is one operation an element of its floating input; a norm squares too, a variance subtracts, squares and needs the mean.
* Normalising is 5 an element (sum; subtract, square, sum; scale), 2 with known statistics, one more for a weight and one for a bias; its
  gradient is twice that. A root mean square saves the two of the mean.
* Softmax is 5 an element (largest; subtract, exponential, sum, divide), its gradient 4.
* A factorisation, and solving with a triangular matrix, are the leading terms of the textbook: `factorisations.py` lists them. Each step
  needs those before it: no matrix unit runs such a recurrence, so it would be wrong to count its multiply-accumulates as MACs.
* Pooling is one operation an element of each window; interpolating is 2 for each neighbour that it weighs.

`conventions.toml` lists the operators.
"""

from pathlib import Path

import msgspec
from msgspec import Struct


class _Tables(Struct, forbid_unknown_fields=True):
    """The tables of `conventions.toml`: names of operators as words, and by how many operations they are."""

    free: str
    moves: str
    per_output: dict[int, str]
    per_input: dict[int, str]


def _operations(table: dict[int, str]) -> dict[str, int]:
    return {name: operations for operations, names in table.items() for name in names.split()}


_TABLES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables)

FREE, MOVES = frozenset(_TABLES.free.split()), frozenset(_TABLES.moves.split())
PER_OUTPUT, PER_INPUT = _operations(_TABLES.per_output), _operations(_TABLES.per_input)

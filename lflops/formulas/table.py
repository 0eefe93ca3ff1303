"""The table of formulas: operator name to a pure function of shapes.

Nothing here imports torch, so traces are counted by it too.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

Shape = tuple[int, ...]


class Values(tuple[int, ...]):
    """The numbers in a tensor of integers, which a formula asked for and which are known."""

    __slots__ = ()


class SparseShape(tuple[int, ...]):  # noqa: SLOT001 - a tuple cannot have slots
    """The shape of a tensor that stores only some of its elements, and how many."""

    stored: int

    def __new__(cls, shape: Iterable[int], stored: int) -> Self:
        sparse = super().__new__(cls, shape)
        sparse.stored = stored
        return sparse


class Cost(NamedTuple):
    """What one call of an operator computes."""

    # multiply-accumulates
    macs: int = 0
    executed_macs: int | None = (
        # those left when a mask lets the kernel skip some; `None` where it skips none
        None
    )
    # what is no multiply-accumulate, by the convention
    other_flops: int = 0
    # the part that had been computed before and was thrown away
    recompute: "Cost | None" = None
    is_upper_bound: bool = (
        # whether the count depends on unknown values, and this is its upper bound
        False
    )


Formula = Callable[..., "int | Cost"]
_AnyFormula = TypeVar("_AnyFormula", bound=Formula)

# by operator, with its namespace
FORMULAS: dict[str, Formula] = {}
READS: dict[
    str, frozenset[str]
    # by operator: the arguments that are tensors of integers and of which its formula takes the numbers
] = {}


def formula(
    *operators: str, writes_first: str = "", reads: str = ""
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Enter a formula for operators, as words; of ATen where no namespace is given.

    It takes shapes in the order of the schema, and by its keywords all else that it needs.
    `writes_first` names an operator whose first argument is the tensor that it writes into, and
    whose others are the same. `reads` has keywords, as words, that are tensors of integers and
    decide by their numbers: it gets `Values`, or the shape where the numbers are not known, as on
    the meta device.
    """

    def enter(function: _AnyFormula) -> _AnyFormula:
        of_each: dict[str, Formula] = dict.fromkeys(" ".join(operators).split(), function)
        if writes_first:
            of_each[writes_first] = adapted(function, "result")
        for operator, entered in of_each.items():
            name = operator if "::" in operator else f"aten::{operator}"
            FORMULAS[name] = entered
            READS[name] = frozenset(reads.split())
        return function

    return enter


def adapted(function: Formula, leading: str = "", *, without: str = "") -> Formula:
    """The formula for an operator that takes other arguments first, or lacks some of the keywords.

    Both by name, as words.
    """
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in leading.split()
    ]

    @functools.wraps(function)
    def shifted(*args: Any, **kwargs: Any) -> int | Cost:
        return function(*args[len(first) :], **kwargs)

    signature = inspect.signature(function)
    rest = [each for name, each in signature.parameters.items() if name not in without.split()]
    shifted.__name__ = "_without_".join(
        ["_after_".join([function.__name__, *leading.split()]), *without.split()]
    )
    vars(shifted)["__signature__"] = signature.replace(parameters=[*first, *rest])
    return shifted


@functools.cache
def per_element(operations: int) -> Formula:
    """The formula of so many operations for each element of the first tensor.

    Of 0 for what moves bytes alone.
    """

    def cost(x: Shape) -> Cost:
        return Cost(other_flops=operations * prod(x))

    cost.__name__ = f"{operations}_per_element"
    return cost


def load_families() -> None:
    """Import every file of `lflops/formulas/`: each enters its formulas in the table.

    Call this before the table is read.
    """
    package = importlib.import_module("lflops.formulas")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


class FunctionFormula(NamedTuple):
    """The formula of a function that a package calls directly, so that no dispatcher sees it."""

    # called as the function was, with shapes in place of tensors, as many arguments as it takes
    formula: Formula
    reads: frozenset[
        str
        # the arguments whose numbers it takes, as in `formula`; a star stands for all tensors of
        # integers
    ]
    # whether a call in backward computes again what forward had
    again_in_backward: bool
    tensors_at: (
        int | None
        # place of a list of lists of tensors, if any: the formula gets one tensor of each list, again
        # and again
    )


FUNCTIONS: dict[
    str, FunctionFormula
    # by module and name, as `package.module:function` or `package.module:Class.method`
] = {}


def function_formula(
    *functions: str, reads: str = "", again_in_backward: bool = False, tensors_at: int | None = None
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Enter a formula for functions of a package, which need not be installed.

    They are watched while a step is counted.
    """
    # Each is where its callers look it up, as `package.module:function`; all else is as in
    # `formula` and `FunctionFormula`.

    def enter(function: _AnyFormula) -> _AnyFormula:
        entry = FunctionFormula(function, frozenset(reads.split()), again_in_backward, tensors_at)
        FUNCTIONS.update(dict.fromkeys(functions, entry))
        return function

    return enter


_ROWS = msgspec.toml.decode(
    Path(__file__).with_name("places.toml").read_bytes(), type=dict[str, dict[str, int]]
)

PLACES = {
    name if "::" in name else f"aten::{name}": places
    for names, places in _ROWS.items()
    for name in names.split()
}
"""By operator, where its schema has the arguments that formulas ask for by name.

Traces list arguments without names.
"""

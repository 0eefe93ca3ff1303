"""The table of formulas: from the name of an operator to a function of shapes.

Traces are counted with it too, so nothing here imports torch.
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
    """The numbers in a tensor of integers, for a formula that reads them."""

    __slots__ = ()


class SparseShape(tuple[int, ...]):  # noqa: SLOT001 - a tuple cannot have slots
    """The shape of a sparse tensor, and the number of elements that it stores."""

    stored: int

    def __new__(cls, shape: Iterable[int], stored: int) -> Self:
        sparse = super().__new__(cls, shape)
        sparse.stored = stored
        return sparse


class Cost(NamedTuple):
    """The work of one call of an operator.

    Attributes:
        macs: Multiply-accumulates.
        executed_macs: Multiply-accumulates that are left if a mask lets the kernel skip some;
            `None` if it skips none.
        other_flops: Operations that are no multiply-accumulates, by `conventions.toml`.
        recompute: Work that repeats earlier work whose result was thrown away.
        is_upper_bound: Whether the count depends on unknown values, and this is its upper bound.
    """

    macs: int = 0
    executed_macs: int | None = None
    other_flops: int = 0
    recompute: "Cost | None" = None
    is_upper_bound: bool = False

    @classmethod
    def of(cls, result: "int | Cost") -> "Cost":
        """The cost that a formula returned, which may be a number of multiply-accumulates."""
        if isinstance(result, Cost):
            return result
        return cls(result)

    @property
    def macs_left(self) -> int:
        """Multiply-accumulates without the ones that a mask lets the kernel skip."""
        if self.executed_macs is None:
            return self.macs
        return self.executed_macs


Formula = Callable[..., "int | Cost"]
_AnyFormula = TypeVar("_AnyFormula", bound=Formula)

FORMULAS: dict[str, Formula] = {}
"""By operator, with its namespace."""

READS: dict[str, frozenset[str]] = {}
"""By operator: the arguments that are tensors of integers and that its formula reads."""


def _qualified(operator: str) -> str:
    return operator if "::" in operator else f"aten::{operator}"


def formula(
    *operators: str, writes_first: str = "", reads: str = ""
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Add a formula to the table.

    The formula receives shapes in the order of the operator's schema. It receives everything else
    that it needs as keyword arguments.

    Args:
        operators: Names of operators, several in one string if separated by spaces. A name without
            a namespace belongs to ATen.
        writes_first: An operator with the same arguments after one more: the tensor that it writes.
        reads: Names of arguments, separated by spaces, that are tensors of integers. The formula
            receives their `Values`, or their shape if the numbers are unknown, as on the meta
            device.
    """

    def add(operator: str, function: Formula) -> None:
        name = _qualified(operator)
        FORMULAS[name] = function
        READS[name] = frozenset(reads.split())

    def register(function: _AnyFormula) -> _AnyFormula:
        for operator in " ".join(operators).split():
            add(operator, function)
        if writes_first:
            add(writes_first, adapted(function, "result"))
        return function

    return register


def adapted(function: Formula, leading: str = "", *, without: str = "") -> Formula:
    """The formula for an operator with other arguments.

    Args:
        function: The formula.
        leading: Names of arguments, separated by spaces, that come first and are ignored.
        without: Names of keyword arguments, separated by spaces, that the operator lacks.
    """
    first = []
    for name in leading.split():
        first.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    signature = inspect.signature(function)
    rest = []
    for name, parameter in signature.parameters.items():
        if name not in without.split():
            rest.append(parameter)

    @functools.wraps(function)
    def shifted(*args: Any, **kwargs: Any) -> int | Cost:
        return function(*args[len(first) :], **kwargs)

    name_with_leading = "_after_".join([function.__name__, *leading.split()])
    shifted.__name__ = "_without_".join([name_with_leading, *without.split()])
    vars(shifted)["__signature__"] = signature.replace(parameters=[*first, *rest])
    return shifted


@functools.cache
def per_element(operations: int) -> Formula:
    """The formula for a number of operations per element of the first tensor.

    The number is 0 for an operator that only moves bytes.
    """

    def cost(x: Shape) -> Cost:
        return Cost(other_flops=operations * prod(x))

    cost.__name__ = f"{operations}_per_element"
    return cost


def load_families() -> None:
    """Import every file of `lflops/formulas/`, which fills the table.

    Call this before the table is read.
    """
    package = importlib.import_module("lflops.formulas")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


class FunctionFormula(NamedTuple):
    """The formula for a function that a package calls directly, outside the dispatcher.

    Attributes:
        formula: Called as the function was, with shapes instead of tensors, and with as many
            arguments as it accepts.
        reads: The arguments whose numbers it reads, as in `formula`; `*` for all tensors of
            integers.
        again_in_backward: Whether a call in backward recomputes what forward computed.
        tensors_at: Position of an argument that is a list of lists of tensors. The formula is
            called for each set of one tensor from each list.
    """

    formula: Formula
    reads: frozenset[str]
    again_in_backward: bool
    tensors_at: int | None


FUNCTIONS: dict[str, FunctionFormula] = {}
"""By module and name: `package.module:function` or `package.module:Class.method`."""


def function_formula(
    *functions: str, reads: str = "", again_in_backward: bool = False, tensors_at: int | None = None
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Add a formula for functions of a package, which need not be installed.

    The functions are wrapped while a step is counted.

    Args:
        functions: Where callers look the functions up: `package.module:function`.
        reads: As in `FunctionFormula`, separated by spaces.
        again_in_backward: As in `FunctionFormula`.
        tensors_at: As in `FunctionFormula`.
    """

    def register(function: _AnyFormula) -> _AnyFormula:
        entry = FunctionFormula(function, frozenset(reads.split()), again_in_backward, tensors_at)
        for name in functions:
            FUNCTIONS[name] = entry
        return function

    return register


def _read_places() -> dict[str, dict[str, int]]:
    content = Path(__file__).with_name("places.toml").read_bytes()
    rows = msgspec.toml.decode(content, type=dict[str, dict[str, int]])
    places = {}
    for operators, positions in rows.items():
        for operator in operators.split():
            places[_qualified(operator)] = positions
    return places


PLACES = _read_places()
"""By operator: the positions of the arguments that formulas receive by name.

Traces list arguments without names.
"""

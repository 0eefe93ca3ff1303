"""Define the table of formulas, which maps the name of an operator to a function of shapes.

Nothing here imports torch, because the table is also used for traces on machines without torch.
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
    """The values of an integer tensor, for a formula that needs more than the shape."""

    __slots__ = ()


class SparseShape(tuple[int, ...]):  # noqa: SLOT001 - a tuple cannot have slots
    """The shape of a sparse tensor, with the number of elements that the tensor stores."""

    stored: int

    def __new__(cls, shape: Iterable[int], stored: int) -> Self:
        sparse = super().__new__(cls, shape)
        sparse.stored = stored
        return sparse


class Cost(NamedTuple):
    """The work of one call of an operator.

    Attributes:
        macs: Number of multiply-accumulates.
        executed_macs: Number of multiply-accumulates that the kernel executes. The kernel may skip
            some because of a mask. `None` if it skips none.
        other_flops: Number of operations that are not multiply-accumulates, counted according to
            `conventions.toml`.
        recompute: Additional work of the call that repeats earlier work, because the earlier result
            was not kept. `None` if the call repeats no work.
        is_upper_bound: Whether the count is an upper bound, because the exact count depends on
            unknown values.
    """

    macs: int = 0
    executed_macs: int | None = None
    other_flops: int = 0
    recompute: "Cost | None" = None
    is_upper_bound: bool = False

    @classmethod
    def of(cls, result: "int | Cost") -> "Cost":
        """Convert the result of a formula to a `Cost`. A number counts multiply-accumulates."""
        if isinstance(result, Cost):
            return result
        return cls(result)

    @property
    def macs_left(self) -> int:
        """Number of multiply-accumulates that the kernel executes: all minus the skipped ones."""
        if self.executed_macs is None:
            return self.macs
        return self.executed_macs


Formula = Callable[..., "int | Cost"]
_AnyFormula = TypeVar("_AnyFormula", bound=Formula)

FORMULAS: dict[str, Formula] = {}
"""The formulas, keyed by the name of the operator with its namespace, such as `aten::mm`."""

READS: dict[str, frozenset[str]] = {}
"""For each operator, the names of the tensor arguments whose values the formula reads."""


def _qualified(operator: str) -> str:
    return operator if "::" in operator else f"aten::{operator}"


def formula(
    *operators: str, writes_first: str = "", reads: str = ""
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Add the decorated formula to the table.

    The positional parameters of the formula receive the operator's first arguments in the order of
    the schema, with shapes instead of tensors. The keyword-only parameters receive the operator's
    arguments with the same names.

    Args:
        operators: Names of operators. A string may have several names, separated by spaces. A name
            without a namespace belongs to ATen.
        writes_first: Name of one more operator with the same cost. It has an additional first
            argument: the tensor to which the operator writes its result.
        reads: Names of integer tensor arguments, separated by spaces. The formula receives their
            `Values`, or their shapes if the values are unknown, for example on the meta device.
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
    """Return a formula for an operator with the same cost but other arguments.

    Args:
        function: The formula to call.
        leading: Names of additional first arguments of the operator, separated by spaces. The
            formula does not receive these arguments.
        without: Names of the formula's keyword arguments that the operator does not have, separated
            by spaces.
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
    """Return a formula that counts `operations` per element of the operator's first tensor.

    Pass 0 for an operator that only moves bytes.
    """

    def cost(x: Shape) -> Cost:
        return Cost(other_flops=operations * prod(x))

    cost.__name__ = f"{operations}_per_element"
    return cost


def load_families() -> None:
    """Fill `FORMULAS` and `FUNCTIONS` by importing every file of `lflops/formulas/`.

    Call this function before you read these tables.
    """
    package = importlib.import_module("lflops.formulas")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


class FunctionFormula(NamedTuple):
    """The formula for a function that another package calls without torch's dispatcher.

    Attributes:
        formula: The formula. It is called like the function, but with shapes instead of tensors,
            and only with as many arguments as it accepts.
        reads: Names of the tensor arguments whose values the formula reads, as in the decorator
            `formula`; `*` for all integer tensors.
        again_in_backward: Whether a call in backward repeats work of forward, so that it counts as
            recomputation.
        tensors_at: Position of an argument that is a list of lists of tensors, for example
            `[gradients, parameters, states]`; `None` if there is no such argument. The formula is
            called once for each parameter, with one tensor from each list.
    """

    formula: Formula
    reads: frozenset[str]
    again_in_backward: bool
    tensors_at: int | None


FUNCTIONS: dict[str, FunctionFormula] = {}
"""Formulas for functions that other packages call without torch's dispatcher, keyed by name.

A name has the form `package.module:function` or `package.module:Class.method`.
"""


def function_formula(
    *functions: str, reads: str = "", again_in_backward: bool = False, tensors_at: int | None = None
) -> Callable[[_AnyFormula], _AnyFormula]:
    """Register the decorated function as the formula for functions of another package.

    The package need not be installed. While a step is counted, the functions of the package are
    wrapped to count their calls.

    Args:
        functions: Names of functions, such as `package.module:function`. Name the module in which
            callers look up the function.
        reads: As in `FunctionFormula`, with names separated by spaces.
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
    content = Path(__file__).with_name("argument_positions.toml").read_bytes()
    rows = msgspec.toml.decode(content, type=dict[str, dict[str, int]])
    places = {}
    for operators, positions in rows.items():
        for operator in operators.split():
            places[_qualified(operator)] = positions
    return places


PLACES = _read_places()
"""For each operator, the positions of the arguments that its formula receives by name.

A trace lists arguments without names, so the trace reader finds these arguments by their positions.
"""

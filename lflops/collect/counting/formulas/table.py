"""The private table of formulas: operator name to a pure function of shapes."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lflops.collect.torch_compat import HigherOrderOperator, OpOverload, OpOverloadPacket, argument_names, name_of
from lflops.errors import CountError

__all__ = ["Cost", "Formula", "Shape", "bind", "formula", "formula_of", "register_formula", "shapes"]

Shape = tuple[int, ...]


class Cost(NamedTuple):
    """What one call of an operator computes.

    Attributes:
        macs: Multiply-accumulates.
        executed_macs: Those left when a mask lets the kernel skip some; `None` where it skips none.
        other_flops: What is no multiply-accumulate, by the convention.
        recompute: The part that had been computed before and was thrown away.
    """

    macs: int = 0
    executed_macs: int | None = None
    other_flops: int = 0
    recompute: "Cost | None" = None


Formula = Callable[..., "int | Cost"]
_AnyFormula = TypeVar("_AnyFormula", bound=Formula)

_FORMULAS: dict[str, Formula] = {}
_USERS: dict[str, Formula] = {}


def formula(*operators: str) -> Callable[[_AnyFormula], _AnyFormula]:
    """Enter a formula for operators of ATen. It takes shapes in the order of the schema, and by its keywords whatever else it needs."""

    def enter(function: _AnyFormula) -> _AnyFormula:
        for operator in operators:
            _FORMULAS[f"aten::{operator}"] = function
        return function

    return enter


def register_formula(operator: Any, formula: Callable[..., int]) -> None:
    """Say what an operator costs, in MACs; the last formula given for an operator is the one that counts.

    Args:
        operator: `torch.ops.my.op`, one of its overloads, or a higher-order operator.
        formula: Called as the operator was, with shapes in place of tensors, and `out=`, the result's shape. Returns MACs.

    Raises:
        CountError: One of the two is something else.
    """
    if not callable(formula):  # type: ignore[redundant-expr,unused-ignore]
        raise CountError(f"register_formula: formula={formula!r} cannot be called: give a function of shapes that returns MACs")
    if isinstance(operator, OpOverload | HigherOrderOperator):
        name = name_of(operator)
    elif isinstance(operator, OpOverloadPacket):
        name = str(operator).replace(".", "::", 1)
    else:
        raise CountError(f"register_formula: operator={operator!r} is no operator: give one of torch.ops, as torch.ops.my.op")
    _USERS[name] = formula


def formula_of(operator: Any) -> Callable[[Any, Any, Any], Cost] | None:
    """What computes an operator's cost from the arguments and the result of a call, or `None`."""
    name = name_of(operator)
    packet = name.split(".")[0]
    users = _USERS.get(name) or _USERS.get(packet)
    if users is not None:
        return _as_called(users)
    return bind(_FORMULAS[packet], operator) if packet in _FORMULAS else None


def shapes(value: Any) -> Any:
    """The same structure with a shape in place of each tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return [shapes(each) for each in value] if isinstance(value, list) else tuple(shapes(each) for each in value)
    return value


def bind(function: Formula, operator: OpOverload) -> Callable[[Any, Any, Any], Cost]:
    """Fit a formula to its operator: the first arguments by position, those it names as keywords from wherever the call has them."""
    parameters = inspect.signature(function).parameters.values()
    positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    wanted = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    schema = argument_names(operator)
    keywords = [(place, name, default) for place, (name, default) in enumerate(schema) if name in wanted]

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        given = [shapes(args[place] if place < len(args) else kwargs.get(name)) for place, (name, _) in enumerate(schema[:positional])]
        named = {name: shapes(args[place] if place < len(args) else kwargs.get(name, default)) for place, name, default in keywords}
        if "out" in wanted:
            named["out"] = shapes(out)
        return _cost(function(*given, **named))

    return cost


def _as_called(function: Formula) -> Callable[[Any, Any, Any], Cost]:
    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        named = {name: shapes(value) for name, value in kwargs.items()}
        return _cost(function(*shapes(tuple(args)), **{**named, "out": shapes(out)}))

    return cost


def _cost(result: Any) -> Cost:
    if isinstance(result, Cost):
        return result
    if isinstance(result, bool) or not isinstance(result, int) or result < 0:
        raise TypeError(f"a formula gives a whole number of MACs, not {result!r}")
    return Cost(result)

"""Compute the cost (MACs and FLOPs) of an operator's call.

There are three kinds of cost functions: formulas that receive shapes, functions that receive the
tensors themselves, and formulas that a user registered. A few formulas also receive the integers
in a tensor, such as the offsets of packed sequences. Reading integers from a CUDA tensor waits for
the device. This is acceptable in a counting step, because its time is never used.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lflops.errors import CountError
from lflops.formulas.table import FORMULAS, READS, Cost, Formula, SparseShape, Values
from lflops.inputs.arguments import is_whole
from lflops.inputs.tensors import argument
from lflops.torch_private.dispatch_modes import open_modes, without_modes
from lflops.torch_private.operators import (
    OpOverload,
    OpOverloadPacket,
    argument_names,
    decomposes,
    overloads_of,
    qualified_name,
    written_arguments,
)
from lflops.torch_private.tensors import FakeTensor, local_part, stored_elements

SPARSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
"""Layouts that store only some of the elements."""

CallCost = Callable[[Any, Any, Any], Cost]
"""A function that computes a cost from the arguments, keyword arguments and result of a call."""

_COSTS: dict[str, CallCost] = {}
"""The cost functions that receive tensors instead of their shapes, keyed by the operator's name."""

_USERS: dict[str, Formula] = {}
"""The formulas that users registered, keyed by the name of the operator or of an overload."""


def cost_of_call(*operators: str) -> Callable[[CallCost], CallCost]:
    """Return a decorator that registers a cost function for the operators with these names.

    The cost function receives the tensors of a call, and not only their shapes.
    """

    def register(function: CallCost) -> CallCost:
        _COSTS.update(dict.fromkeys(operators, function))
        return function

    return register


def register_formula(operator: Any, formula: Formula) -> None:
    """Register how many MACs an operator computes.

    A later formula for the same operator replaces an earlier one.

    Args:
        operator: `torch.ops.my.op`, one of its overloads, the result of `torch.library.custom_op`,
            or a higher-order operator.
        formula: A function that is called like the operator, but with shapes instead of tensors,
            and with the result's shape as `out=`. It returns the number of MACs, or
            `lflops.Cost(macs=..., other_flops=...)` if part of the work is not
            multiply-accumulates.

    Raises:
        CountError: An argument has the wrong type, or torch always decomposes the operator into
            other operators, so the operator itself is never counted.
    """
    if not callable(formula):  # type: ignore[redundant-expr,unused-ignore]
        raise CountError(
            f"register_formula: formula={formula!r} is not callable: "
            "pass a function of shapes that returns MACs"
        )
    is_packet = isinstance(operator, OpOverloadPacket)
    overloads = overloads_of(operator)
    if not is_packet and not overloads:
        raise CountError(
            f"register_formula: operator={operator!r} is not an operator: "
            "pass an operator of torch.ops, for example torch.ops.my.op"
        )
    name = str(operator).replace(".", "::", 1) if is_packet else qualified_name(overloads[0])
    has_builtin_formula = name.split(".")[0] in FORMULAS
    if name.startswith("aten::") and not has_builtin_formula and _all_decompose(overloads):
        raise CountError(
            f"register_formula: torch replaces {operator} by other operators before lflops can "
            "count it: register formulas for those operators"
        )
    if is_packet:
        # The formula of a whole operator replaces the formulas of its overloads.
        for registered in list(_USERS):
            if registered.split(".")[0] == name:
                del _USERS[registered]
    _USERS[name] = formula


def _all_decompose(overloads: list[Any]) -> bool:
    """Return whether torch decomposes all overloads before they reach the dispatch mode.

    If so, the dispatch mode receives only the operators that the overloads decompose into.
    Overloads that write to an argument, such as `out=`, are ignored if there are other overloads.
    """
    if len(overloads) > 1:
        functional = [overload for overload in overloads if not written_arguments(overload)]
        overloads = functional or overloads
    return bool(overloads) and all(map(decomposes, overloads))


def all_formulas() -> tuple[tuple[str, Any], ...]:
    """Return the formulas registered so far by lflops and by users, with the operators' names."""
    return (*FORMULAS.items(), *_COSTS.items(), *_USERS.items())


def formula_of(operator: Any) -> CallCost | None:
    """Return the function that computes an operator's cost, or `None` if none is registered."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    users = _USERS.get(name) or _USERS.get(packet)
    if users is not None:
        return _users_cost(users)
    if packet in FORMULAS:
        return bind(FORMULAS[packet], operator)
    return _COSTS.get(packet)


def is_pure(operator: Any) -> bool:
    """Return whether the operator has a built-in formula that needs only shapes and numbers."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    has_users_formula = name in _USERS or packet in _USERS
    return packet in FORMULAS and not READS[packet] and not has_users_formula


def shapes(value: Any) -> Any:
    """Return a value with each tensor in it replaced by the tensor's shape."""
    if isinstance(value, Tensor):
        if value.layout in SPARSE:
            return SparseShape(value.shape, stored_elements(value))
        return tuple(value.shape)
    if isinstance(value, list):
        return [shapes(part) for part in value]
    if isinstance(value, tuple):
        return tuple(shapes(part) for part in value)
    return value


def values_or_shape(value: Any) -> Any:
    """Return the integers in a tensor, or the tensor's shape if the integers are unknown."""
    integers = None
    if isinstance(value, Tensor):
        integers = values_of(value)
    return shapes(value) if integers is None else integers


def bind(function: Formula, operator: OpOverload) -> CallCost:
    """Return a cost function that calls a built-in formula with the shapes of a call's arguments.

    The positional parameters of the formula receive the operator's first arguments, in the same
    order. Each keyword-only parameter of the formula receives the operator's argument with the same
    name, whether the caller passed that argument by position or by keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    keyword_names = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    reads = READS.get(qualified_name(operator).split(".")[0], frozenset())

    leading: list[tuple[int, str]] = []
    keywords: list[tuple[int, str, Any]] = []
    for position, (name, default) in enumerate(argument_names(operator)):
        if position < len(positional):
            leading.append((position, name))
        if name in keyword_names:
            keywords.append((position, name, default))

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        operands = []
        for position, name in leading:
            operands.append(shapes(argument(args, kwargs, position, name)))
        named = {}
        for position, name, default in keywords:
            value = argument(args, kwargs, position, name, default)
            named[name] = values_or_shape(value) if name in reads else shapes(value)
        if "out" in keyword_names:
            named["out"] = shapes(out)
        result = _cost(function(*operands, **named))
        if args and isinstance(args[0], Tensor) and args[0].is_complex():
            return _in_reals(result)
        return result

    return cost


def _in_reals(cost: Cost) -> Cost:
    """Convert the cost of an operator on complex numbers to operations on real numbers.

    A complex multiply-accumulate counts as four real multiply-accumulates. A complex addition
    counts as two real additions. An operator without multiply-accumulates keeps its cost.
    """
    executed = None
    if cost.executed_macs is not None:
        executed = 4 * cost.executed_macs
    return cost._replace(
        macs=4 * cost.macs,
        executed_macs=executed,
        other_flops=2 * cost.other_flops if cost.macs else cost.other_flops,
    )


def _users_cost(formula: Formula) -> CallCost:
    """Return a cost function that calls a user's formula.

    The formula receives the arguments of the operator's call, with shapes instead of tensors.
    """

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        operands = shapes(tuple(args))
        named = {name: shapes(value) for name, value in kwargs.items()}
        named["out"] = shapes(out)
        result = _cost(formula(*operands, **named))
        numbers = (result.macs, result.other_flops, result.executed_macs or 0)
        if not all(map(is_whole, numbers)):
            raise TypeError(
                f"the formula returned {result!r}: the numbers of a Cost must be whole numbers, 0 "
                "or more"
            )
        return result

    return cost


def _cost(result: Any) -> Cost:
    """Convert the result of a formula, a `Cost` or a number of MACs, to a `Cost`."""
    if isinstance(result, Cost):
        return result
    if not is_whole(result):
        raise TypeError(
            f"the formula returned {result!r}: return a whole number of MACs, 0 or more, or a Cost"
        )
    return Cost(result)


KNOWS_VALUES = "knows_values_of"
"""Name of an optional method of dispatch modes, such as `KnownValues.knows_values_of`.

The method returns whether the values of a tensor are the same as in a real step.
"""


def known(tensor: Tensor) -> Tensor | None:
    """Return a plain tensor with the values of a tensor, or `None` if the values are unknown.

    Values are unknown if the tensor is a meta or fake tensor, if this rank has only a part of the
    tensor, or if an active dispatch mode reports that they are unknown.
    """
    local: Any = local_part(tensor)
    if local.is_meta or isinstance(local, FakeTensor) or local.shape != tensor.shape:
        return None
    for mode in open_modes():
        knows_values = getattr(mode, KNOWS_VALUES, None)
        if knows_values is not None and not knows_values(local):
            return None
    return local  # type: ignore[no-any-return]


def values_of(tensor: Tensor) -> Values | None:
    """Return the integers in a tensor, or `None` if they are unknown."""
    local = known(tensor)
    if local is None:
        return None
    with without_modes():
        return Values(local.flatten().tolist())


@cost_of_call(
    "quantized::conv1d",
    "quantized::conv1d_relu",
    "quantized::conv1d_dynamic",
    "quantized::conv2d",
    "quantized::conv2d_relu",
    "quantized::conv2d_dynamic",
    "quantized::conv3d",
    "quantized::conv3d_relu",
    "quantized::conv3d_dynamic",
)
def packed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """Cost of a quantized convolution: each output position needs one MAC per weight element.

    The call receives a packed weight, which has no shape. The weight is unpacked to read its size.
    """
    weight, _ = args[1].unpack()
    return Cost(out.numel() // out.shape[1] * weight.numel())


@cost_of_call("quantized::conv2d_add", "quantized::conv2d_add_relu")
def packed_convolution_with_addition(args: Any, kwargs: Any, out: Any) -> Cost:
    """Cost of a quantized convolution to which a tensor, the second argument, is added.

    Only the convolution is counted.
    """
    return packed_convolution([args[0], *args[2:]], kwargs, out)


@cost_of_call(
    "quantized::conv_transpose1d",
    "quantized::conv_transpose1d_dynamic",
    "quantized::conv_transpose2d",
    "quantized::conv_transpose2d_dynamic",
    "quantized::conv_transpose3d",
    "quantized::conv_transpose3d_dynamic",
)
def packed_transposed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """Cost of a quantized transposed convolution.

    Each position of the input needs one MAC per element of the weight.
    """
    weight, _ = args[1].unpack()
    return Cost(args[0].numel() // args[0].shape[1] * weight.numel())

"""Compute the cost of an operator's call.

The cost comes from a formula of shapes, from the tensors themselves, or from a user's formula. A
few formulas read the integers in a tensor, such as the offsets of packed sequences or the ends of
groups. They are read only in a counting step, which is never timed, because a read on CUDA waits
for the device.
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
_USERS: dict[str, Formula] = {}


def cost_of_call(*operators: str) -> Callable[[CallCost], CallCost]:
    """Register a cost function that reads the call's tensors, not only their shapes."""

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
        CountError: An argument has the wrong type, or the operator itself is never counted because
            torch decomposes it first.
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
            f"register_formula: {operator} is decomposed before it is counted: "
            "register formulas for the operators in its decomposition"
        )
    if is_packet:
        # The formula of a whole operator replaces the formulas of its overloads.
        for registered in list(_USERS):
            if registered.split(".")[0] == name:
                del _USERS[registered]
    _USERS[name] = formula


def _all_decompose(overloads: list[Any]) -> bool:
    """Return whether all overloads reach the dispatch mode as other operators.

    Overloads that write to an argument, such as `out`, are ignored if there are others.
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
    """Return whether the operator has a built-in formula that reads only shapes."""
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
    """Return a function that calls a formula with the arguments of an operator's call.

    The formula's positional parameters receive the first arguments in order. Its keyword-only
    parameters receive the arguments of the same names, by position or keyword.
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
    """Count a complex multiply-accumulate as four real ones, and a complex addition as two."""
    executed = None
    if cost.executed_macs is not None:
        executed = 4 * cost.executed_macs
    return cost._replace(
        macs=4 * cost.macs,
        executed_macs=executed,
        other_flops=2 * cost.other_flops if cost.macs else cost.other_flops,
    )


def _users_cost(formula: Formula) -> CallCost:
    """Return a function that calls a user's formula with the arguments of an operator's call."""

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        operands = shapes(tuple(args))
        named = {name: shapes(value) for name, value in kwargs.items()}
        named["out"] = shapes(out)
        result = _cost(formula(*operands, **named))
        numbers = (result.macs, result.other_flops, result.executed_macs or 0)
        if not all(map(is_whole, numbers)):
            raise TypeError(f"a formula's Cost must have whole numbers, not {result!r}")
        return result

    return cost


def _cost(result: Any) -> Cost:
    """Return the `Cost` that a formula returned, or make a `Cost` from the MACs that it returned."""
    if isinstance(result, Cost):
        return result
    if not is_whole(result):
        raise TypeError(f"a formula must return a whole number of MACs, not {result!r}")
    return Cost(result)


KNOWS_VALUES = "knows_values_of"
"""Name of a dispatch mode's method that returns whether a tensor has a real step's values."""


def known(tensor: Tensor) -> Tensor | None:
    """Return a plain tensor with the same values, or `None` if the values are unknown.

    The values of meta and fake tensors are unknown, and so are values that a mode reports as
    unknown.
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
    """Quantized convolution: the kernel's MACs at each position of the output.

    The kernel's shape is available only from the unpacked weight.
    """
    weight, _ = args[1].unpack()
    return Cost(out.numel() // out.shape[1] * weight.numel())


@cost_of_call("quantized::conv2d_add", "quantized::conv2d_add_relu")
def packed_convolution_with_addition(args: Any, kwargs: Any, out: Any) -> Cost:
    """Quantized convolution that adds its second argument to the result."""
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
    """Quantized transposed convolution: the kernel's MACs at each position of the input."""
    weight, _ = args[1].unpack()
    return Cost(args[0].numel() // args[0].shape[1] * weight.numel())

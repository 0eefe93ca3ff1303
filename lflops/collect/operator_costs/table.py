"""Costs of operators as they were called: from the formulas' shapes, from the tensors themselves, or from what a user registered.

A few formulas ask for the integers in a tensor: where packed sequences begin, where groups end. Only a counted step reads them: on CUDA
that waits for the device, and a counted step is never timed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lflops.collect.torch_private.dispatch_modes import open_modes, without_modes
from lflops.collect.torch_private.operators import (
    OpOverload,
    OpOverloadPacket,
    argument_names,
    decomposes,
    overloads_of,
    qualified_name,
    written_arguments,
)
from lflops.collect.torch_private.tensors import FakeTensor, local_part, stored_elements
from lflops.errors import CountError
from lflops.formulas.table import FORMULAS, READS, Cost, Formula, SparseShape, Values

SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
"""Layouts that store only some of the elements."""

CallCost = Callable[[Any, Any, Any], Cost]  # from the arguments, keyword arguments and result of a call

_COSTS: dict[str, CallCost] = {}
_USERS: dict[str, Formula] = {}


def cost_of_call(*operators: str) -> Callable[[CallCost], CallCost]:
    """Enter what works a cost out from the tensors themselves, for operators whose shapes do not tell it."""

    def enter(function: CallCost) -> CallCost:
        _COSTS.update(dict.fromkeys(operators, function))
        return function

    return enter


def register_formula(operator: Any, formula: Formula) -> None:
    """Say what an operator costs, in MACs; the last formula given for an operator is the one that counts.

    Args:
        operator: `torch.ops.my.op`, one of its overloads, what `torch.library.custom_op` made, or a higher-order operator.
        formula: Called as the operator was, with shapes in place of tensors, and `out=`, the result's shape. Returns MACs; or
            `lflops.Cost(macs=..., other_flops=...)`, where there is work that is no multiply-accumulate.

    Raises:
        CountError: One of the two is something else, or the operator is never counted itself, but what torch makes it of.
    """
    if not callable(formula):  # type: ignore[redundant-expr,unused-ignore]
        raise CountError(f"register_formula: formula={formula!r} cannot be called: give a function of shapes that returns MACs")
    packet, overloads = isinstance(operator, OpOverloadPacket), overloads_of(operator)
    if not packet and not overloads:
        raise CountError(f"register_formula: operator={operator!r} is no operator: give one of torch.ops, as torch.ops.my.op")
    name = str(operator).replace(".", "::", 1) if packet else qualified_name(overloads[0])
    if name.startswith("aten::") and name.split(".")[0] not in FORMULAS and _is_taken_apart(overloads):
        raise CountError(
            f"register_formula: {operator} is decomposed before it is counted: register formulas for the operators in its decomposition"
        )
    if packet:
        for each in [users for users in _USERS if users.split(".")[0] == name]:
            del _USERS[each]
    _USERS[name] = formula


def _is_taken_apart(overloads: list[Any]) -> bool:
    """Whether all of them arrive as other operators. The operator's name alone does not mean the overload that writes into an `out`."""
    meant = [each for each in overloads if not written_arguments(each)] if len(overloads) > 1 else overloads
    return all(map(decomposes, meant or overloads)) and bool(overloads)


def all_formulas() -> tuple[tuple[str, Any], ...]:
    """The table as it is now, with users' formulas."""
    return (*FORMULAS.items(), *_COSTS.items(), *_USERS.items())


def formula_of(operator: Any) -> CallCost | None:
    """The function that computes an operator's cost; `None` where there is none."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    users = _USERS.get(name) or _USERS.get(packet)
    if users is not None:
        return _as_called(users)
    if packet in FORMULAS:
        return bind(FORMULAS[packet], operator)
    return _COSTS.get(packet)


def is_pure(operator: Any) -> bool:
    """Whether the operator's cost is that of a formula of ours that reads no numbers."""
    name = qualified_name(operator)
    packet = name.split(".")[0]
    return packet in FORMULAS and not READS[packet] and name not in _USERS and packet not in _USERS


def shapes(value: Any) -> Any:
    """The same structure with a shape in place of each tensor."""
    if isinstance(value, Tensor):
        return SparseShape(value.shape, stored_elements(value)) if value.layout in SPARSE else tuple(value.shape)
    if isinstance(value, list | tuple):
        return [shapes(each) for each in value] if isinstance(value, list) else tuple(shapes(each) for each in value)
    return value


def values_or_shape(value: Any) -> Any:
    """The numbers in a tensor of integers; its shape where they are unknown."""
    known = values_of(value) if isinstance(value, Tensor) else None
    return shapes(value) if known is None else known


def bind(function: Formula, operator: OpOverload) -> CallCost:
    """Fit a formula to its operator: the first arguments by position, those it names as keywords from wherever the call has them."""
    parameters = inspect.signature(function).parameters.values()
    positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    wanted = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    schema = argument_names(operator)
    reads = READS.get(qualified_name(operator).split(".")[0], frozenset())
    keywords = [
        (place, name, default, values_or_shape if name in reads else shapes)
        for place, (name, default) in enumerate(schema)
        if name in wanted
    ]

    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        given = [shapes(args[place] if place < len(args) else kwargs.get(name)) for place, (name, _) in enumerate(schema[:positional])]
        named = {name: of(args[place] if place < len(args) else kwargs.get(name, default)) for place, name, default, of in keywords}
        if "out" in wanted:
            named["out"] = shapes(out)
        found = _cost(function(*given, **named))
        operand = args[0] if args else None
        return _in_reals(found) if isinstance(operand, Tensor) and operand.is_complex() else found

    return cost


def _in_reals(cost: Cost) -> Cost:
    """A complex multiply-accumulate is four real ones, a complex addition two."""
    executed = None if cost.executed_macs is None else 4 * cost.executed_macs
    return cost._replace(macs=4 * cost.macs, executed_macs=executed, other_flops=2 * cost.other_flops if cost.macs else cost.other_flops)


def _as_called(function: Formula) -> CallCost:
    def cost(args: Any, kwargs: Any, out: Any) -> Cost:
        named = {name: shapes(value) for name, value in kwargs.items()}
        found = _cost(function(*shapes(tuple(args)), **{**named, "out": shapes(out)}))
        if not all(_is_whole(each) for each in (found.macs, found.other_flops, found.executed_macs or 0)):
            raise TypeError(f"a formula's Cost has whole numbers, not {found!r}")
        return found

    return cost


def _cost(result: Any) -> Cost:
    if isinstance(result, Cost):
        return result
    if not _is_whole(result):
        raise TypeError(f"a formula gives a whole number of MACs, not {result!r}")
    return Cost(result)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


KNOWS_VALUES = "knows_values_of"  # the method of a mode that says whether a real tensor has the numbers that it would have in a real step


def known(tensor: Tensor) -> Tensor | None:
    """A plain tensor with the same numbers; `None` where they are unknown: on the meta device, and for tensors that are shapes alone."""
    local: Any = local_part(tensor)
    if local.is_meta or isinstance(local, FakeTensor) or local.shape != tensor.shape:
        return None
    if not all(getattr(mode, KNOWS_VALUES)(local) for mode in open_modes() if hasattr(mode, KNOWS_VALUES)):
        return None
    return local  # type: ignore[no-any-return]


def values_of(tensor: Tensor) -> Values | None:
    """The numbers in a tensor of integers; `None` where they are unknown."""
    local = known(tensor)
    if local is None:
        return None
    with without_modes():
        return Values(local.flatten().tolist())

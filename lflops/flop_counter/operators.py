"""Determine how to count each operator: its kind, its cost function, and properties of its schema.

A kind is one of five ways to count calls, such as `FREE`. `classify` returns all properties of an
operator as an `Operator`. `known_operators` caches the results for the process.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.flop_counter import attention_masks  # noqa: F401 - registers its cost functions
from lflops.flop_counter.operator_costs import CallCost, all_formulas, formula_of, is_pure
from lflops.flop_counter.traffic import UNREAD
from lflops.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from lflops.formulas.table import Cost, load_families
from lflops.torch_private.operators import (
    HigherOrderOperator,
    OpOverload,
    decomposes,
    direct_call,
    has_list_argument,
    has_nested_kernel,
    makes_storage,
    qualified_name,
    written_arguments,
)

load_families()

NAMESPACES_WITHOUT_WORK = frozenset(
    {"prim", "profiler", "prims_guard", "debugprims", "inductor_guard"}
)
"""Namespaces of operators that compute nothing, such as a query for a fake tensor's device."""

LIKE_ATEN = frozenset({"aten", "prims", "quantized"})
"""Namespaces whose operators do the same as the ATen operators of the same name.

In `conventions.toml` and in the tables of `traffic.py`, the names of these operators have no
namespace (`add`). The names of all other operators have their namespace (`fsdp::copy_`).
"""

COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"}
)
"""Namespaces of collective operators."""

AWAITED = frozenset({"wait_tensor", "barrier", "monitored_barrier_"})
"""Collective operators in which ranks wait for each other and transfer nothing."""

FOREACH = "_foreach_"
"""Prefix of the pointwise operators on lists of tensors."""

FUSED = "_fused_"
"""Prefix of the fused optimizer operators on lists of tensors."""

GATHERS = "fsdp::split_with_sizes_copy"
"""FSDP's operator that writes gathered parameters to their storages.

FSDP resizes these storages before the call, without an operator. So this allocation is recorded
when `GATHERS` is called.
"""

WRAPS = "_wrap_tensor_autograd"
"""Operator that wraps a collective's pending result in a tensor that has no memory."""

LIFTS = frozenset({"lift", "lift_fresh"})
"""Operators whose result is in memory that no operator allocated.

For example, `torch.tensor` allocates memory without an operator and then calls `lift_fresh`. The
allocation is recorded when such an operator is called.
"""

CONTROL_FLOW = frozenset(
    {"cond", "while_loop", "while_loop_stack_output", "map_impl", "scan", "associative_scan"}
)
"""Operators that call functions, such as the branches of a condition or the body of a loop."""

NOTHING = Cost()


class Kind(Enum):
    """How the calls of an operator are counted.

    Attributes:
        FREE: A call costs nothing.
        COUNTED: The cost function gives the cost of a call.
        COLLECTIVE: A call transfers data between ranks.
        DECOMPOSED: The operators that a call decomposes into are counted.
        UNSUPPORTED: No formula is known, so the operator is listed as unsupported.
    """

    FREE = auto()
    COUNTED = auto()
    COLLECTIVE = auto()
    DECOMPOSED = auto()
    UNSUPPORTED = auto()


class KnownCost(NamedTuple):
    """The cost of one call, cached for later calls with the same shapes and numbers.

    Attributes:
        cost: The MACs and FLOPs of the call.
        moved: The least memory traffic in bytes.
        dtype: The dtype under which the call is counted, or `None` if the call has no tensors.
        is_simple: Whether the cost is exact and has neither MACs nor recomputation. If so, it can
            be added to the sums without further checks.
    """

    cost: Cost
    moved: int
    dtype: torch.dtype | None
    is_simple: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Operator:
    """An operator, or a function of another package, and how its calls are counted.

    Attributes:
        name: The name in profiles. It includes the namespace, except for ATen operators.
        table_name: The name in `conventions.toml` and in the tables of `traffic.py`. It includes
            the namespace, except for the namespaces in `LIKE_ATEN`.
        kind: How calls are counted.
        cost: Function that computes the cost of a call from its arguments, keyword arguments and
            result.
        written_arguments: The position of each argument that the operator writes to, keyed by the
            argument's name.
        makes_storage: Whether the results are new memory, and not views of the arguments.
        fills_storage: Whether the operator writes to storages that were resized without an
            operator, as FSDP does.
        allocates: Whether a call may allocate memory for a tensor.
        synchronizes: Whether the operator makes ranks wait for each other and transfers nothing.
        is_control_flow: Whether the operator calls functions: branches or loop bodies.
        has_nested_kernel: Whether the operator has a kernel for nested tensors. Such a kernel calls
            other operators.
        has_list_argument: Whether an argument is a list of tensors.
        is_view: Whether the operator neither computes nor allocates.
        is_single_kernel: Whether the operator runs as one kernel that calls no other operator.
        is_foreach: Whether the operator works on lists of tensors, such as the parameters of an
            optimizer. Its name begins with `FOREACH` or `FUSED`.
        is_pure: Whether the cost depends only on shapes and numbers. If so, the costs of earlier
            calls can be reused.
        cost_depends_only_on_bytes: Whether the cost of a call with contiguous tensors depends only
            on the sizes of the tensors in bytes, and not on their shapes or on numbers.
        costs: The costs of earlier calls, keyed by the shapes and numbers of the call.
        run: Function that runs the operator. It is faster than calling the operator object, because
            the object's `__call__` is written in Python.
    """

    name: str
    table_name: str
    kind: Kind
    cost: CallCost
    written_arguments: dict[str, int] = field(default_factory=dict)
    makes_storage: bool = True
    fills_storage: bool = False
    allocates: bool = False
    synchronizes: bool = False
    is_control_flow: bool = False
    has_nested_kernel: bool = False
    has_list_argument: bool = False
    is_view: bool = False
    is_single_kernel: bool = False
    is_foreach: bool = False
    is_pure: bool = False
    cost_depends_only_on_bytes: bool = False
    costs: dict[Hashable, KnownCost] = field(default_factory=dict)
    run: Any = None

    @classmethod
    def of_function(cls, name: str, cost: CallCost | None) -> "Operator":
        """Return an `Operator` for a function of another package.

        If `cost` is `None`, calls of the function are listed as unsupported.
        """
        if cost is None:
            return cls(name=name, table_name=name, kind=Kind.UNSUPPORTED, cost=_nothing)
        return cls(name=name, table_name=name, kind=Kind.COUNTED, cost=cost)


def classify(function: Any) -> Operator:
    """Determine how to count an operator of `torch.ops`."""
    qualified = qualified_name(function).split(".")[0]
    namespace, _, name = qualified.rpartition("::")
    table_name = name if namespace in LIKE_ATEN else f"{namespace}::{name}"
    profile_name = name if namespace in ("aten", "") else qualified
    is_overload = isinstance(function, OpOverload)
    has_no_work = namespace in NAMESPACES_WITHOUT_WORK
    returns_view = bool(getattr(function, "is_view", False))

    formula = formula_of(function)
    cost = formula or _nothing
    if formula is not None:
        kind = Kind.COUNTED
    elif has_no_work or returns_view or table_name in FREE:
        kind = Kind.FREE
    else:
        kind, cost = _kind_and_cost(function, namespace, name, table_name)

    results_are_new = not is_overload or table_name in LIFTS or makes_storage(function)
    allocates_results = results_are_new and not has_no_work and name != WRAPS
    fills_storage = qualified == GATHERS
    is_control_flow = isinstance(function, HigherOrderOperator) and name in CONTROL_FLOW
    may_be_nested = is_overload and not has_no_work and not returns_view
    calls_operators = is_control_flow or kind in (Kind.DECOMPOSED, Kind.UNSUPPORTED)
    is_by_convention = formula is None and kind is Kind.COUNTED
    return Operator(
        name=profile_name,
        table_name=table_name,
        kind=kind,
        cost=cost,
        written_arguments=dict(written_arguments(function)) if is_overload else {},
        makes_storage=allocates_results,
        fills_storage=fills_storage,
        allocates=fills_storage or (allocates_results and name != "_local_scalar_dense"),
        synchronizes=namespace in COLLECTIVES and name in AWAITED,
        is_control_flow=is_control_flow,
        has_nested_kernel=may_be_nested and has_nested_kernel(function),
        has_list_argument=is_overload and has_list_argument(function),
        is_view=kind is Kind.FREE and not allocates_results,
        is_single_kernel=not calls_operators,
        is_foreach=profile_name.startswith((FOREACH, FUSED)),
        is_pure=formula is None or is_pure(function),
        cost_depends_only_on_bytes=is_by_convention and table_name not in UNREAD,
        run=direct_call(function),
    )


def _kind_and_cost(
    function: Any, namespace: str, name: str, table_name: str
) -> tuple[Kind, CallCost]:
    """Determine how to count an operator that computes something and has no formula."""
    if decomposes(function):
        return Kind.DECOMPOSED, _nothing
    if namespace in COLLECTIVES:
        transfers = name not in AWAITED and name != WRAPS
        return (Kind.COLLECTIVE if transfers else Kind.FREE), _nothing
    convention = _convention(function, table_name)
    if convention is not None:
        return Kind.COUNTED, convention
    return Kind.UNSUPPORTED, _nothing


_KNOWN: dict[int, tuple[Any, Operator]] = {}
_known_with: tuple[Any, ...] = ()
"""The formulas that were registered when the current dict `_KNOWN` was created."""


def known_operators() -> dict[int, tuple[Any, Operator]]:
    """Return the operators seen in this process, keyed by the id of torch's operator object.

    Each entry also contains the operator object, which keeps it alive, so that its id stays valid.
    After a formula has been registered, the next call returns a new, empty dict.
    """
    global _KNOWN, _known_with  # noqa: PLW0603 - a running mode keeps its dict
    formulas = all_formulas()
    if _known_with != formulas:
        _KNOWN = {}
        _known_with = formulas
    return _KNOWN


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a value and its nested lists and tuples, or `None`."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        for part in value:
            found = first_tensor(part)
            if found is not None:
                return found
    return None


def _convention(function: Any, table_name: str) -> CallCost | None:
    """Return the cost function of an operator that is not a matmul, such as a pointwise operator.

    The cost follows the conventions in `formulas/conventions.py`: a fixed number of operations per
    element, or nothing if the operator only moves data. Return `None` if no convention applies.
    """
    if not isinstance(function, OpOverload):
        return None
    is_foreach = table_name.startswith(FOREACH)
    base = table_name.removeprefix(FOREACH)
    out_of_place = base if base.endswith("__") else base.rstrip("_")
    if base in MOVES or out_of_place in MOVES:
        return _nothing
    is_pointwise = is_foreach or _is_pointwise(function, table_name)
    # `max` and `min` are pointwise for two tensors and reductions for one tensor.
    may_reduce = is_foreach or out_of_place in ("max", "min") or not is_pointwise
    per_input = PER_INPUT.get(base, PER_INPUT.get(out_of_place))
    if per_input is not None and may_reduce:
        return _per_input(per_input)
    operations = PER_OUTPUT.get(out_of_place, 1 if is_pointwise else None)
    if operations is None:
        return None
    # Operators on lists may write their results in place and return nothing.
    return _per_input(operations) if is_foreach else _per_output(operations)


def _is_pointwise(function: Any, table_name: str) -> bool:
    if torch.Tag.pointwise in function.tags:
        return True
    if "::" in table_name:
        return False
    out_of_place = getattr(torch.ops.aten, table_name.rstrip("_"), None)
    if out_of_place is None:
        return False
    overloads = [getattr(out_of_place, name) for name in out_of_place.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _nothing(_args: Any, _kwargs: Any, _out: Any) -> Cost:
    return NOTHING


def _floating_elements(tensor: Tensor | None) -> int:
    """Return the number of elements of a floating-point or complex tensor, else 0."""
    if tensor is None:
        return 0
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return tensor.numel()
    return 0


@lru_cache
def _flops(number: int) -> Cost:
    return Cost(other_flops=number)


def _per_output(operations: int) -> CallCost:
    def cost(_args: Any, _kwargs: Any, out: Any) -> Cost:
        result = out if isinstance(out, Tensor) else first_tensor(out)
        return _flops(operations * _floating_elements(result))

    return cost


def _per_input(operations: int) -> CallCost:
    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        operand = args[0] if args else None
        if isinstance(operand, list | tuple):
            return _flops(operations * sum(map(_floating_elements, operand)))
        return _flops(operations * _floating_elements(operand))

    return cost

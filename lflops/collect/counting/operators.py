"""Operators: the kind and the cost function of each, looked up once; and the logical cost of those on sharded tensors.

A `DTensor` knows its unsharded shape, so the logical cost of an operator on it follows from the formulas. A layer may also hand its local
part on as a plain tensor, as tensor parallelism does. The unsharded shape of such a partial tensor is unknown. `PartialTensors` follows
them until a collective gathers them.
"""

import weakref
from enum import Enum, auto
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lflops.collect.counting.live_memory import storage_of
from lflops.collect.counting.traffic import UNREAD, tensors_of
from lflops.collect.inputs.tensors import changed
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.operator_costs.table import CallCost, all_formulas, formula_of, is_pure
from lflops.collect.torch_private.dispatch_modes import OwnMode, on_stack, without_modes
from lflops.collect.torch_private.operators import (
    HigherOrderOperator,
    OpOverload,
    decompose,
    decomposes,
    direct_call,
    has_list_argument,
    has_nested_kernel,
    makes_storage,
    qualified_name,
    written_arguments,
)
from lflops.collect.torch_private.tensors import PLAIN
from lflops.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from lflops.formulas.table import Cost, load_families

load_families()

NAMESPACES_WITHOUT_WORK = frozenset({"prim", "profiler", "prims_guard", "debugprims", "inductor_guard"})
LIKE_ATEN = frozenset({"aten", "prims", "quantized"})
"""Namespaces whose names mean the same as in ATen. The tables have operators of any other namespace under their full name."""

AWAITED = frozenset({"wait_tensor", "barrier", "monitored_barrier_"})
"""Of these namespaces: ranks wait for each other, and nothing is carried."""
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
FOREACH = "_foreach_"
FUSED = "_fused_"
GATHERS = "fsdp::split_with_sizes_copy"  # by this FSDP writes gathered parameters to their storages, which it resizes without an operator
WRAPS = "_wrap_tensor_autograd"  # by this a collective's result is wrapped until it is waited for. The wrapper's storage has no memory.
LIFTS = frozenset({"lift", "lift_fresh"})  # operators by which memory that no operator made arrives: from `torch.tensor`, or a loaded array

CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "map_impl", "scan", "associative_scan"})
"""Operators that call functions: branches, and bodies of loops."""

NOTHING = Cost()


class Kind(Enum):
    """How a call is counted."""

    FREE = auto()
    COUNTED = auto()
    COLLECTIVE = auto()
    DECOMPOSED = auto()
    UNCOUNTED = auto()


class KnownCost(NamedTuple):
    """What a call costs, and every call like it."""

    cost: Cost
    moved: int
    dtype: torch.dtype | None
    is_all: bool  # whether to add it up is all that there is to do: it is no product, and what it may be is known


class Operator:
    """One operator and how to count it."""

    def __init__(self, function: Any) -> None:
        qualified = qualified_name(function).split(".")[0]
        namespace, _, name = qualified.rpartition("::")
        # The name in the tables: with its namespace unless that is one of `LIKE_ATEN`
        self.known_as = name if namespace in LIKE_ATEN else f"{namespace}::{name}"
        self.name = name if namespace in ("aten", "") else qualified  # the name, with its namespace unless that is ATen
        self.waits = namespace in COLLECTIVES and name in AWAITED  # whether ranks wait for each other in it, and nothing is carried
        # The position of each argument that it writes to, by name
        self.written = dict(written_arguments(function)) if isinstance(function, OpOverload) else {}
        no_work = namespace in NAMESPACES_WITHOUT_WORK  # such as asking for the device of a fake tensor
        makes = not isinstance(function, OpOverload) or self.known_as in LIFTS or makes_storage(function)
        self.makes_storage = makes and not no_work and name != WRAPS  # whether results are new memory
        self.fills = qualified == GATHERS  # whether it writes to storages that have got their memory without an operator
        self.is_birth = (self.makes_storage and name != "_local_scalar_dense") or self.fills  # whether a tensor may get memory by it
        # Whether it calls functions: branches, or bodies of loops
        self.is_control_flow = isinstance(function, HigherOrderOperator) and name in CONTROL_FLOW
        views = bool(getattr(function, "is_view", False))
        # Whether its kernel for nested tensors calls other operators
        self.has_nested_kernel = isinstance(function, OpOverload) and not no_work and not views and has_nested_kernel(function)
        formula = formula_of(function)
        # Whether shapes and numbers determine the cost, so that calls in which these are equal cost the same
        self.is_pure = formula is None or is_pure(function)
        self.cost: CallCost = formula or _nothing  # the cost of a call, from its arguments and result
        self.kind = Kind.COUNTED  # how a call is counted
        if formula is not None:
            pass
        elif no_work or self.known_as in FREE or views:
            self.kind = Kind.FREE
        elif decomposes(function):
            self.kind = Kind.DECOMPOSED
        elif namespace in COLLECTIVES:
            self.kind = Kind.FREE if self.waits or name == "_wrap_tensor_autograd" else Kind.COLLECTIVE
        elif (convention := _convention(function, self.known_as)) is not None:
            self.cost = convention
        else:
            self.kind = Kind.UNCOUNTED
        # Whether it runs as one kernel, which calls no other operator
        self.runs_as_it_is = not (self.is_control_flow or self.kind in (Kind.DECOMPOSED, Kind.UNCOUNTED))
        self.is_view = self.kind is Kind.FREE and not self.makes_storage  # whether it neither computes nor makes memory
        self.takes_lists = isinstance(function, OpOverload) and has_list_argument(function)  # whether an argument is a list of tensors
        self.is_on_lists = self.name.startswith((FOREACH, FUSED))  # whether an optimizer calls it with a list of its parameters
        # Whether the bytes of tensors without gaps determine its cost, so that calls with other shapes and numbers cost the same
        self.is_by_size = formula is None and self.kind is Kind.COUNTED and self.known_as not in UNREAD
        self.costs: dict[Any, KnownCost] = {}  # of its calls so far, by what equal ones have in common
        self.run = direct_call(function)

    @classmethod
    def of_function(cls, name: str, cost: CallCost | None) -> "Operator":
        """A function that is no operator, which is counted by a formula, or listed."""
        made = cls.__new__(cls)
        made.name = made.known_as = name
        made.written, made.costs, made.makes_storage = {}, {}, True
        made.has_nested_kernel = made.is_control_flow = made.is_pure = made.fills = made.waits = made.is_view = False
        made.is_on_lists = made.takes_lists = made.is_by_size = False
        made.kind = Kind.UNCOUNTED if cost is None else Kind.COUNTED
        made.cost = cost or _nothing
        return made


_KNOWN: dict[int, tuple[Any, Operator]] = {}
_known_with: tuple[Any, ...] = ()


def known_operators() -> dict[int, tuple[Any, Operator]]:
    """The operators seen in this process, by the id of torch's object, which is kept alive with them. A new formula empties the cache."""
    global _KNOWN, _known_with
    if _known_with != all_formulas():
        _KNOWN, _known_with = {}, all_formulas()
    return _KNOWN


def first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        for each in value:
            if (found := first_tensor(each)) is not None:
                return found
    return None


def _convention(function: Any, name: str) -> CallCost | None:
    """The cost of an operator that is no contraction, by the convention; `None` where the convention has no rule for it."""
    if not isinstance(function, OpOverload):
        return None
    foreach = name.startswith(FOREACH)
    base = name.removeprefix(FOREACH)
    plain = base if base.endswith("__") else base.rstrip("_")
    if base in MOVES or plain in MOVES:
        return _nothing
    # `max` and `min` of two tensors are pointwise, of one a reduction.
    pointwise = foreach or _is_pointwise(function, name)
    reduced = PER_INPUT.get(base, PER_INPUT.get(plain))
    if reduced is not None and (foreach or plain in ("max", "min") or not pointwise):
        return _per_input(reduced)
    operations = PER_OUTPUT.get(plain, 1 if pointwise else None)
    if operations is None:
        return None
    # Operators on lists may write their results in place and return nothing.
    return _per_input(operations) if foreach else _per_output(operations)


def _is_pointwise(function: Any, name: str) -> bool:
    if torch.Tag.pointwise in function.tags:
        return True
    plain = None if "::" in name else getattr(torch.ops.aten, name.rstrip("_"), None)
    return plain is not None and any(torch.Tag.pointwise in getattr(plain, overload).tags for overload in plain.overloads())


def _nothing(_args: Any, _kwargs: Any, _out: Any) -> Cost:
    return NOTHING


def _floating_elements(tensor: Tensor | None) -> int:
    return tensor.numel() if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex) else 0


@lru_cache
def _flops(number: int) -> Cost:
    return Cost(other_flops=number)


def _per_output(operations: int) -> CallCost:
    def cost(_args: Any, _kwargs: Any, out: Any) -> Cost:
        return _flops(operations * _floating_elements(out if isinstance(out, Tensor) else first_tensor(out)))

    return cost


def _per_input(operations: int) -> CallCost:
    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            return _flops(operations * sum(map(_floating_elements, first)))
        return _flops(operations * _floating_elements(first))

    return cost


GATHER = ("allgather", "gather")
SCATTER = ("reducescatter", "scatter", "alltoall")


def is_sharded(kind: type) -> bool:
    """Whether a class is DTensor. The name is compared, so that DTensor is not loaded for models that never use it."""
    return kind.__name__ == "DTensor"


def logical_cost(operator: Operator, function: Any, args: Any, kwargs: Any, out: Any) -> Cost | None:
    """The cost of an operator on unsharded tensors; `None` where no formula gives it."""
    # DTensors have unsharded shapes. An operator that is written in others runs once more, on the meta device.
    if operator.kind is Kind.COUNTED:
        try:
            return operator.cost(args, kwargs, out)
        except Exception:  # noqa: BLE001 - the local operator fails in the same way, and is listed
            return None
    if operator.kind is not Kind.DECOMPOSED:
        return None
    macs = _Macs()
    try:
        with without_modes(), on_stack(macs):
            decompose(function, *changed((args, kwargs), Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta")))
    except Exception:  # noqa: BLE001 - some operators need more than shapes
        return None
    return Cost(macs.sum)


class _Macs(OwnMode):
    def __init__(self) -> None:
        super().__init__()
        self.sum = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, Operator(function)
        if operator.kind is Kind.DECOMPOSED:
            with on_stack(self):
                return decompose(function, args, kwargs)
        out = function(*args, **kwargs)
        self.sum += operator.cost(args, kwargs, out).macs
        return out


class PartialTensors:
    """Follows the storages of partial tensors from operator to operator. It keeps none of them alive."""

    def __init__(self, tree: ModuleTree) -> None:
        self.active = False  # whether any sharded tensor has been seen. Until then there is nothing to follow
        self._tree = tree
        self._row: str | None = None
        self._storages: dict[int, weakref.ref[Any]] = {}
        for parameter, _ in tree.parameters():
            self.add_local_parts(parameter)

    def add_local_parts(self, value: Any) -> None:
        """Note for each sharded tensor in a value whether its local part is partial or complete."""
        for tensor in tensors_of((value,)):
            if type(tensor) not in PLAIN and is_sharded(type(tensor)):
                self.active = True
                self._mark(tensor, is_partial=_is_partial(tensor))

    def follow(self, operator: Operator, row: str, args: Any, kwargs: Any, out: Any) -> None:
        """Mark the results of an operator on plain tensors: they are partial if an argument is, or after a scatter."""
        if row != self._row:
            self._row = row
            module = self._tree.modules.get(row)
            # A parameter that was unsharded just for this module was not there at the beginning.
            for parameter in () if module is None else module.parameters(recurse=False):
                self.add_local_parts(parameter)
        collective = operator.name.rpartition("::")[2].replace("_", "") if operator.kind is Kind.COLLECTIVE else ""
        is_partial = collective.startswith(SCATTER) or (not collective.startswith(GATHER) and self.in_any((args, kwargs)))
        if not is_partial and not collective:
            return  # a tensor that is written in place stays partial
        written = [args[position] if position < len(args) else kwargs.get(name) for name, position in operator.written.items()]
        for tensor in tensors_of((out, *written)):
            self._mark(tensor, is_partial=is_partial)

    def in_any(self, values: Any) -> bool:
        given = (each.values() if isinstance(each, dict) else each for each in values)
        storages = (storage_of(tensor) for each in given for tensor in tensors_of(each))
        return any(storage is not None and storage[1] in self._storages for storage in storages)

    def _mark(self, tensor: Tensor, *, is_partial: bool) -> None:
        found = storage_of(tensor)
        if found is None:
            return
        storage, key = found
        if is_partial:
            self._storages.setdefault(key, weakref.ref(storage, partial(self._storages.pop, key)))
        else:
            self._storages.pop(key, None)


def _is_partial(tensor: Any) -> bool:
    """Whether this rank has only some elements of a DTensor. Of a sum that is still to be reduced, each rank has all of them."""
    sizes = tensor.device_mesh.shape
    placements = zip(tensor.placements, sizes, strict=True)
    return any(size > 1 and not (placement.is_replicate() or placement.is_partial()) for placement, size in placements)

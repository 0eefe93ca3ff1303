"""What kind of thing an operator is, worked out once for each and kept."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

# The families enter themselves in the table.
from lflops.collect.counting.formulas import attention, convolution, matmul, normalisation, sums, updates  # noqa: F401
from lflops.collect.counting.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from lflops.collect.counting.formulas.table import Cost, formula_of
from lflops.collect.torch_compat import OpOverload, decomposes, makes_storage, name_of, written_arguments

__all__ = ["Kind", "Operator", "first_tensor"]

NAMESPACES_WITHOUT_WORK = frozenset({"prim", "profiler", "prims_guard", "debugprims", "inductor_guard"})
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
FOREACH = "_foreach_"
NOTHING = Cost()


class Kind(Enum):
    """What there is to do for a call."""

    FREE = auto()
    COUNTED = auto()
    COLLECTIVE = auto()
    DECOMPOSED = auto()
    UNCOUNTED = auto()


class Operator:
    """One operator and how to count it.

    Attributes:
        name: Without the namespace where that is ATen's.
        kind: What there is to do for a call.
        cost: The arithmetic of a call, from its arguments and result.
        makes_storage: Whether results are new memory.
        written: Names and places of the arguments written to.
    """

    __slots__ = ("cost", "kind", "makes_storage", "name", "packet", "written")

    def __init__(self, function: Any) -> None:
        """Look the operator up in the table and the convention."""
        qualified = name_of(function).split(".")[0]
        namespace, _, name = qualified.rpartition("::")
        self.packet = name
        self.name = name if namespace in ("aten", "") else qualified
        self.written = written_arguments(function) if isinstance(function, OpOverload) else ()
        self.makes_storage = not isinstance(function, OpOverload) or makes_storage(function)
        formula = formula_of(function)
        self.cost: Callable[[Any, Any, Any], Cost] = formula or _nothing
        self.kind = Kind.COUNTED
        if formula is not None:
            return
        if namespace in NAMESPACES_WITHOUT_WORK or name in FREE or getattr(function, "is_view", False):
            self.kind = Kind.FREE
        elif decomposes(function):
            self.kind = Kind.DECOMPOSED
        elif namespace in COLLECTIVES:
            self.kind = Kind.FREE if name in ("wait_tensor", "barrier", "monitored_barrier_") else Kind.COLLECTIVE
        else:
            convention = _convention(function, name)
            self.kind = Kind.UNCOUNTED if convention is None else Kind.COUNTED
            self.cost = convention or _nothing


def first_tensor(value: Any) -> Tensor | None:
    """The value if it is a tensor, else the first in it that is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def _convention(function: Any, name: str) -> Callable[[Any, Any, Any], Cost] | None:
    """The arithmetic of an operator that multiplies no matrices; `None` where nothing is known about it."""
    base = name.removeprefix(FOREACH)
    plain = base if base in MOVES or base.endswith("__") else base.rstrip("_")
    if base in MOVES or plain in MOVES:
        return _nothing
    if name.startswith(FOREACH):
        return _per_input(PER_INPUT[plain]) if plain in PER_INPUT else _foreach(PER_OUTPUT.get(plain, 1))
    if plain in PER_OUTPUT:
        return _per_output(PER_OUTPUT[plain])
    # `max` and `min` of two tensors are pointwise, of one a reduction.
    if plain in PER_INPUT and not (_is_pointwise(function) and plain not in ("max", "min")):
        return _per_input(PER_INPUT[plain])
    if name in PER_INPUT:
        return _per_input(PER_INPUT[name])
    return _per_output(1) if _is_pointwise(function) else None


def _is_pointwise(function: Any) -> bool:
    """Whether torch marks the operator so, or the one that it is the in-place form of."""
    if torch.Tag.pointwise in function.tags:
        return True
    plain = getattr(torch.ops.aten, name_of(function).split("::")[-1].split(".")[0].rstrip("_"), None)
    return plain is not None and any(torch.Tag.pointwise in getattr(plain, overload).tags for overload in plain.overloads())


def _nothing(_args: Any, _kwargs: Any, _out: Any) -> Cost:
    return NOTHING


def _floating_elements(tensor: Tensor | None) -> int:
    return tensor.numel() if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex) else 0


def _per_output(operations: int) -> Callable[[Any, Any, Any], Cost]:
    def cost(_args: Any, _kwargs: Any, out: Any) -> Cost:
        return Cost(other_flops=operations * _floating_elements(first_tensor(out)))

    return cost


def _per_input(operations: int) -> Callable[[Any, Any, Any], Cost]:
    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            return Cost(other_flops=operations * sum(map(_floating_elements, first)))
        return Cost(other_flops=operations * _floating_elements(first))

    return cost


def _foreach(operations: int) -> Callable[[Any, Any, Any], Cost]:
    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        return Cost(other_flops=operations * sum(map(_floating_elements, args[0])))

    return cost

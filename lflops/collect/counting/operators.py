"""What kind of thing an operator is, worked out once for each and kept."""

from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

# The families enter themselves in the tables.
from lflops.collect.operator_costs import flex, quantized_convolution  # noqa: F401
from lflops.collect.operator_costs.table import CallCost, all_formulas, formula_of
from lflops.collect.torch_private.operators import (
    OpOverload,
    decomposes,
    has_nested_kernel,
    makes_storage,
    qualified_name,
    written_arguments,
)
from lflops.formulas import (  # noqa: F401
    attention,
    convolution,
    encoder,
    matmul,
    normalisation,
    optimizer_updates,
    pairwise_distances,
    quantized,
    recurrent,
    spectral,
    sums,
    triangular_solve,
)
from lflops.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from lflops.formulas.table import Cost

__all__ = ["Kind", "Operator", "first_tensor", "known_operators"]

NAMESPACES_WITHOUT_WORK = frozenset({"prim", "profiler", "prims_guard", "debugprims", "inductor_guard"})
LIKE_ATEN = frozenset({"aten", "prims", "quantized"})
"""Where a name means what it means in ATen. Anywhere else it may mean anything: the tables know it with its namespace, or not at all."""

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
FOREACH = "_foreach_"
TAKES_IN = frozenset({"lift", "lift_fresh"})
"""By these, memory that was made without an operator comes in: `torch.tensor`, a loaded array."""

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
        known_as: What the tables call it: without the namespace where a name means what it means in ATen.
        kind: What there is to do for a call.
        cost: The arithmetic of a call, from its arguments and result.
        makes_storage: Whether results are new memory.
        has_nested_kernel: Whether its kernel for nested tensors calls other operators.
        written: Names and places of the arguments written to.
    """

    __slots__ = ("cost", "has_nested_kernel", "kind", "known_as", "makes_storage", "name", "written")

    def __init__(self, function: Any) -> None:
        """Look the operator up in the table and the convention."""
        qualified = qualified_name(function).split(".")[0]
        namespace, _, name = qualified.rpartition("::")
        self.known_as = name if namespace in LIKE_ATEN else f"{namespace}::{name}"
        self.name = name if namespace in ("aten", "") else qualified
        self.written = written_arguments(function) if isinstance(function, OpOverload) else ()
        asks = namespace in NAMESPACES_WITHOUT_WORK  # where a fake tensor is, for one
        self.makes_storage = not asks and (not isinstance(function, OpOverload) or self.known_as in TAKES_IN or makes_storage(function))
        views = bool(getattr(function, "is_view", False))
        self.has_nested_kernel = isinstance(function, OpOverload) and not asks and not views and has_nested_kernel(function)
        formula = formula_of(function)
        self.cost: CallCost = formula or _nothing
        self.kind = Kind.COUNTED
        if formula is not None:
            return
        if asks or self.known_as in FREE or views:
            self.kind = Kind.FREE
        elif decomposes(function):
            self.kind = Kind.DECOMPOSED
        elif namespace in COLLECTIVES:
            self.kind = Kind.FREE if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_") else Kind.COLLECTIVE
        else:
            convention = _convention(function, self.known_as)
            self.kind = Kind.UNCOUNTED if convention is None else Kind.COUNTED
            self.cost = convention or _nothing


_KNOWN: dict[int, tuple[Any, Operator]] = {}
_known_with: tuple[Any, ...] = ()


def known_operators() -> dict[int, tuple[Any, Operator]]:
    """Those met so far in this process, by the identity of torch's object, which stands beside them. Another table begins them anew."""
    global _KNOWN, _known_with
    if _known_with != all_formulas():
        _KNOWN, _known_with = {}, all_formulas()
    return _KNOWN


def first_tensor(value: Any) -> Tensor | None:
    """The value if it is a tensor, else the first in it that is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def _convention(function: Any, name: str) -> CallCost | None:
    """The arithmetic of an operator that multiplies no matrices; `None` where nothing is known about it."""
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
    # A list's results may be its own elements, written in place and not returned.
    return _per_input(operations) if foreach else _per_output(operations)


def _is_pointwise(function: Any, name: str) -> bool:
    """Whether the operator is marked so, or the one of ATen's that it is the in-place form of."""
    if torch.Tag.pointwise in function.tags:
        return True
    plain = None if "::" in name else getattr(torch.ops.aten, name.rstrip("_"), None)
    return plain is not None and any(torch.Tag.pointwise in getattr(plain, overload).tags for overload in plain.overloads())


def _nothing(_args: Any, _kwargs: Any, _out: Any) -> Cost:
    return NOTHING


def _floating_elements(tensor: Tensor | None) -> int:
    return tensor.numel() if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex) else 0


def _per_output(operations: int) -> CallCost:
    def cost(_args: Any, _kwargs: Any, out: Any) -> Cost:
        return Cost(0, None, operations * _floating_elements(out if isinstance(out, Tensor) else first_tensor(out)))

    return cost


def _per_input(operations: int) -> CallCost:
    def cost(args: Any, _kwargs: Any, _out: Any) -> Cost:
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            return Cost(other_flops=operations * sum(map(_floating_elements, first)))
        return Cost(other_flops=operations * _floating_elements(first))

    return cost

"""Compute the logical cost of operators on sharded tensors.

The logical cost is the cost of the operator on the whole tensors, not only on this rank's parts. A
`DTensor` has the shape of the whole tensor, so the formulas give its logical cost directly. But a
layer can also pass on only this rank's part as a plain tensor, for example in tensor parallelism.
Such a plain tensor is called partial. It does not show the shape of the whole tensor.
`PartialTensors` follows partial tensors until a collective gathers them.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lflops.flop_counter.live_memory import storage_of
from lflops.flop_counter.operators import Kind, Operator, classify
from lflops.flop_counter.traffic import tensors_of
from lflops.formulas.table import Cost
from lflops.inputs.tensors import argument, changed
from lflops.model.module_tree import ModuleTree
from lflops.torch_private.dispatch_modes import InternalMode, on_stack, without_modes
from lflops.torch_private.operators import decompose
from lflops.torch_private.tensors import PLAIN

GATHER = ("allgather", "gather")
"""Prefixes of collectives that return a complete tensor on each rank, without underscores."""

SCATTER = ("reducescatter", "scatter", "alltoall")
"""Prefixes of collectives that return a part of a tensor on each rank, without underscores."""


def is_sharded(kind: type) -> bool:
    """Return whether a class is DTensor.

    The name is compared, so that DTensor is not loaded for models that never use it.
    """
    return kind.__name__ == "DTensor"


def logical_cost(
    operator: Operator, function: Any, args: Any, kwargs: Any, out: Any
) -> Cost | None:
    """Return the cost that a call on DTensors would have on the whole (unsharded) tensors.

    A DTensor has the shape of the whole tensor, so a formula gives this cost directly. An operator
    that decomposes into other operators has no formula. Such an operator runs once more on the meta
    device, and the MACs of the other operators are added up. Return `None` if the cost is unknown.
    """
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
            meta_args, meta_kwargs = changed((args, kwargs), Tensor, _unsharded_meta)
            decompose(function, meta_args, meta_kwargs)
    except Exception:  # noqa: BLE001 - some operators need more than shapes
        return None
    return Cost(macs.sum)


def _unsharded_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Macs(InternalMode):
    """A dispatch mode that adds up the MACs of all operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = classify(function)
        if operator.kind is Kind.DECOMPOSED:
            with on_stack(self):
                return decompose(function, args, kwargs)
        out = function(*args, **kwargs)
        self.sum += operator.cost(args, kwargs, out).macs
        return out


class PartialTensors:
    """Tracks which plain tensors hold only this rank's part of a sharded tensor.

    These tensors are called partial. The results of operators on partial tensors are partial too.
    Tensors are identified by their storages, which are not kept alive.

    Attributes:
        active: Whether any sharded tensor has been seen. Until then there is nothing to follow.
    """

    def __init__(self, tree: ModuleTree) -> None:
        self.active = False
        self._tree = tree
        self._fqn: str | None = None
        self._storages: dict[int, weakref.ref[Any]] = {}
        for parameter, _ in tree.parameters():
            self.add_local_parts(parameter)

    def add_local_parts(self, value: Any) -> None:
        """Record for each DTensor in a value whether its local tensor is partial."""
        for tensor in tensors_of((value,)):
            if type(tensor) not in PLAIN and is_sharded(type(tensor)):
                self.active = True
                self._mark(tensor, is_partial=_is_partial(tensor))

    def follow(self, operator: Operator, fqn: str, args: Any, kwargs: Any, out: Any) -> None:
        """Mark the results of an operator on plain tensors as partial or complete.

        The results of a scatter are partial, and the results of a gather are complete. The results
        of any other operator are partial if an argument is partial.
        """
        if fqn != self._fqn:
            self._fqn = fqn
            self._add_parameters(fqn)
        collective = ""
        if operator.kind is Kind.COLLECTIVE:
            collective = operator.name.rpartition("::")[2].replace("_", "")
        is_partial = collective.startswith(SCATTER)
        if not is_partial and not collective.startswith(GATHER):
            is_partial = self.in_any((args, kwargs))
        if not is_partial and not collective:
            # A partial tensor that is overwritten in place stays partial.
            return
        results = [out]
        for name, position in operator.written_arguments.items():
            results.append(argument(args, kwargs, position, name))
        for tensor in tensors_of(results):
            self._mark(tensor, is_partial=is_partial)

    def _add_parameters(self, fqn: str) -> None:
        """Record the parameters of a module again when the module starts to run.

        Under FSDP, the parameters can be sharded before the module runs and whole while it runs.
        """
        module = self._tree.modules.get(fqn)
        if module is not None:
            for parameter in module.parameters(recurse=False):
                self.add_local_parts(parameter)

    def in_any(self, values: Any) -> bool:
        """Return whether the arguments of a call contain a tensor that is a part of a whole one.

        Args:
            values: Sequences and dicts of arguments, for example `(args, kwargs)`.
        """
        for value in values:
            parts = value.values() if isinstance(value, dict) else value
            for tensor in tensors_of(parts):
                storage = storage_of(tensor)
                if storage is not None and storage[1] in self._storages:
                    return True
        return False

    def _mark(self, tensor: Tensor, *, is_partial: bool) -> None:
        storage_and_key = storage_of(tensor)
        if storage_and_key is None:
            return
        storage, key = storage_and_key
        if not is_partial:
            self._storages.pop(key, None)
        elif key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._storages.pop, key))


def _is_partial(tensor: Any) -> bool:
    """Return whether this rank has only some elements of a DTensor.

    A DTensor that only needs a reduction over the ranks (placement `Partial`) has all elements on
    every rank.
    """
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if size > 1 and not placement.is_replicate() and not placement.is_partial():
            return True
    return False

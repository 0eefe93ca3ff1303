"""Sharded tensors: the logical cost of operators on DTensors, and which plain tensors are parts of them.

A `DTensor` knows its unsharded shape, so the logical cost of an operator on it follows from the formulas. A layer may also hand its local
part on as a plain tensor, as tensor parallelism does. The unsharded shape of such a partial tensor is unknown. `PartialTensors` follows
them until a collective gathers them.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lflops.collect.counting.live_memory import storage_of
from lflops.collect.counting.operators import Kind, Operator
from lflops.collect.counting.traffic import tensors_of
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.dispatch_modes import OwnMode, on_stack, without_modes
from lflops.collect.torch_private.operators import decompose
from lflops.collect.torch_private.tensors import PLAIN
from lflops.formulas.table import Cost

GATHER = ("allgather", "gather")
SCATTER = ("reducescatter", "scatter", "alltoall")


def is_sharded(kind: type) -> bool:
    """Whether a class is DTensor. The name is compared, so that DTensor is not loaded for models that never use it."""
    return kind.__name__ == "DTensor"


def logical_cost(operator: Operator, function: Any, args: Any, kwargs: Any, out: Any) -> Cost | None:
    """The cost of an operator on unsharded tensors; `None` where no formula gives it.

    DTensors have unsharded shapes. An operator that is written in others runs once more, on the meta device.
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
            decompose(function, *_on_meta((args, kwargs)))
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


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _on_meta(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_meta, value))
    return value


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

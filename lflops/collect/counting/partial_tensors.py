"""Which plain tensors are only parts of larger ones: what is multiplied with these does not say what the whole model would multiply.

A `DTensor` knows its whole shape. A layer may hand its part on as a plain tensor, as those of tensor parallelism do, and nothing says what
that is a part of. So it is remembered which storages hold such parts, and where they go, until the ranks gather them.
"""

import weakref
from functools import partial
from typing import Any

from torch import Tensor

from lflops.collect.counting.live_memory import storage_of
from lflops.collect.counting.operators import Kind, Operator
from lflops.collect.counting.sharded_ops import is_sharded
from lflops.collect.counting.traffic import tensors_of
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.torch_private.tensors import PLAIN

__all__ = ["PartialTensors"]

GATHER = ("allgather", "gather")
SCATTER = ("reducescatter", "scatter", "alltoall")


class PartialTensors:
    """Follows storages from operator to operator; nothing is kept alive by it.

    Args:
        tree: The modules whose parameters may be spread.

    Attributes:
        awake: Whether any tensor that is spread over ranks was met; until then there is nothing to follow.
    """

    def __init__(self, tree: ModuleTree) -> None:
        """Look at the parameters."""
        self.awake = False
        self._tree = tree
        self._row: str | None = None
        self._held: dict[int, weakref.ref[Any]] = {}
        for parameter, _ in tree.parameters():
            self.note(parameter)

    def note(self, value: Any) -> None:
        """Note what each of the tensors that are spread over ranks has here: a part, or all of it."""
        for tensor in tensors_of((value,)):
            if type(tensor) not in PLAIN and is_sharded(type(tensor)):
                self.awake = True
                self._set(tensor, is_part=_is_part(tensor))

    def follow(self, operator: Operator, row: str, args: Any, kwargs: Any, out: Any) -> None:
        """An operator on plain tensors has run: what it made of parts is parts."""
        if row != self._row:
            self._row = row
            module = self._tree.modules.get(row)
            # What is unsharded for this module alone is not among what was there at the beginning.
            for parameter in () if module is None else module.parameters(recurse=False):
                self.note(parameter)
        name = operator.name.rpartition("::")[2].replace("_", "") if operator.kind is Kind.COLLECTIVE else ""
        parts = name.startswith(SCATTER) or (not name.startswith(GATHER) and self.among((args, kwargs)))
        if not parts and not name:
            return  # what is written into keeps the parts that it has
        written = [args[place] if place < len(args) else kwargs.get(key) for key, place in operator.written]
        for tensor in tensors_of((out, *written)):
            self._set(tensor, is_part=parts)

    def among(self, values: Any) -> bool:
        """Whether any of the tensors in these is such a part."""
        given = (each.values() if isinstance(each, dict) else each for each in values)
        return any((found := storage_of(tensor)) is not None and found[1] in self._held for each in given for tensor in tensors_of(each))

    def _set(self, tensor: Tensor, *, is_part: bool) -> None:
        found = storage_of(tensor)
        if found is None:
            return
        storage, key = found
        if is_part:
            self._held.setdefault(key, weakref.ref(storage, partial(self._forget, key)))
        else:
            self._held.pop(key, None)

    def _forget(self, key: int, _reference: object) -> None:
        self._held.pop(key, None)


def _is_part(tensor: Any) -> bool:
    """Whether a rank has less of it than all. Of a sum that is still to be made each rank has the whole shape."""
    sizes = tensor.device_mesh.shape
    return any(size > 1 and not (place.is_replicate() or place.is_partial()) for place, size in zip(tensor.placements, sizes, strict=True))

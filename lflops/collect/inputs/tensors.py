"""Tensors inside of arguments and results: their device, dtypes and shapes."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lflops.collect.inputs.structure import Storage, attributes_of, is_tensor, may_hold_tensors, storage_of
from lflops.collect.torch_private.tensors import node_of, without_overrides

DEEPEST = 12  # levels of nesting that are searched; a structure that contains itself ends there
MOST_VALUES = 1_000  # values other than tensors that are searched


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings, dataclasses and plain objects, in order.

    What objects store is read, and nothing of the user's is run. After `MOST_VALUES` values that are no tensors the search ends: an output
    that refers to a data set must not be searched for all that is in it.
    """
    for _, tensor in named_tensors_in(value):
        yield tensor


def nodes_of(value: Any) -> Iterator[Any]:
    """The autograd nodes that computed the tensors."""
    with without_overrides():
        nodes = [node_of(tensor) for tensor in tensors_in(value)]
    return (node for node in nodes if node is not None)


def named_tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The same, each with its path. An object that several paths lead to is searched once."""
    return _Search().tensors("", value, DEEPEST)


class _Search:
    def __init__(self) -> None:
        self._left = MOST_VALUES
        self._seen: dict[int, Any] = {}  # keeps them alive, so that no other object gets the id of one

    def tensors(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
        if is_tensor(value):
            yield name, value
            return
        self._left -= 1
        if self._left < 0 or not depth or id(value) in self._seen:
            return
        parts = _parts(value)
        if not parts:
            return
        self._seen[id(value)] = value
        for key, part in parts.items() if type(parts) is dict else enumerate(parts):
            if self._left < 0:
                return
            yield from self.tensors((f"{name}.{key}" if name else str(key)) if type(key) in (str, int) else name, part, depth - 1)


def _parts(value: Any) -> Storage | None:
    storage = storage_of(value)
    if storage is not None:
        return storage
    kind = type(value)
    if kind is set or kind is frozenset:
        return list(value)
    return attributes_of(value) if may_hold_tensors(value) else None


def cut_off(value: Any) -> Any:
    """The same structure with leaves in place of tensors that have a graph, because backward through that graph is not the model's work.

    Lists, tuples and dictionaries are searched. An object without such tensors is returned itself.
    """
    if isinstance(value, Tensor):
        if value.is_leaf:
            return value
        with torch.inference_mode(mode=False), torch.enable_grad():
            return value.detach().requires_grad_().clone()  # a model may write to this copy in place, unlike to a leaf
    if type(value) is dict:
        parts = {key: cut_off(part) for key, part in value.items()}
        return parts if any(parts[key] is not part for key, part in value.items()) else value
    if isinstance(value, list | tuple):
        cut = [cut_off(part) for part in value]
        if all(new is old for new, old in zip(cut, value, strict=True)):
            return value
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    return value


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the arguments, by position or name. A tensor that does not give its shape is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    with without_overrides():
        for name, tensor in named_tensors_in({**dict(enumerate(args)), **kwargs}):
            with contextlib.suppress(Exception):  # a tensor of the user's class may raise anything
                shapes[name] = tuple((tensor.values() if tensor.is_nested else tensor).shape)
    return shapes


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device of most of the tensors; the CPU if there are none."""
    devices = Counter(tensor.device for tensor in tensors)
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")

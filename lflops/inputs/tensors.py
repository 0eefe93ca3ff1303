"""Tensors inside of arguments and results: their device, dtypes and shapes.

Structures are read from their storage: no property, `__getitem__` or `__iter__` of the user's is
run. A mapping that loads what it is asked for, or a batch that refers to its data set, costs
nothing unless the training itself reads it.
"""

import contextlib
import operator
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any
from uuid import UUID

import torch
from torch import Tensor

from lflops.torch_private.tensors import node_of, without_overrides

Storage = dict[Any, Any] | list[Any] | tuple[Any, ...]

_VALUES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type,
    Enum,
    PurePath,
    UUID,
    Fraction,
    Decimal,
    torch.Size,
)
"""Kinds of values without tensors, also where the class is written in Python."""

_UNREAD = (set, frozenset, deque, Mapping)
"""Kinds of containers that are not looked into.

They have no order, or reading them may run the user's code.
"""

# the flag of a type that a `class` statement made
_WRITTEN_IN_PYTHON = 1 << 9


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor. `isinstance` would ask a proxy for the class of its object."""
    return issubclass(type(value), Tensor)


def storage_of(value: Any) -> Storage | None:
    """The storage of a mapping, a sequence or a dataclass; `None` for all else."""
    # Mappings are dictionaries, classes derived from them, and `UserDict`. Of a dataclass these are
    # the fields that an instance has.
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if issubclass(kind, dict):
        return dict(dict.items(value))
    if issubclass(kind, list):
        return list.copy(value)
    if issubclass(kind, tuple):
        return None if kind is torch.Size else tuple.__getitem__(value, slice(None))
    if issubclass(kind, UserDict):
        data = attributes_of(value).get("data")
        return storage_of(data) if issubclass(type(data), dict) else None
    return (
        attributes_of(value)
        if any("__dataclass_fields__" in each.__dict__ for each in kind.__mro__)
        else None
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object stores: those in its `__dict__`, and those in its slots."""
    try:
        stored = object.__getattribute__(value, "__dict__")
    except AttributeError:
        stored = None
    found = stored if type(stored) is dict else {}
    slots = {
        name: slot
        for kind in type(value).__mro__
        if "__slots__" in kind.__dict__
        for name, slot in kind.__dict__.items()
        if type(slot) is MemberDescriptorType
    }
    if not slots:
        return found
    found = dict(found)
    for name, slot in slots.items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            # the slot is empty
            continue
    return found


def may_hold_tensors(value: Any) -> bool:
    """Whether an object that is neither a tensor nor has a storage may hold tensors all the same."""
    kind = type(value)
    if value is None or issubclass(kind, _VALUES):
        return False
    if kind is set or kind is frozenset or kind is deque:
        return bool(value)
    if any(issubclass(kind, each) for each in _UNREAD):
        return True
    return bool(kind.__flags__ & _WRITTEN_IN_PYTHON) and not any(
        "__call__" in each.__dict__ for each in kind.__mro__
    )


# levels of nesting that are searched; a structure that contains itself ends there
DEEPEST = 12
# values other than tensors that are searched
MOST_VALUES = 1_000


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings, dataclasses and plain objects, in order."""
    # What objects store is read, and nothing of the user's is run. After `MOST_VALUES` values that
    # are no tensors the search ends: an output that refers to a data set must not be searched for
    # all that is in it.
    return (value,) if is_tensor(value) else (tensor for _, tensor in named_tensors_in(value))


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
        self._seen: dict[
            int, Any
            # keeps them alive, so that no other object gets the id of one
        ] = {}

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
            yield from self.tensors(
                (f"{name}.{key}" if name else str(key)) if type(key) in (str, int) else name,
                part,
                depth - 1,
            )


def _parts(value: Any) -> Storage | None:
    storage = storage_of(value)
    if storage is not None:
        return storage
    kind = type(value)
    if kind is set or kind is frozenset:
        return list(value)
    return attributes_of(value) if may_hold_tensors(value) else None


def changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dictionaries with something else in place of each object of a kind.

    What has none of them is itself.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) is not dict and not isinstance(value, list | tuple):
        return value
    before = list(value.values()) if type(value) is dict else list(value)
    after = [changed(part, kind, change) for part in before]
    if all(map(operator.is_, after, before)):
        return value
    if type(value) is dict:
        return dict(zip(value, after, strict=True))
    return type(value)(*after) if hasattr(value, "_fields") else type(value)(after)


def cut_off(tensor: Tensor) -> Tensor:
    """A leaf in place of a tensor that has a graph, because backward through that graph is not the model's work."""
    if tensor.is_leaf:
        return tensor
    with torch.inference_mode(mode=False), torch.enable_grad():
        return (
            tensor.detach().requires_grad_().clone()
            # a model may write to this copy in place, unlike to a leaf
        )


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the arguments, by position or name.

    A tensor that does not give its shape is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with without_overrides():
        for name, tensor in named_tensors_in({**dict(enumerate(args)), **kwargs}):
            # a tensor of the user's class may raise anything
            with contextlib.suppress(Exception):
                shapes[name] = tuple((tensor.values() if tensor.is_nested else tensor).shape)
    return shapes


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device of most of the tensors; the CPU if there are none."""
    devices = Counter(tensor.device for tensor in tensors)
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")

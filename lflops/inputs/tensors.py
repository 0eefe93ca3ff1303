"""Find the tensors in arguments and results, with their device, dtypes and shapes.

Containers are read directly from memory, so no property, `__getitem__` or `__iter__` of a user's
class runs. Otherwise, reading could load data, for example from a mapping that loads its entries on
access. In this file, the storage of a container is a plain dict, list or tuple with the entries of
the container.
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

from lflops.profile.module_names import name_below
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
"""Classes whose instances, and instances of their subclasses, hold no tensors."""

_UNREAD = (set, frozenset, deque, Mapping)
"""Containers that `storage_of` does not read, because they have no keys or may run user code."""

_WRITTEN_IN_PYTHON = 1 << 9
"""The flag in `type.__flags__` that marks classes created by a `class` statement."""


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without reading the `__class__` of a proxy object."""
    return issubclass(type(value), Tensor)


def storage_of(value: Any) -> Storage | None:
    """Return the entries of a mapping, a sequence or a dataclass as a plain dict, list or tuple.

    Returns `None` for any other value. Mappings are dictionaries, classes derived from them, and
    `UserDict`. For a dataclass, the entries are the attributes of the instance.
    """
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
    return attributes_of(value) if is_defined_by(kind, "__dataclass_fields__") else None


def is_defined_by(kind: type, name: str) -> bool:
    """Return whether a class defines or inherits an attribute, without running user code."""
    return any(name in base.__dict__ for base in kind.__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object stores in its `__dict__` and in its slots."""
    try:
        stored = object.__getattribute__(value, "__dict__")
    except AttributeError:
        stored = None
    found = stored if type(stored) is dict else {}
    slots: dict[str, MemberDescriptorType] = {}
    for kind in type(value).__mro__:
        if "__slots__" not in kind.__dict__:
            continue
        slots |= {
            name: member
            for name, member in kind.__dict__.items()
            if type(member) is MemberDescriptorType
        }
    if not slots:
        return found
    found = dict(found)
    for name, slot in slots.items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            # The slot is empty.
            continue
    return found


def may_hold_tensors(value: Any) -> bool:
    """Return whether a value for which `storage_of` returns `None` may still hold tensors.

    Such a value is a set or another container that `storage_of` cannot read, or an object that may
    have tensors in its attributes.
    """
    kind = type(value)
    if value is None or issubclass(kind, _VALUES):
        return False
    if kind is set or kind is frozenset or kind is deque:
        return bool(value)
    if issubclass(kind, _UNREAD):
        return True
    return bool(kind.__flags__ & _WRITTEN_IN_PYTHON) and not is_defined_by(kind, "__call__")


DEEPEST = 12
"""Maximum number of nested levels to search.

This limit also ends the search of a recursive structure.
"""

MOST_VALUES = 1_000
"""Maximum number of values to search, not counting tensors."""


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Return every tensor in a value and its nested containers, dataclasses and objects, in order.

    Only stored attributes are read, and no user code runs. The search ends after `MOST_VALUES`
    values that are not tensors, because an output may refer to a whole data set.
    """
    if is_tensor(value):
        return (value,)
    return (tensor for _, tensor in named_tensors_in(value))


def nodes_of(value: Any) -> Iterator[Any]:
    """Yield the autograd nodes that computed the tensors in a value."""
    nodes = []
    with without_overrides():
        for tensor in tensors_in(value):
            node = node_of(tensor)
            if node is not None:
                nodes.append(node)
    return iter(nodes)


def named_tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a value, with its path such as `inputs.ids`.

    A container that occurs in several places is searched only once.
    """
    return _Search().tensors("", value, DEEPEST)


class _Search:
    """Searches one value for tensors, and visits at most `MOST_VALUES` other values."""

    def __init__(self) -> None:
        self._left = MOST_VALUES
        # The objects searched so far, keyed by id. They are kept alive here, so that no new object
        # gets the same id.
        self._seen: dict[int, Any] = {}

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
        for key, part in items_of(parts):
            if self._left < 0:
                return
            path = name
            if type(key) in (str, int):
                path = name_below(name, str(key))
            yield from self.tensors(path, part, depth - 1)


def items_of(storage: Storage) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a container, with their keys or positions."""
    if type(storage) is dict:
        return storage.items()
    return enumerate(storage)


def parts_of(storage: Storage) -> list[Any]:
    """Return the entries of a container without their keys or positions."""
    if type(storage) is dict:
        return list(storage.values())
    return list(storage)


def _parts(value: Any) -> Storage | None:
    storage = storage_of(value)
    if storage is not None:
        return storage
    kind = type(value)
    if kind is set or kind is frozenset:
        return list(value)
    if not may_hold_tensors(value):
        return None
    return attributes_of(value)


def changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` in which `change` is applied to each object of class `kind`.

    Nested lists, tuples and dictionaries are searched. A container without an object of this class
    is not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) is not dict and not isinstance(value, list | tuple):
        return value
    before = parts_of(value)
    after = [changed(part, kind, change) for part in before]
    if all(map(operator.is_, after, before)):
        return value
    if type(value) is dict:
        return dict(zip(value, after, strict=True))
    if hasattr(value, "_fields"):
        return type(value)(*after)
    return type(value)(after)


def cut_off(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor without its autograd graph, or the tensor itself if it is a leaf.

    Without the copy, backward would also run through the code that computed the tensor, which is
    not work of the model.
    """
    if tensor.is_leaf:
        return tensor
    with torch.inference_mode(mode=False), torch.enable_grad():
        # The model may write to this copy in place, which it could not do with a leaf.
        return tensor.detach().requires_grad_().clone()


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, which may be passed by position or by name."""
    if position < len(args):
        return args[position]
    return kwargs.get(name, default)


def named_arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in the arguments of a call, with its path.

    The path begins with the position or name of the argument.
    """
    return named_tensors_in({**dict(enumerate(args)), **kwargs})


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the arguments of a call, keyed by the path of the tensor.

    The path begins with the position or name of the argument. Tensors whose shape cannot be read
    are left out.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with without_overrides():
        for name, tensor in named_arguments(args, kwargs):
            # A tensor of a user's class may raise anything.
            with contextlib.suppress(Exception):
                values = tensor.values() if tensor.is_nested else tensor
                shapes[name] = tuple(values.shape)
    return shapes


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of most of the tensors, or the CPU if there are no tensors."""
    devices = Counter(tensor.device for tensor in tensors)
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")

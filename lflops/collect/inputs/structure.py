"""What a user's structures hold, read from their storage: no property, `__getitem__` or `__iter__` of the user's is run.

A mapping that loads what it is asked for, or a batch that refers to its data set, costs nothing unless the training itself reads it.
"""

from collections import UserDict, deque
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any
from uuid import UUID

import torch
from torch import Tensor

Storage = dict[Any, Any] | list[Any] | tuple[Any, ...]

_VALUES = (str, bytes, bytearray, int, float, complex, type, Enum, PurePath, UUID, Fraction, Decimal, torch.Size)
"""Kinds of values without tensors, also where the class is written in Python."""

_UNREAD = (set, frozenset, deque, Mapping)
"""Kinds of containers that are not looked into: they have no order, or reading them may run the user's code."""

_WRITTEN_IN_PYTHON = 1 << 9  # the flag of a type that a `class` statement made


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor. `isinstance` would ask a proxy for the class of its object."""
    return issubclass(type(value), Tensor)


def storage_of(value: Any) -> Storage | None:
    """What a mapping, a sequence or a dataclass stores; `None` for all else.

    Mappings are dictionaries, classes derived from them, and `UserDict`. Of a dataclass these are the fields that an instance has.
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
    return attributes_of(value) if any("__dataclass_fields__" in each.__dict__ for each in kind.__mro__) else None


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
        except AttributeError:  # the slot is empty
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
    return bool(kind.__flags__ & _WRITTEN_IN_PYTHON) and not any("__call__" in each.__dict__ for each in kind.__mro__)

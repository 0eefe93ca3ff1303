"""Tensors inside of whatever a model takes and returns, and what a batch's shapes say."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cut_off", "dtype_name", "nodes_of", "shapes_of", "tensors_in"]

DEEPEST = 12
"""Levels that are looked into; a structure that holds itself ends there."""


def tensors_in(value: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and plain objects, in order."""
    for _, tensor in named_tensors_in(value, "", depth):
        yield tensor


def nodes_of(value: Any) -> Iterator[Any]:
    """The autograd nodes that computed the tensors."""
    return (tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)


def named_tensors_in(value: Any, name: str, depth: int = DEEPEST, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The same, each with the path that leads to it; what many paths lead to is looked into once."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        yield name, value
    elif depth and id(value) not in seen:
        seen[id(value)] = value  # kept, so that no other object can have its address
        for key, part in _parts(value):
            yield from named_tensors_in(part, f"{name}.{key}" if name else str(key), depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
    elif type(value).__module__ != "builtins" and not isinstance(value, type) and not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def cut_off(value: Any) -> Any:
    """The same structure with tensors that have a history in place of which are leaves: to go back into it is not the model's work.

    Lists, tuples and dictionaries are looked into. What needs no change is the object that was given.
    """
    if isinstance(value, Tensor):
        return value if value.is_leaf else _copy_of_a_leaf(value)
    if type(value) is dict:
        parts = {key: cut_off(part) for key, part in value.items()}
        return parts if any(parts[key] is not part for key, part in value.items()) else value
    if isinstance(value, list | tuple):
        cut = [cut_off(part) for part in value]
        if all(new is old for new, old in zip(cut, value, strict=True)):
            return value
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    return value


def _copy_of_a_leaf(tensor: Tensor) -> Tensor:
    """Which a model may write to, as it may to the tensor itself."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        return tensor.detach().requires_grad_().clone()


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the arguments, by position or name."""
    return {name: _shape(tensor) for name, tensor in named_tensors_in({**dict(enumerate(args)), **kwargs}, "")}


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Its extents; those of the values where sequences of several lengths are packed in one tensor."""
    return tuple((tensor.values() if tensor.is_nested else tensor).shape)


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it, without torch."""
    return str(dtype).removeprefix("torch.")

"""Tensors inside of arguments and results: their device, dtypes and shapes."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cut_off", "device_of", "dtype_name", "nodes_of", "shapes_of", "tensors_in"]

DEEPEST = 12
"""Levels of nesting that are searched; a structure that contains itself ends there."""


def tensors_in(value: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and plain objects, in order."""
    for _, tensor in named_tensors_in(value, "", depth):
        yield tensor


def nodes_of(value: Any) -> Iterator[Any]:
    """The autograd nodes that computed the tensors."""
    return (tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)


def named_tensors_in(value: Any, name: str, depth: int = DEEPEST, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The same, each with its path. An object that several paths lead to is searched once."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        yield name, value
    elif depth and id(value) not in seen:
        seen[id(value)] = value  # keeps it alive, so that no other object gets its id
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
    """The same structure with leaves in place of tensors that have a graph, because backward through that graph is not the model's work.

    Lists, tuples and dictionaries are searched. An object without such tensors is returned itself.
    """
    if isinstance(value, Tensor):
        return value if value.is_leaf else _copied_leaf(value)
    if type(value) is dict:
        parts = {key: cut_off(part) for key, part in value.items()}
        return parts if any(parts[key] is not part for key, part in value.items()) else value
    if isinstance(value, list | tuple):
        cut = [cut_off(part) for part in value]
        if all(new is old for new, old in zip(cut, value, strict=True)):
            return value
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    return value


def _copied_leaf(tensor: Tensor) -> Tensor:
    """A copy that a model may write to in place, which it may not do to a leaf that requires a gradient."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        return tensor.detach().requires_grad_().clone()


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the arguments, by position or name."""
    return {name: _shape(tensor) for name, tensor in named_tensors_in({**dict(enumerate(args)), **kwargs}, "")}


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one, that of its values."""
    return tuple((tensor.values() if tensor.is_nested else tensor).shape)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device of most of the tensors; the CPU if there are none."""
    devices = Counter(tensor.device for tensor in tensors)
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")

"""Tensors inside of whatever a model takes and returns, and what a batch's shapes say."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["samples_and_tokens", "shapes_of", "tensors_in"]

DEEPEST = 12
"""Levels that are looked into; a structure that holds itself ends there."""


def tensors_in(value: Any, depth: int = DEEPEST) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and plain objects, in order."""
    for _, tensor in named_tensors_in(value, "", depth):
        yield tensor


def named_tensors_in(value: Any, name: str, depth: int = DEEPEST) -> Iterator[tuple[str, Tensor]]:
    """The same, each with the path that leads to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for key, part in _parts(value):
            yield from named_tensors_in(part, f"{name}.{key}" if name else str(key), depth - 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
    elif type(value).__module__ != "builtins" and not isinstance(value, type) and not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def shapes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the arguments, by position or name."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors_in({**dict(enumerate(args)), **kwargs}, "")}


def samples_and_tokens(args: Any, kwargs: Any) -> tuple[int | None, int | None]:
    """Samples are the dimension 0 that most tensors share; tokens the size of the first 2-d integer tensor."""
    tensors = list(tensors_in((args, kwargs)))
    first = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    samples = max(first, key=first.count) if first else None
    whole = (tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex())
    tokens = next((tensor.numel() for tensor in whole), None)
    return samples, tokens

"""The batch: how many samples and tokens it has, and a batch that is made from a shape."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lflops.collect.inputs.arguments import describe, is_whole
from lflops.collect.inputs.tensors import device_of
from lflops.collect.torch_private.tensors import is_integer, without_overrides
from lflops.errors import CountError

Units = Mapping[str, int] | Callable[..., Mapping[str, int]]
"""`{"samples": n, "tokens": n}`, one of them or both, or a function that returns it."""


def units_of(caller: str, units: Any, args: Any, kwargs: Any) -> dict[str, int]:
    """The user's sizes of a batch, as fields of `Run`; empty if none are given."""
    if units is None:
        return {}
    try:
        given = units(*args, **kwargs) if callable(units) else units
    except Exception as error:
        raise CountError(f"{caller}: units failed on the batch: {type(error).__name__}: {error}") from error
    if not isinstance(given, Mapping) or not given.keys() <= {"samples", "tokens"} or not all(map(is_whole, given.values())):
        raise CountError(f"{caller}: units gave {describe(given)}: give {{'samples': n, 'tokens': n}} or a function that returns it")
    return {f"{name}_per_step": int(number) for name, number in given.items()}


def samples_and_tokens(tensors: Iterable[Tensor]) -> tuple[int | None, int | None]:
    """Samples: the size of dimension 0 that most tensors share. Tokens: the size of the first 2-d integer tensor.

    A tensor that does not give its shape is passed over.
    """
    first: list[int] = []
    tokens: int | None = None
    with without_overrides():
        for tensor in tensors:
            with contextlib.suppress(Exception):  # a tensor of the user's class may raise anything
                dimensions = Tensor.dim(tensor)
                first += [int(Tensor.size(tensor, 0))] * bool(dimensions)
                if tokens is None and dimensions == 2 and is_integer(tensor):
                    tokens = int(Tensor.numel(tensor))
    return max(first, key=first.count) if first else None, tokens


def tensor_of_shape(caller: str, model: nn.Module, shape: Any) -> Tensor:
    """A tensor of random numbers from 0 to 1, on the model's device, in the dtype of its first floating parameter, by its own generator."""
    if not isinstance(shape, tuple | list) or not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CountError(f"{caller}: input_shape={describe(shape)}: give the sizes of one tensor, as (8, 3, 224, 224)")
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.get_default_dtype())
    device = device_of(tensors)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=device).to(dtype)

"""An input that only its shape is known of."""

from typing import Any

import torch
from torch import Tensor, nn

from lflops.collect.inputs.arguments import describe
from lflops.collect.inputs.run_info import device_of
from lflops.errors import CountError

__all__ = ["tensor_of_shape"]


def tensor_of_shape(asker: str, model: nn.Module, shape: Any) -> Tensor:
    """A tensor where the model is, of the dtype of its first floating parameter, with numbers from 0 to 1 in it.

    The random numbers are its own: those of the caller go on as if nothing had been drawn.

    Raises:
        CountError: It is no shape.
    """
    if not isinstance(shape, tuple | list) or not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CountError(f"{asker}: input_shape={describe(shape)}: give the sizes of one tensor, as (8, 3, 224, 224)")
    held = [*model.parameters(), *model.buffers()]
    dtype = next((each.dtype for each in held if each.is_floating_point()), torch.get_default_dtype())
    device = device_of(held)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=device).to(dtype)

"""`largest_batch`: estimates of a growing batch, until one does not fit."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lflops.collect.estimate.optimizer_step import MakesOptimizer
from lflops.collect.estimate.runner import Estimate, Model, Subject, batch_of, built
from lflops.collect.inputs.arguments import check_arguments, check_module, describe
from lflops.errors import CountError
from lflops.hardware.chips import Hardware

__all__ = ["largest_batch"]

MOST = 1 << 30
"""Samples; a step that still fits does not depend on them."""


def largest_batch(
    model: Model,
    make_args: Callable[[int], Any],
    *,
    memory_bytes: float,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | None = None,
    hardware: Hardware | str | None = None,
    round_to: int = 1,
) -> int:
    """The most samples whose step fits into so many bytes, as estimates say it; nothing is allocated.

    Kernels' workspaces and the allocator's own loss are in no estimate: leave some room for them. The peak is taken to grow with the batch.

    Args:
        model: A module, or a function that builds one, as in `estimate`.
        make_args: From a number of samples to the model's arguments: a tuple, a lone tensor, or a mapping of keyword arguments.
        memory_bytes: What there is, in bytes.
        loss: Output to a scalar. With it, or with an optimizer, the step is one of training; without either, a forward pass.
        optimizer: Makes one from a list of parameters, as in `estimate`.
        hardware: The chip that it is for, as in `estimate`; of its memory `memory_bytes` says how much there is.
        round_to: Bytes that each tensor's memory is rounded up to a multiple of, as in `estimate`.

    Returns:
        0 if not even one sample fits.

    Raises:
        CountError: An argument is wrong, or some code needs the value of a tensor; or any batch fits.
        HardwareError: The chip is not known.
    """
    _check(make_args, memory_bytes)
    training = loss is not None or optimizer is not None
    if isinstance(model, nn.Module):
        check_arguments("largest_batch", model, (), None, loss, backward=training)
    elif isinstance(model, type) or not callable(model):
        check_module("largest_batch", model)
    asked = Estimate(asker="largest_batch", backward=training, optimizer=optimizer, hardware=hardware, round_to=round_to)

    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []

    def fits(samples: int) -> bool:
        memory = asked.of(lambda: Subject(built(model), *batch_of("largest_batch", make_args(samples)), loss), held=held).memory
        return memory is not None and memory.fits(memory_bytes)

    return _largest(fits)


def _check(make_args: Any, memory_bytes: Any) -> None:
    if not callable(make_args):
        raise CountError(f"largest_batch: make_args={describe(make_args)}: give a function from a number of samples to the arguments")
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int | float) or not memory_bytes > 0:
        raise CountError(f"largest_batch: memory_bytes={describe(memory_bytes)}: give a positive number of bytes")


def _largest(fits: Callable[[int], bool]) -> int:
    """The last number that fits: doubled until one does not, then halved in between."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MOST:
            raise CountError(f"largest_batch: {low} samples fit, and more: does make_args make a batch of the size that it is given?")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

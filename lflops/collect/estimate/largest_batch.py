"""`largest_batch`: estimates of a few batches, by the line that their peaks are on."""

from collections.abc import Callable
from functools import cache, partial
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

LARGEST = 1 << 62
"""Bytes that no memory has."""

FURTHER = 64
"""Times as many samples are tried next while the peak stays what it is."""


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
    """The most samples whose step fits into so many bytes, as a handful of estimates says it; nothing is allocated.

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
        check_module("largest_batch", model, may_build=True)
    asked = Estimate(asker="largest_batch", backward=training, optimizer=optimizer, hardware=hardware, round_to=round_to)
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    once = cache(partial(built, model))

    def subject(samples: int) -> Subject:
        return Subject(once(), *batch_of("largest_batch", make_args(samples)), loss)

    with asked.begun(held) as run:

        def peak(samples: int) -> int:
            memory = run(partial(subject, samples)).memory
            return LARGEST if memory is None else memory.peak_bytes

        return _largest(peak, int(min(memory_bytes, LARGEST - 1)))


def _check(make_args: Any, memory_bytes: Any) -> None:
    if not callable(make_args):
        raise CountError(f"largest_batch: make_args={describe(make_args)}: give a function from a number of samples to the arguments")
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int | float) or not memory_bytes > 0:
        raise CountError(f"largest_batch: memory_bytes={describe(memory_bytes)}: give a positive number of bytes")


def _largest(peak: Callable[[int], int], memory_bytes: int) -> int:
    """The last number of samples whose peak fits.

    A peak is nearly a line: the next number tried is where the line through the last two reaches the memory. Every third is the middle of
    what is left, so that no peak, however bent, takes long.
    """
    low, high = 0, MOST + 1  # the first fits, the second does not, or is more than a batch has
    points: list[tuple[int, int]] = []
    samples = 1
    while high - low > 1:
        points.append((samples, peak(samples)))
        if points[-1][1] <= memory_bytes:
            low = samples
        else:
            high = samples
        samples = min(max(_next(points, memory_bytes, low, high), low + 1), high - 1)
    if low == MOST:
        raise CountError(f"largest_batch: {low} samples fit, and more: does make_args make a batch of the size that it is given?")
    return low


def _next(points: list[tuple[int, int]], memory_bytes: int, low: int, high: int) -> int:
    """The number to try after those that were tried, each with its peak."""
    if len(points) == 1:
        return 2
    (before, less), (last, more) = sorted(points[-2:])
    unbounded = high > MOST
    if more == less or (not unbounded and len(points) % 3 == 0):
        return FURTHER * low if unbounded else (low + high) // 2
    return before + (memory_bytes - less) * (last - before) // (more - less)

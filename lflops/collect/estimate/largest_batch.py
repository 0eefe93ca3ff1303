"""`largest_batch`: the largest batch that fits, from estimates of a few batches and linear interpolation."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from lflops.collect.estimate.estimate import Estimator, Model, Subject, batch_of, built, checked_model
from lflops.collect.estimate.optimizer_step import MakesOptimizer
from lflops.collect.inputs.arguments import check_memory, describe
from lflops.errors import CountError
from lflops.hardware.chips import Hardware

MAX_BATCH = 1 << 30  # the largest number of samples that is tried. If it fits, the peak does not depend on the batch.
LARGEST = 1 << 62  # a number of bytes beyond any memory
FURTHER = 64  # the factor of the next try while the peak does not change


def largest_batch(
    model: Model,
    make_args: Callable[[int], Any],
    *,
    memory_bytes: float,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | str | None = None,
    hardware: Hardware | str | None = None,
    round_to: int = 1,
) -> int:
    """The most samples whose step fits into the given memory, from a handful of estimates. Nothing is allocated.

    No estimate includes the workspaces of kernels or the allocator's fragmentation, so leave some room for them. The peak is assumed to
    grow with the batch.

    Args:
        model: A module, or a function that builds one, as in `estimate`.
        make_args: From a number of samples to the model's arguments: a tuple, a lone tensor, or a mapping of keyword arguments.
        memory_bytes: The available memory in bytes.
        loss: From the output to a scalar. With it or an optimizer, a training step is estimated; without both, a forward pass.
        optimizer: A name, or a function from a list of parameters, as in `estimate`.
        hardware: The chip, as in `estimate`. Its memory is `memory_bytes`, not the figure of the table.
        round_to: The size of each tensor is rounded up to a multiple of so many bytes, as in `estimate`.

    Returns:
        0 if not even one sample fits.

    Raises:
        CountError: An argument is wrong, some code needs the value of a tensor, or any batch fits.
        HardwareError: The chip is unknown.
    """
    if not callable(make_args):
        raise CountError(f"largest_batch: make_args={describe(make_args)}: give a function from a number of samples to the arguments")
    check_memory("largest_batch", memory_bytes)
    training = loss is not None or optimizer is not None
    held = checked_model("largest_batch", model, (), None, loss, backward=training)
    estimator = Estimator(caller="largest_batch", backward=training, optimizer=optimizer, hardware=hardware, round_to=round_to)
    once = cache(partial(built, model))

    def subject(samples: int) -> Subject:
        return Subject(once(), *batch_of("largest_batch", make_args(samples)), loss)

    with estimator.started(held) as run:

        def peak(samples: int) -> int:
            memory = run(partial(subject, samples)).memory
            return LARGEST if memory is None else memory.peak_bytes

        return _largest(peak, int(min(memory_bytes, LARGEST - 1)))


def _largest(peak: Callable[[int], int], memory_bytes: int) -> int:
    """The largest number of samples whose peak fits.

    The peak is nearly linear in the samples. So the next try is where the line through the last two points reaches the memory. Every third
    try is the middle of the remaining interval, which bounds the number of tries for any curve.
    """
    low, high = 0, MAX_BATCH + 1  # `low` fits; `high` does not, or is out of range
    points: list[tuple[int, int]] = []
    samples = 1
    while high - low > 1:
        points.append((samples, peak(samples)))
        if points[-1][1] <= memory_bytes:
            low = samples
        else:
            high = samples
        samples = min(max(_next(points, memory_bytes, low, high), low + 1), high - 1)
    if low == MAX_BATCH:
        raise CountError(f"largest_batch: {low} samples fit, and more: does make_args make a batch of the size that it is given?")
    return low


def _next(points: list[tuple[int, int]], memory_bytes: int, low: int, high: int) -> int:
    if len(points) == 1:
        return 2
    (before, less), (last, more) = sorted(points[-2:])
    unbounded = high > MAX_BATCH
    if more == less or (not unbounded and len(points) % 3 == 0):
        return FURTHER * low if unbounded else (low + high) // 2
    return before + (memory_bytes - less) * (last - before) // (more - less)

"""`largest_batch`: the largest batch that fits, from estimates of a few batches and linear interpolation."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import prod
from typing import Any

from torch import Tensor

from lflops.errors import CountError
from lflops.estimation.estimate import Estimator, Model, Subject, batch_of, built, checked_model
from lflops.estimation.mesh import checked_mesh
from lflops.estimation.optimizer_step import MakesOptimizer
from lflops.hardware.chips import Hardware, named
from lflops.inputs.arguments import check_memory, describe
from lflops.memory.peak import TIGHT, MemoryFit, room, room_for
from lflops.profile.profile import Profile

MAX_BATCH = (
    1 << 30
    # the largest number of samples that is tried. If it fits, the peak does not depend on the batch.
)
# a number of bytes beyond any memory
LARGEST = 1 << 62
# the factor of the next try while the peak does not change
FURTHER = 64


def largest_batch(
    model: Model,
    make_args: Callable[[int], Any],
    *,
    memory_bytes: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | str | None = None,
    hardware: Hardware | str | None = None,
    mesh: Mapping[str, int] | None = None,
    round_to: int = 1,
) -> int:
    """The most samples whose step fits, from a handful of estimates. Nothing is allocated.

    The peak is assumed to grow with the batch.

    Args:
        model: A module, or a function that builds one, as in `estimate`.
        make_args: From a number of samples to the model's arguments: a tuple, a lone tensor, or a
            mapping of keyword arguments.
        memory_bytes: The available memory in bytes. No estimate includes the workspaces of kernels
            or the allocator's fragmentation, so leave some room for them. `None` is the memory of
            `hardware`: the step `fits` there, with room for all of these.
        loss: From the output to a scalar. With it or an optimizer, a training step is estimated;
            without both, a forward pass.
        optimizer: A name, or a function from a list of parameters, as in `estimate`.
        hardware: The chip, as in `estimate`.
        mesh: Ranks by dimension, as in `estimate`; of a built model only. The samples are those of
            one rank.
        round_to: The size of each tensor is rounded up to a multiple of so many bytes, as in
            `estimate`.

    Returns:
        0 if not even one sample fits.

    Raises:
        CountError: An argument is wrong, some code needs the value of a tensor, or any batch fits.
        HardwareError: The chip is unknown.
    """
    caller = "largest_batch"
    if not callable(make_args):
        raise CountError(
            f"{caller}: make_args={describe(make_args)}: give a function from a number of samples to the arguments"
        )
    training = loss is not None or optimizer is not None
    held = checked_model(caller, model, (), None, loss, backward=training, mesh=mesh)
    ranks = checked_mesh(caller, mesh)
    estimator = Estimator(
        caller=caller,
        backward=training,
        optimizer=optimizer,
        hardware=hardware,
        mesh=ranks,
        round_to=round_to,
    )
    make = (
        partial(built, model) if ranks else cache(partial(built, model))
        # what is sharded is built for each estimate
    )

    def subject(samples: int) -> Subject:
        return Subject(make(), *batch_of(caller, make_args(samples)), loss)

    return search_batch(estimator, subject, memory_bytes, held=held)[0]


def search_batch(
    estimator: Estimator,
    make: Callable[[int], Subject],
    memory_bytes: float | None,
    *,
    held: Iterable[Tensor] = (),
) -> tuple[int, Profile]:
    """The most samples of the step that an estimator runs, and its profile; if none fits, that of one.

    `held` is as in `Estimator.run`.
    """
    profiles: dict[int, Profile] = {}
    if memory_bytes is None:
        limit = int(empty_room(estimator).usable_bytes * (1 - TIGHT))
    else:
        check_memory(estimator.caller, memory_bytes)
        limit = int(min(memory_bytes, LARGEST - 1))
    with estimator.started(held) as run:

        def needed(samples: int) -> int:
            profiles[samples] = profile = run(partial(make, samples))
            if profile.memory is None:
                return LARGEST
            space = None if memory_bytes is not None else room_for(profile, profile.run.hardware)
            return profile.memory.peak_bytes if space is None else space.needed_bytes

        samples = _largest(estimator.caller, needed, limit)
    return samples, profiles[max(samples, 1)]


def empty_room(estimator: Estimator) -> MemoryFit:
    """What an estimator's chip has, and needs without any tensor.

    Without a chip whose memory is known, a `CountError`.
    """
    chip = named(estimator.hardware) if isinstance(estimator.hardware, str) else estimator.hardware
    empty = room(0, chip, ranks=prod(estimator.mesh.values()))
    if empty is None:
        raise CountError(
            f"{estimator.caller}: give memory_bytes, or the hardware whose memory is known"
        )
    return empty


def _largest(caller: str, needed: Callable[[int], int], memory_bytes: int) -> int:
    """The largest number of samples whose peak fits."""
    # The peak is nearly linear in the samples. So the next try is where the line through the last
    # two points reaches the memory. Every third try is the middle of the remaining interval, which
    # bounds the number of tries for any curve. `low` fits; `high` does not, or is out of range
    low, high = 0, MAX_BATCH + 1
    points: list[tuple[int, int]] = []
    samples = 1
    while high - low > 1:
        points.append((samples, needed(samples)))
        if points[-1][1] <= memory_bytes:
            low = samples
        else:
            high = samples
        samples = min(max(_next(points, memory_bytes, low, high), low + 1), high - 1)
    if low == MAX_BATCH:
        raise CountError(
            f"{caller}: {low} samples fit, and more: does make_args make a batch of the size that it is given?"
        )
    return low


def _next(points: list[tuple[int, int]], memory_bytes: int, low: int, high: int) -> int:
    if len(points) == 1:
        return 2
    (before, less), (last, more) = sorted(points[-2:])
    unbounded = high > MAX_BATCH
    if more == less or (not unbounded and len(points) % 3 == 0):
        return FURTHER * low if unbounded else (low + high) // 2
    return before + (memory_bytes - less) * (last - before) // (more - less)

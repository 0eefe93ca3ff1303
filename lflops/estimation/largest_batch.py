"""`largest_batch`: find the largest batch that fits into memory, from a few estimates."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import prod
from typing import Any

from torch import Tensor, nn

from lflops.errors import CountError
from lflops.estimation.estimate import Estimator, Model, Subject, batch_of, built, checked_model
from lflops.estimation.mesh import checked_mesh
from lflops.estimation.optimizer_step import MakesOptimizer
from lflops.hardware.chips import Hardware, chip_named
from lflops.inputs.arguments import check_memory, describe
from lflops.memory.peak import TIGHT, MemoryFit, memory_fit, memory_fit_of
from lflops.profile.profile import Profile

# The largest batch size that is tried. If even this batch fits, the peak does not depend on the
# batch size.
MAX_BATCH = 1 << 30
# More bytes than any memory has.
LARGEST = 1 << 62
# Factor between a batch size and the next one to try, as long as the peak does not change.
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
    """Find the largest batch that fits into memory, from a few estimates.

    No device memory is allocated. A larger batch is assumed to need at least as much memory as a
    smaller one.

    Args:
        model: A module, or a function that builds a module, as in `estimate`.
        make_args: Function that takes a number of samples and returns the model's arguments: a
            tuple, a single tensor, or a mapping of keyword arguments.
        memory_bytes: The memory in bytes that tensors may use. Workspaces of kernels and
            fragmentation of the allocator need additional memory, so pass less than the memory of
            your device. By default, the step must fit into the memory of `hardware` together with
            workspaces and fragmentation, and at least 5 % of the usable memory must stay free.
        loss: Function that takes the output and returns a scalar. A training step is estimated if
            there is a loss or an optimizer; otherwise, a forward pass is estimated.
        optimizer: Name of an optimizer, or a function that takes a list of parameters and returns
            an optimizer, as in `estimate`.
        hardware: The chip, as in `estimate`.
        mesh: Number of ranks in each dimension, as in `estimate`. With a mesh, `model` must be a
            function that builds the model, and the result is the batch of one rank.
        round_to: Round the size of each tensor up to a multiple of this number of bytes, as in
            `estimate`.

    Returns:
        The number of samples; 0 if one sample does not fit.

    Raises:
        CountError: An argument is wrong, some code needs the value of a tensor, or every batch
            fits.
        HardwareError: The chip is unknown.
    """
    caller = "largest_batch"
    if not callable(make_args):
        raise CountError(
            f"{caller}: make_args={describe(make_args)}: "
            "pass a function that takes the number of samples and returns the arguments"
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
    make: Callable[[], nn.Module] = partial(built, model)
    if not ranks:
        # Sharding changes the model, so a model is only reused if it is not sharded.
        make = cache(make)

    def subject(samples: int) -> Subject:
        args, kwargs = batch_of(caller, make_args(samples))
        return Subject(make(), args, kwargs, loss)

    samples, _ = search_batch(estimator, subject, memory_bytes, held=held)
    return samples


def search_batch(
    estimator: Estimator,
    make: Callable[[int], Subject],
    memory_bytes: float | None,
    *,
    held: Iterable[Tensor] = (),
) -> tuple[int, Profile]:
    """Return the largest number of samples that fits, and the profile of a step with this batch.

    If not even one sample fits, the number is 0 and the profile is for one sample.

    Args:
        estimator: Runs the estimates.
        make: Function that takes a number of samples and returns a model with its arguments.
        memory_bytes: The limit in bytes; `None` for the memory of the estimator's chip.
        held: Real tensors of the model and its arguments, as in `Estimator.run`.
    """
    profiles: dict[int, Profile] = {}
    if memory_bytes is None:
        limit = int(empty_room(estimator).usable_bytes * (1 - TIGHT))
    else:
        check_memory(estimator.caller, memory_bytes)
        limit = int(min(memory_bytes, LARGEST - 1))
    with estimator.started(held) as run:

        def needed(samples: int) -> int:
            profile = run(partial(make, samples))
            profiles[samples] = profile
            if profile.memory is None:
                return LARGEST
            if memory_bytes is None:
                fit = memory_fit_of(profile, profile.run.hardware)
                if fit is not None:
                    return fit.needed_bytes
            return profile.memory.peak_bytes

        samples = _largest(estimator.caller, needed, limit)
    return samples, profiles[max(samples, 1)]


def empty_room(estimator: Estimator) -> MemoryFit:
    """Return the memory of the estimator's chip, and the part that a step without tensors needs.

    The driver and libraries use this part. Raises `CountError` if the estimator has no chip, or if
    the memory of the chip is unknown.
    """
    chip = chip_named(estimator.hardware)
    empty = memory_fit(0, chip, ranks=prod(estimator.mesh.values()))
    if empty is None:
        raise CountError(
            f"{estimator.caller}: the memory limit is unknown: pass memory_bytes=, or hardware= "
            "with a chip whose memory is known"
        )
    return empty


def _largest(caller: str, needed: Callable[[int], int], memory_bytes: int) -> int:
    """Return the largest number of samples whose peak memory is within a limit.

    The peak is nearly linear in the number of samples, so the next number to try is where the line
    through the last two points reaches the limit. Every third try is instead the middle of the
    remaining interval, so that there are few tries even if the peak is not linear.

    Args:
        caller: Name of the public function; error messages begin with it.
        needed: Function that takes a number of samples and returns the peak in bytes.
        memory_bytes: The limit in bytes.
    """
    # `low` samples fit. `high` samples do not fit, or are more than `MAX_BATCH`.
    low = 0
    high = MAX_BATCH + 1
    points: list[tuple[int, int]] = []
    samples = 1
    while high - low > 1:
        peak = needed(samples)
        points.append((samples, peak))
        if peak <= memory_bytes:
            low = samples
        else:
            high = samples
        samples = min(max(_next(points, memory_bytes, low, high), low + 1), high - 1)
    if low == MAX_BATCH:
        raise CountError(
            f"{caller}: even {low} samples fit, so no largest batch was found: check that "
            "the batch has the requested number of samples"
        )
    return low


def _next(points: list[tuple[int, int]], memory_bytes: int, low: int, high: int) -> int:
    if len(points) == 1:
        return 2
    (fewer_samples, lower_peak), (more_samples, higher_peak) = sorted(points[-2:])
    is_unbounded = high > MAX_BATCH
    is_flat = higher_peak == lower_peak
    if is_unbounded and is_flat:
        return FURTHER * low
    if is_flat or (not is_unbounded and len(points) % 3 == 0):
        return (low + high) // 2
    bytes_left = memory_bytes - lower_peak
    return fewer_samples + bytes_left * (more_samples - fewer_samples) // (higher_peak - lower_peak)

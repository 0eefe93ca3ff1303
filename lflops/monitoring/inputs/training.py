"""What a session knows of the training that it watches.

Two values that each driver reads off its own loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lflops.phase_log import PhaseLog

# the names of stages, as our files have them
STAGES = ("train", "validate", "test", "predict")


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A run of a training loop, of any driver."""

    # the object that runs it. It is a key for what is kept as long as the loop lives, and is asked
    # nothing
    loop: object
    # the module whose names the profile has
    model: nn.Module
    # the module that holds all parameters; another one where a wrapper keeps some outside of the
    # model
    root: nn.Module
    # where the model runs
    device: torch.device
    # of this process, among all
    rank: int = 0
    # the number of processes
    world_size: int = 1
    # the machine of this process
    node: str = "0"
    # whether this process writes files and logs
    is_main: bool = True
    # how the training is distributed, by its name
    strategy: str | None = None
    # the device mesh, where there is one
    mesh: Any = None
    # what divides batches over ranks, where the loop says so
    sampler: Any = None
    # as the loop names it
    precision: str | None = None
    # whether the loop runs a compiled function in place of `model`
    is_compiled: bool = False
    scales_gradients: bool = (
        # whether gradients are scaled, so that an optimizer may skip a step
        False
    )
    looks_for_unused: bool = (
        # whether DistributedDataParallel looks for parameters without gradients in each step
        False
    )
    # objects with `log_metrics(values, step=...)`
    loggers: Sequence[Any] = ()
    # steps from one point of the curves to the next; 0 for no curves
    log_every: int = 0
    logged_step: Callable[
        [], int
        # returns the step on the loggers' x-axis, which goes up by one with each step
    ]
    # logs a message, on the main process
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stage of it: training, or one of those in which nothing is learned."""

    # one of `STAGES`
    name: str
    # whether batches are followed by backward and an optimizer
    learns: bool
    # Tells a listener of the stage's phases, until what it returns is called. The run gives a
    # driver's its guard.
    listen: Callable[..., Callable[[], None]]
    # the log of the loop, which has the phases of all stages
    log: PhaseLog
    # returns how many batches gradients are accumulated over, now
    accumulation: Callable[[], int]
    # returns whether the batch that ends now ends a step
    ends_step: Callable[[], bool]
    # how many batches are to come; infinity where that is not known
    batches_left: float
    # returns the number of samples that the data loader puts into a batch, or `None` if unknown
    loader_size: Callable[[], int | None] = lambda: None
    # the phases without which a step has learned nothing
    updates: frozenset[str] = frozenset()
    fetches_itself: bool = (
        # whether the step takes an iterator, and the batch at hand is the one before
        False
    )

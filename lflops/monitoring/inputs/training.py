"""What a session knows of the training that it watches: two values that each driver reads off its own loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STAGES = ("train", "validate", "test", "predict")  # the names of stages, as our files have them


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A run of a training loop, of any driver."""

    loop: object  # the object that runs it. It is a key for what is kept as long as the loop lives, and is asked nothing
    model: nn.Module  # the module whose names the profile has
    root: nn.Module  # the module that holds all parameters; another one where a wrapper keeps some outside of the model
    device: torch.device  # where the model runs
    rank: int = 0  # of this process, among all
    world_size: int = 1  # the number of processes
    node: str = "0"  # the machine of this process
    is_main: bool = True  # whether this process writes files and logs
    strategy: str | None = None  # how the training is distributed, by its name
    mesh: Any = None  # the device mesh, where there is one
    sampler: Any = None  # what divides batches over ranks, where the loop says so
    precision: str | None = None  # as the loop names it
    is_compiled: bool = False  # whether the loop runs a compiled function in place of `model`
    scales_gradients: bool = False  # whether gradients are scaled, so that an optimizer may skip a step
    looks_for_unused: bool = False  # whether DistributedDataParallel looks for parameters without gradients in each step
    loggers: Sequence[Any] = ()  # objects with `log_metrics(values, step=...)`
    log_every: int = 0  # steps from one point of the curves to the next; 0 for no curves
    logged_step: Callable[[], int]  # returns the step on the loggers' x-axis, which goes up by one with each step
    say: Callable[[str], None]  # logs a message, on the main process


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stage of it: training, or one of those in which nothing is learned."""

    name: str  # one of `STAGES`
    learns: bool  # whether batches are followed by backward and an optimizer
    # Tells a listener of the stage's phases, until what it returns is called. The run gives a driver's its guard.
    listen: Callable[..., Callable[[], None]]
    accumulation: Callable[[], int]  # returns how many batches gradients are accumulated over, now
    ends_step: Callable[[], bool]  # returns whether the batch that ends now ends a step
    batches_left: float  # how many batches are to come; infinity where that is not known
    updates: frozenset[str] = frozenset()  # the phases without which a step has learned nothing
    fetches_itself: bool = False  # whether the step takes an iterator, and the batch at hand is the one before

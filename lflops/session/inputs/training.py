"""What a session knows of the training that it watches: two values that each driver reads off its own loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["STAGES", "Stage", "Training"]

STAGES = ("train", "validate", "test", "predict")
"""The names of stages, as our files have them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A run of a training loop, of any driver.

    Attributes:
        loop: The object that runs it. It is a key for what is kept as long as the loop lives, and is asked nothing.
        model: The module whose names the profile has.
        root: The module that holds all parameters; another one where a wrapper keeps some outside of the model.
        device: Where the model runs.
        rank: Of this process, among all.
        world_size: The number of processes.
        node: The machine of this process.
        is_main: Whether this process writes files and logs.
        strategy: How the training is distributed, by its name.
        mesh: The device mesh, where there is one.
        sampler: What divides batches over ranks, where the loop says so.
        precision: As the loop names it.
        is_compiled: Whether the loop runs a compiled function in place of `model`.
        scales_gradients: Whether gradients are scaled, so that an optimizer may skip a step.
        loggers: Objects with `log_metrics(values, step=...)`.
        log_every: Steps from one point of the curves to the next; 0 for no curves.
        logged_step: Returns the step on the loggers' x-axis, which goes up by one with each step.
        say: Logs a message, on the main process.
    """

    loop: object
    model: nn.Module
    root: nn.Module
    device: torch.device
    rank: int = 0
    world_size: int = 1
    node: str = "0"
    is_main: bool = True
    strategy: str | None = None
    mesh: Any = None
    sampler: Any = None
    precision: str | None = None
    is_compiled: bool = False
    scales_gradients: bool = False
    loggers: Sequence[Any] = ()
    log_every: int = 0
    logged_step: Callable[[], int]
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stage of it: training, or one of those in which nothing is learned.

    Attributes:
        name: One of `STAGES`.
        learns: Whether batches are followed by backward and an optimizer.
        listen: Tells a listener of the stage's phases, until what it returns is called. The run gives a driver's its guard.
        accumulation: Returns how many batches gradients are accumulated over, now.
        ends_step: Returns whether the batch that ends now ends a step.
        batches_left: How many batches are to come; infinity where that is not known.
        updates: The phases without which a step has learned nothing.
        fetches_itself: Whether the step takes an iterator, and the batch at hand is the one before.
    """

    name: str
    learns: bool
    listen: Callable[..., Callable[[], None]]
    accumulation: Callable[[], int]
    ends_step: Callable[[], bool]
    batches_left: float
    updates: frozenset[str] = frozenset()
    fetches_itself: bool = False

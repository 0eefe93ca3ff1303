"""The description of a training run and of its stages.

Each integration creates a `Training` and its `Stage`s from its loop, and a session receives them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lflops.phase_log import PhaseLog

STAGES = ("train", "validate", "test", "predict")
"""The names of the stages, as they appear in files."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """Describes a run of a training loop.

    Attributes:
        loop: The object that runs the loop. It is used only as a key for data that must be kept as
            long as this object exists.
        model: The model. The profile uses the names that modules have in it.
        root: The module that holds all parameters. It differs from `model` if a wrapper keeps some
            parameters outside the model.
        device: The device of the model.
        rank: The rank of this process.
        world_size: The number of processes.
        node: The number of the machine on which this process runs, as text.
        is_main: Whether this process writes files and logs.
        monitor: The name of the monitor that the user has created, such as `lflops.monitor`.
        strategy: The name of the strategy that distributes the run.
        mesh: The device mesh, if there is one.
        sampler: The arguments `num_replicas` and `rank` of the sampler, if the loop has a sampler
            that divides batches over ranks.
        precision: The precision, as named by the loop; `None` if the loop does not name it.
        is_compiled: Whether the loop runs a compiled function instead of `model`.
        scales_gradients: Whether a gradient scaler is used, which may make an optimizer skip a
            step.
        looks_for_unused: Whether DistributedDataParallel searches for parameters without gradients
            in each step.
        loggers: Objects with `log_metrics(values, step=...)`.
        log_every: Number of steps between two points of the loggers' curves; 0 for no curves.
        logged_step: Returns the step on the loggers' x-axis, which increases by one with each step.
        knows_step: Returns whether `logged_step` continues from its last value when another process
            resumes the run from a checkpoint. In a plain loop, `logged_step` starts at 0 again.
        log: Logs a message on the main process.
    """

    loop: object
    model: nn.Module
    root: nn.Module
    device: torch.device
    rank: int = 0
    world_size: int = 1
    node: str = "0"
    is_main: bool = True
    monitor: str | None = None
    strategy: str | None = None
    mesh: Any = None
    sampler: Any = None
    precision: str | None = None
    is_compiled: bool = False
    scales_gradients: bool = False
    looks_for_unused: bool = False
    loggers: Sequence[Any] = ()
    log_every: int = 0
    logged_step: Callable[[], int]
    knows_step: Callable[[], bool]
    log: Callable[[str], None]


class HookTimes(Protocol):
    """Measures the time of a loop's hooks, such as methods of callbacks, from `start` to `stop`.

    Hooks that run within a phase, such as forward, are left out.

    Attributes:
        seconds: Total seconds of each hook so far. The key has the names of its class and method.
    """

    seconds: Mapping[str, float]

    def start(self) -> None:
        """Begin to time hooks. Does nothing if they are already being timed."""

    def stop(self) -> None:
        """Stop timing hooks. Can be called repeatedly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """Describes a stage of a training run, such as training or validation.

    Attributes:
        name: One of `STAGES`.
        learns: Whether the stage runs backward and an optimizer after its batches.
        log: The phase log of the loop, which has the phases of all stages.
        listen: Function that registers a listener. From then on, the listener is called when a
            phase of the stage begins or ends. Returns a function that removes the listener.
        accumulation: Returns the number of batches over which gradients are currently accumulated.
        ends_step: Returns whether the batch that is ending completes a step.
        batches_left: The number of batches that are still to come; infinity if it is unknown.
        loader_size: Returns the number of samples that the data loader puts into a batch, or `None`
            if unknown.
        updates: The phases that a step must have if it updates the model, such as `optimizer`. A
            step in which any of them is missing did not update the model.
        fetches_itself: Whether the step receives an iterator and fetches its batches from the
            iterator. In this case, the batch is not known when a step begins, because hooks receive
            the batch of the previous step.
        follows_update: Whether a step begins right after the optimizer's step and contains what the
            loop does then, such as statistics of the weights.
        hook_times: Times the hooks of the loop; `None` if the loop does not report its hooks.
    """

    name: str
    learns: bool
    log: PhaseLog
    listen: Callable[..., Callable[[], None]]
    accumulation: Callable[[], int]
    ends_step: Callable[[], bool]
    batches_left: float
    loader_size: Callable[[], int | None] = lambda: None
    updates: frozenset[str] = frozenset()
    fetches_itself: bool = False
    follows_update: bool = False
    hook_times: HookTimes | None = None

"""Describe structures of models and loops with planted times, and profile them.

A case builds a model or a training loop. Its modules advance a clock by chosen seconds, and nothing
else does. So the expected time of every module is a sum that is written next to the case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import lflops
from lflops.monitoring.schedule import Schedule
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES
from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Part

Seconds = Mapping[str, Mapping[str, float]]
"""The self seconds of the modules in each phase, by the names of the phase and the module."""

HOOKED_STEPS = 2
STEPS = 8
"""Number of steps of a loop: one that counts, two with hooks, and five that are not profiled."""


def batch() -> Tensor:
    """Return the batch of most cases."""
    return torch.ones(2, 4)


def summed(output: Tensor) -> Tensor:
    """Return the loss of most cases, which takes no time."""
    return output.sum()


@dataclass(frozen=True)
class Training:
    """A model with the arguments of its calls and with its loss."""

    model: nn.Module
    args: tuple[Any, ...] = field(default_factory=lambda: (batch(),))
    loss: Callable[[Any], Tensor] = summed

    def loop(self) -> "Loop":
        """Return the usual training loop of the model."""
        optimizer = sgd(self.model)

        def step() -> None:
            output = self.model(*self.args)
            self.loss(output).backward()
            update(optimizer)

        return Loop(self.model, [optimizer], step)


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        models: The watched model, or several with their names.
        optimizers: The optimizers.
        step: Function that runs a step, or one of the batches whose gradients are accumulated.
        accumulation: Number of batches over which gradients are accumulated.
    """

    models: nn.Module | Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    step: Callable[[], object]
    accumulation: int = 1


def sgd(*models: nn.Module) -> Optimizer:
    """Return an optimizer of all parameters of the models."""
    return SGD(nn.ModuleList(models).parameters(), lr=1e-3)


def update(optimizer: Optimizer) -> None:
    """Update the parameters, and remove their gradients."""
    optimizer.step()
    optimizer.zero_grad()


class Saves(Part):
    """A part that saves tensors for backward, so that a checkpoint has to run it again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


@dataclass(frozen=True)
class Case:
    """A structure with the expected self seconds of its modules.

    Attributes:
        name: Name of the function that builds the structure.
        build: That function.
        seconds: The expected seconds of one step. Phases and modules without time are left out.
    """

    name: str
    build: Callable[[StillClock], Any]
    seconds: Seconds

    @property
    def seconds_of_step(self) -> float:
        """The expected duration of a step."""
        return sum(sum(modules.values()) for modules in self.seconds.values())


class ModelCase(Case):
    """A case whose `build` returns a `Training`."""


class LoopCase(Case):
    """A case whose `build` returns a `Loop`."""


def model_case(
    **seconds: Mapping[str, float],
) -> Callable[[Callable[[StillClock], Training]], ModelCase]:
    """Make a case of a function that returns a `Training`. Keywords are the expected seconds."""
    return lambda build: ModelCase(build.__name__, build, seconds)


def loop_case(
    **seconds: Mapping[str, float],
) -> Callable[[Callable[[StillClock], Loop]], LoopCase]:
    """Make a case of a function that returns a `Loop`. Keywords are the expected seconds."""
    return lambda build: LoopCase(build.__name__, build, seconds)


def cases_of(files: Sequence[ModuleType], kind: type[Case]) -> list[Case]:
    """Return all cases of a kind in several Python modules."""
    found = []
    for file in files:
        for value in vars(file).values():
            if isinstance(value, kind):
                found.append(value)
    return found


def measured(training: Training) -> Profile:
    """Profile a model with `lflops.measure`."""
    return lflops.measure(
        training.model,
        training.args,
        backward=True,
        loss=training.loss,
        warmup=0,
        repeats=1,
        hardware=None,
    )


def monitored(loop: Loop) -> Profile:
    """Profile a training loop with `lflops.monitor`."""
    batches = loop.accumulation
    schedule = Schedule(wait=0, warmup=batches, active=HOOKED_STEPS * batches, repeat=1)
    settings: dict[str, Any] = {
        "trace": False,
        "ledger": False,
        "html": False,
        "track": False,
        "hardware": None,
        "on_error": "raise",
    }
    with lflops.monitor(
        loop.models,
        loop.optimizers,
        accumulation=batches,
        schedule=schedule,
        log=lambda _: None,
        **settings,
    ) as monitor:
        for _ in range(STEPS * batches):
            with monitor.step((batch(),)):
                loop.step()
    (profile,) = monitor.profiles
    return profile


def seconds_of_modules(profile: Profile) -> Seconds:
    """Return the self seconds of all modules in all phases, without those that took no time."""
    found: dict[str, dict[str, float]] = {}
    for fqn, module in profile.modules.items():
        for phase in PHASES:
            seconds = module.work(phase).self_seconds
            if seconds is not None and seconds.median:
                found.setdefault(phase, {})[fqn] = seconds.median
    return found


def durations(profile: Profile) -> set[float]:
    """Return the durations of all timed steps. They are equal, because all steps do the same."""
    return {step.seconds for step in profile.steps if step.seconds is not None}

"""Monitors that harm a training, each in one way: the comparison has to find every one."""

import atexit
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn

__all__ = ["CULPRITS", "HANGING", "Culprit"]

STEP = 4
"""In which they do it: in the middle of the run."""


class Culprit:
    """Does something in one step.

    Args:
        name: What it does.
    """

    def __init__(self, name: str) -> None:
        self.deed = CULPRITS[name]
        self.steps = 0

    def step(self, model: nn.Module, loop: Any = None) -> None:
        """A step begins. The loop is a Trainer, or the control of one."""
        self.steps += 1
        if self.steps == STEP:
            self.deed(model, loop)


def draws(model: nn.Module, loop: Any) -> None:
    """Draws a random number."""
    torch.rand(1)


def moves(model: nn.Module, loop: Any) -> None:
    """Moves the first weights by the least that there is.

    Of a single one the next update may round that off again.
    """
    with torch.no_grad():
        weight = next(model.parameters())
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, 9.0)))


def leaves_a_hook(model: nn.Module, loop: Any) -> None:
    """On all modules."""
    nn.modules.module.register_module_forward_hook(lambda *_: None)


def calls_the_model(model: nn.Module, loop: Any) -> None:
    """Runs one of its layers for itself."""
    with torch.no_grad():
        next(each for each in model.modules() if isinstance(each, nn.Linear))(torch.zeros(1, 8))


def leaves_an_attribute(model: nn.Module, loop: Any) -> None:
    """On a module."""
    model.watched = True  # type: ignore[assignment]


def leaves_a_mode(model: nn.Module, loop: Any) -> None:
    """Never leaves it."""
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()


def clears_a_flag(model: nn.Module, loop: Any) -> None:
    """Of a Trainer of transformers, as logging does."""
    loop.should_log = False


def replaces_reduce(model: nn.Module, loop: Any) -> None:
    """As a wrapper does that is put on or taken off in the middle of an epoch; here for each batch."""
    method = type(loop.strategy).reduce.__get__(loop.strategy)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    loop.strategy.reduce = replaced


def waits_for_others(model: nn.Module, loop: Any) -> None:
    """On one rank alone: a collective that the others never call."""
    if os.environ["RANK"] == "0":
        torch.distributed.barrier()


def sleeps(model: nn.Module, loop: Any) -> None:
    """For much longer than anybody waits."""
    time.sleep(10_000)


def raises(model: nn.Module, loop: Any) -> None:
    """An error of its own."""
    raise RuntimeError("a monitor's own")


def changes_the_exit(model: nn.Module, loop: Any) -> None:
    """The program's status."""
    atexit.register(os._exit, 7)


CULPRITS: dict[str, Callable[[nn.Module, Any], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        draws,
        moves,
        leaves_a_hook,
        calls_the_model,
        leaves_an_attribute,
        leaves_a_mode,
        clears_a_flag,
        replaces_reduce,
        waits_for_others,
        sleeps,
        raises,
        changes_the_exit,
    )
}
HANGING = {"waits for others", "sleeps"}
"""Those that never come back."""

"""Culprits: monitors that harm a training run, each in one way that the comparison must find."""

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
"""Number of the step, in the middle of the run, in which a culprit acts. The first step is 1."""


class Culprit:
    """A monitor that does something harmful in one step.

    Args:
        name: The name of the deed in `CULPRITS`.
    """

    def __init__(self, name: str) -> None:
        self.deed = CULPRITS[name]
        self.steps = 0

    def step(self, model: nn.Module, loop: Any = None) -> None:
        """Act if this is the step to act in. `loop` is a Trainer, or the control of a Trainer."""
        self.steps += 1
        if self.steps == STEP:
            self.deed(model, loop)


def draws(model: nn.Module, loop: Any) -> None:
    """Draw a random number."""
    torch.rand(1)


def moves(model: nn.Module, loop: Any) -> None:
    """Change each value of the first weight to the next floating-point number.

    All values change, because the next update may undo the change of a single one by rounding.
    """
    with torch.no_grad():
        weight = next(model.parameters())
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, 9.0)))


def leaves_a_hook(model: nn.Module, loop: Any) -> None:
    """Register a hook on all modules, and do not remove it."""
    nn.modules.module.register_module_forward_hook(lambda *_: None)


def calls_the_model(model: nn.Module, loop: Any) -> None:
    """Call a layer of the model."""
    layer = next(each for each in model.modules() if isinstance(each, nn.Linear))
    with torch.no_grad():
        layer(torch.zeros(1, 8))


def leaves_an_attribute(model: nn.Module, loop: Any) -> None:
    """Set an attribute of the model."""
    model.watched = True  # type: ignore[assignment]


def leaves_a_mode(model: nn.Module, loop: Any) -> None:
    """Enter a dispatch mode, and never leave it."""
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()


def clears_a_flag(model: nn.Module, loop: Any) -> None:
    """Clear a flag in the control of a transformers Trainer, as logging does."""
    loop.should_log = False


def replaces_reduce(model: nn.Module, loop: Any) -> None:
    """Replace a method of the strategy, as wrappers do that are installed within an epoch."""
    method = type(loop.strategy).reduce.__get__(loop.strategy)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    loop.strategy.reduce = replaced


def waits_for_others(model: nn.Module, loop: Any) -> None:
    """Call a collective on only one rank, which then waits for the other ranks forever."""
    if os.environ["RANK"] == "0":
        torch.distributed.barrier()


def sleeps(model: nn.Module, loop: Any) -> None:
    """Sleep for much longer than the judge waits."""
    time.sleep(10_000)


def raises(model: nn.Module, loop: Any) -> None:
    """Raise an error."""
    raise RuntimeError("a monitor's own")


def changes_the_exit(model: nn.Module, loop: Any) -> None:
    """Change the exit status of the program."""
    atexit.register(os._exit, 7)


CULPRITS: dict[str, Callable[[nn.Module, Any], None]] = {
    "draws": draws,
    "moves": moves,
    "leaves a hook": leaves_a_hook,
    "calls the model": calls_the_model,
    "leaves an attribute": leaves_an_attribute,
    "leaves a mode": leaves_a_mode,
    "clears a flag": clears_a_flag,
    "replaces reduce": replaces_reduce,
    "waits for others": waits_for_others,
    "sleeps": sleeps,
    "raises": raises,
    "changes the exit": changes_the_exit,
}
HANGING = {"waits for others", "sleeps"}
"""Names of the culprits that never return."""

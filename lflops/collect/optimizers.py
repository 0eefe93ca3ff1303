"""Which optimizer's step is running, told by torch's own hooks on all optimizers."""

import contextlib
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Follows the steps of all optimizers between `start` and `stop`; a closure that a step calls is outside of it."""

    def __init__(self) -> None:
        """Touch nothing yet."""
        self._running: list[Optimizer | None] = []
        self._hooks = contextlib.ExitStack()

    def start(self) -> None:
        """Hook in."""
        self._hooks.callback(register_optimizer_step_pre_hook(self._enter).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._leave).remove)

    def stop(self) -> None:
        """Hook out."""
        self._hooks.close()

    @property
    def current(self) -> Optimizer | None:
        """The optimizer whose own work is running."""
        return self._running[-1] if self._running else None

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._running.append(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def outside_of_the_step() -> Any:
            self._running.append(None)
            try:
                return closure()
            finally:
                self._running.pop()

        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside_of_the_step}
        return (args[0], outside_of_the_step, *args[2:]), kwargs

    def _leave(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Steps above it on the stack were left by an exception.
        while self._running and self._running.pop() is not optimizer:
            pass

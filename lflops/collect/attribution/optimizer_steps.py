"""Which optimizer's step is running, told by torch's own hooks on all optimizers."""

import contextlib
import threading
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lflops.collect.torch_private.autograd import backward_id

__all__ = ["OptimizerSteps"]


class RunningStep(threading.local):
    """The steps that one thread is in, each with the backward pass, if any, that it was begun in; `None` for a closure."""

    def __init__(self) -> None:
        """Begin a thread with none."""
        self.steps: list[tuple[Optimizer | None, int]] = []


class OptimizerSteps:
    """Follows the steps of all optimizers between `start` and `stop`; a closure that a step calls is outside of it."""

    def __init__(self) -> None:
        """Touch nothing yet."""
        self._thread = RunningStep()
        self._begun = False
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
        if not self._begun:  # on any thread: this is asked for every operator
            return None
        steps = self._thread.steps
        return steps[-1][0] if steps and steps[-1][1] == backward_id() else None

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._thread.steps.append((optimizer, backward_id()))
        self._begun = True
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def outside_of_the_step() -> Any:
            outside = len(self._thread.steps)
            self._thread.steps.append((None, backward_id()))
            try:
                result = closure()
            except BaseException:
                del self._thread.steps[outside - 1 :]  # the step is left as well
                raise
            del self._thread.steps[outside:]
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside_of_the_step}
        return (args[0], outside_of_the_step, *args[2:]), kwargs

    def _leave(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Steps above it on the stack were left by an exception.
        while self._thread.steps and self._thread.steps.pop()[0] is not optimizer:
            pass

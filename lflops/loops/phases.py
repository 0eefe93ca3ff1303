"""Where the phases of the user's own loop begin and end, by torch's hooks on models, backward passes and optimizers.

    with monitor.step(batch):
        loss = criterion(model(x), y)       forward, from the first call of a model
        loss.backward()                     backward, from the gradient of the model's output
        clip_grad_norm_(...)                other
        optimizer.step()                    optimizer

A loss that is computed outside of the model has its own gradient counted as forward, since no hook sees it. `named` phases are exact.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.collect.attribution.hooks import around_each_call, around_each_step
from lflops.collect.inputs.tensors import tensors_in
from lflops.collect.torch_private.autograd import after_backward
from lflops.session.inputs.phases import Listener
from lflops.session.inputs.wrappers import Wrappers

__all__ = ["LoopPhases"]

ENGINE_PHASES = {"backward": "backward", "clip_grad_norm_": "clip", "clip_grad_value_": "clip", "clip_gradients": "clip"}
"""Methods of a `Fabric` or an `Accelerator`, and the phase that each of them is."""


class LoopPhases:
    """Tells listeners of the phases of one loop. Its hooks are on as long as somebody listens.

    Args:
        models: The modules that the loop calls.
        optimizers: Those that it steps.
        engine: A `Fabric` or an `Accelerator`, whose `backward` and clipping are phases.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], engine: Any = None) -> None:
        """Touch nothing yet."""
        self._engine = engine
        self._models = models
        self._optimizers = optimizers
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._stage = "train"
        self._in_step = False
        self._running: list[str] = []
        self._hooks = contextlib.ExitStack()

    def listen(self, stage: str, listener: Listener) -> Callable[[], None]:
        """Tell a listener of a stage's phases, until what is returned is called."""
        if not any(self._listeners.values()):
            self._install()
        self._listeners[stage] = (*self._listeners.get(stage, ()), listener)

        def undo() -> None:
            self._listeners[stage] = tuple(each for each in self._listeners[stage] if each is not listener)
            if not any(self._listeners.values()):
                self._hooks.close()

        return undo

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The loop is in another stage. A step that is going on goes on behind it."""
        before, self._stage = self._stage, name
        in_step, self._in_step = self._in_step, False
        try:
            yield
        finally:
            self._stage, self._in_step = before, in_step

    def begin_step(self) -> None:
        """The models that are called from here on are called for a step."""
        self._in_step = True

    def end_step(self) -> None:
        """The step is over, and so are its phases."""
        while self._running:
            self._leave()
        self._in_step = False

    def drop_step(self) -> None:
        """The step is left by an exception."""
        while self._running:
            self._running.pop()
            for each in self._listeners.get(self._stage, ()):
                each.drop()
        self._in_step = False

    @contextlib.contextmanager
    def named(self, phase: str, *given: Any) -> Iterator[None]:
        """A phase that the loop names itself, with what it is about: the loss of a backward pass."""
        self._leave_forward()
        self._enter(phase, *given)
        depth = len(self._running)
        try:
            yield
        except BaseException:
            self._unwind(depth - 1, failed=True)
            raise
        self._unwind(depth - 1)

    def _enter(self, phase: str, *given: Any) -> None:
        self._running.append(phase)
        for each in self._listeners.get(self._stage, ()):
            each.enter(phase, given)

    def _leave(self) -> None:
        self._running.pop()
        for each in self._listeners.get(self._stage, ()):
            each.leave()

    def _unwind(self, depth: int, *, failed: bool = False) -> None:
        while len(self._running) > depth:
            if not failed:
                self._leave()
                continue
            self._running.pop()
            for each in self._listeners.get(self._stage, ()):
                each.drop()

    def _leave_forward(self) -> None:
        """Forward has no hook at its end: it lasts until the next phase begins."""
        if self._running and self._running[-1] == "forward":
            self._leave()

    def _install(self) -> None:
        with contextlib.ExitStack() as hooks:
            for model in self._models:
                hooks.enter_context(around_each_call(model, self._model_is_called, self._model_returns))
            for optimizer in self._optimizers:
                hooks.enter_context(around_each_step(optimizer, self._optimizer_begins, self._optimizer_ends))
            wrappers = Wrappers()
            hooks.callback(wrappers.uninstall)
            for name, phase in ENGINE_PHASES.items():
                if hasattr(self._engine, name):
                    wrappers.install(self._engine, name, self._within(phase, getattr(self._engine, name)))
            self._hooks = hooks.pop_all()

    def _within(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.named(phase, *args[:1]):
                return call(*args, **kwargs)

        return wrapped

    def _model_is_called(self) -> None:
        if self._in_step and (not self._running or self._running[-1] == "optimizer"):
            self._enter("forward")

    def _model_returns(self, output: Any) -> None:
        if self._in_step:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Tensor) -> None:
        if self._in_step and "backward" not in self._running:
            self._leave_forward()
            self._enter("backward")
            depth = len(self._running)
            after_backward(lambda: self._unwind(depth - 1))

    def _optimizer_begins(self) -> None:
        if self._in_step:
            self._leave_forward()
            self._enter("optimizer")

    def _optimizer_ends(self) -> None:
        if "optimizer" in self._running:
            self._unwind(len(self._running) - 1 - self._running[::-1].index("optimizer"))

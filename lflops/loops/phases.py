"""Where the phases of the user's own loop begin and end, by torch's hooks on models, backward passes and optimizers.

    with monitor.step(batch):
        loss = criterion(model(x), y)       forward, from the first call of a model
        loss.backward()                     backward, from the gradient of the model's output
        clip_grad_norm_(...)                clip if it takes long, else other
        optimizer.step()                    optimizer

A loss that is computed outside of the model has its own gradient counted as forward, since no hook sees it. `named` phases are exact.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lflops.boundary import Boundary, Undo, wrap
from lflops.collect.attribution.hooks import hook_model, hook_optimizers
from lflops.collect.inputs.tensors import tensors_in
from lflops.collect.torch_private.autograd import after_backward
from lflops.session.inputs.phases import RUN, Phases, Within

RUNNING = ""  # in place of a stage: the one that is running

ENGINE_PHASES = {"backward": "backward", "clip_grad_norm_": "clip", "clip_grad_value_": "clip", "clip_gradients": "clip"}
"""Methods of a `Fabric` or an `Accelerator`, and the phase that each of them is."""


ENGINE_BLOCKS = {
    **dict.fromkeys(("save", "save_state", "save_model"), "checkpoint_save"),
    **dict.fromkeys(("load", "load_state"), "checkpoint_load"),
    **dict.fromkeys(("log", "log_dict"), "logging"),
}
"""The same for what belongs to no step: categories of the ledger."""


class LoopPhases(Phases):
    """The phases of one loop."""

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self._engine = engine
        self._stage = "train"
        self._in_step = False

    def install(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], boundary: Boundary, undo: Undo) -> None:
        """Hook the models, the optimizers and the engine, until `undo` is closed."""
        self.boundary, guard = boundary, boundary.guard
        self._guarded_begin, self._guarded_end = guard(self._backward_begins), guard(partial(self.leave_last, "backward"))
        self._guarded_wait = guard(self._nodes_are_done)
        undo.add(self.forget)
        for model in models:
            hook_model(undo, model, guard(self._model_is_called), guard(self._model_returns))
        for optimizer in optimizers:
            hook_optimizers(undo, guard(self._optimizer_begins), guard(partial(self.leave_last, "optimizer")), optimizer)
        for name, phase in ENGINE_PHASES.items():
            if hasattr(self._engine, name):
                wrap(undo, self._engine, name, partial(self._called_in, partial(self.named, phase)))
        for name, category in ENGINE_BLOCKS.items():
            if hasattr(self._engine, name):
                wrap(undo, self._engine, name, partial(self._called_in, lambda *_, category=category: self.within(category)))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The loop is in another stage. A step that is going on goes on after it."""
        before, self._stage = self._stage, name
        in_step, self._in_step = self._in_step, False
        try:
            yield
        finally:
            self._stage, self._in_step = before, in_step

    def begin_step(self) -> None:
        """The models that are called from here on are called for a step."""
        self._in_step = True

    def end_step(self, *, failed: bool = False) -> None:
        """The step is over, and so are its phases; or it is left by an exception."""
        self._in_step = False
        self.leave(0, failed=failed)

    def named(self, phase: str, *given: Any) -> Within:
        """A phase that the loop names itself, with what it is about: the loss of a backward pass."""
        return Within(self, phase, RUNNING, given)

    def within(self, category: str) -> Within:
        """A block that belongs to no step, but to a category of the ledger."""
        return Within(self, category, RUN, ())

    def begin(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> int:
        self._leave_forward()
        return super().begin(phase, stage or self._stage, given)

    def _called_in(self, around: Callable[..., Within], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around(*args[:1]):
            return call(*args, **kwargs)

    def _leave_forward(self) -> None:
        """Forward has no hook at its end: it lasts until the next phase begins."""
        if self.innermost == "forward":
            self.leave(self.depth - 1)

    def _model_is_called(self, _model: nn.Module, *_: object) -> None:
        if self._in_step and self.is_heard(self._stage) and self.innermost in {None, "optimizer"}:
            self.enter("forward", self._stage)

    def _model_returns(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if self._in_step and self.is_heard(self._stage):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._guarded_begin)

    def _backward_begins(self, _gradient: Tensor) -> None:
        if not self._in_step:
            return
        if not self.is_running("backward"):
            self._leave_forward()
            self.enter("backward", self._stage)
            after_backward(self._guarded_wait)
        elif self.awaits_others:  # somebody else ends it
            after_backward(self.boundary.guard(self.wait))

    def _nodes_are_done(self) -> None:
        """Register the end of backward only now: by now DDP has registered its wait for the other ranks."""
        if self.awaits_others:
            self.wait()
        after_backward(self._guarded_end)

    def _optimizer_begins(self, *_: object) -> None:
        if self._in_step:
            self._leave_forward()
            self.enter("optimizer", self._stage)

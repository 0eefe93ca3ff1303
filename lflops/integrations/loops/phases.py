"""Where the phases of the user's own loop begin and end, by torch's hooks on models, backward passes and optimizers.

    with monitor.step(batch):
        loss = criterion(model(x), y)       forward, from the first call of a model
        loss.backward()                     backward
        clip_grad_norm_(...)                clip if it takes long, else other
        optimizer.step()                    optimizer

Where a step goes backward and has called no model, but methods as `model.loss(x)`, forward is what
is in no phase before backward, from the next step on. Gradients that `torch.autograd.grad` returns
are no backward pass: they are part of the phase that asks for them.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lflops.attribution.hooks import hook_models, hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard, wrap
from lflops.monitoring.inputs.phases import RUN, Phases, Within
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, hear_backward

# in place of a stage: the one that is running
RUNNING = ""

ENGINE = {
    "backward": ("backward", RUNNING),
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_value_", "clip_gradients"), ("clip", RUNNING)),
    **dict.fromkeys(("save", "save_state", "save_model"), ("checkpoint_save", RUN)),
    **dict.fromkeys(("load", "load_state"), ("checkpoint_load", RUN)),
    **dict.fromkeys(("log", "log_dict"), ("logging", RUN)),
}
"""Methods of a `Fabric` or an `Accelerator`.

The phase that each of them is, and whose; of no step, the category of the ledger.
"""


class LoopPhases(Phases):
    """The phases of one loop."""

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self._engine = engine
        self._stage = "train"
        self._in_step = False
        # whether the step has called a model
        self._has_called = False
        self._passes = self._expected = (
            # its backward passes; and where it calls no model, those of the step before
            0
        )
        self._thread = threading.get_ident()

    def install(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        boundary: ErrorGuard,
        undo: CleanupStack,
    ) -> None:
        """Hook the models, the optimizers and the engine, until `undo` is closed."""
        self.boundary, guard = boundary, boundary.guard
        undo.add(self.forget)
        hear_backward(undo, guard(self._backward_begins), guard(self._backward_ends))
        hook_models(undo, models, guard(self._model_is_called))
        for optimizer in optimizers:
            hook_optimizers(
                undo,
                guard(self._optimizer_begins),
                guard(partial(self.leave_last, "optimizer")),
                optimizer,
            )
        for name, (phase, stage) in ENGINE.items():
            if hasattr(self._engine, name):
                wrap(undo, self._engine, name, partial(self.call_in, phase, stage))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The loop is in another stage. A step that is going on goes on after it."""
        before = self._stage, self._in_step, self._goes_on
        self._stage, self._in_step, self._goes_on = name, False, None
        with self.boundary:
            if self.innermost == "forward":
                self.leave(self.depth - 1)
        try:
            yield
        finally:
            self._stage, self._in_step, self._goes_on = before
            with self.boundary:
                # forward goes on, if it did
                self.leave(self.depth)

    def begin_step(self) -> None:
        """The models that are called from here on are called for a step.

        Where only methods of theirs are, forward begins with it.
        """
        self._in_step, self._thread = True, threading.get_ident()
        if self._stage == "train":
            self._expected = 0 if self._has_called else self._passes
            self._has_called, self._passes = False, 0
        if self._expected:
            self._goes_on = self._forward_goes_on
            with self.boundary:
                self._forward_goes_on()

    def end_step(self, *, failed: bool = False) -> None:
        """The step is over, and so are its phases; or it is left by an exception."""
        self._in_step, self._goes_on = False, None
        if self._running:
            self.leave(0, failed=failed)

    def named(self, phase: str) -> Within:
        """A phase that the loop names itself."""
        return Within(self, phase, RUNNING, ())

    def within(self, category: str) -> Within:
        """A block that belongs to no step, but to a category of the ledger."""
        return Within(self, category, RUN, ())

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        goes_on, self._goes_on = self._goes_on, None
        if (
            self._running and self._running[-1][0] == "forward"
            # forward has no hook at its end: it lasts until the next phase begins
        ):
            self.leave(len(self._running) - 1)
        self._has_called |= (
            phase == "forward" and self._stage == "train"
            # named by the loop, or begun by a model
        )
        self._passes += phase == "backward"
        if self._passes < self._expected and not self._has_called:
            self._goes_on = goes_on
        super().enter(phase, stage or self._stage, given)

    def _forward_goes_on(self) -> None:
        super().enter("forward", self._stage)

    def _model_is_called(self, *_: Any) -> None:
        self._has_called |= self._in_step and self._stage == "train"
        if self._in_step and self.innermost in {None, "optimizer"}:
            self.enter("forward", RUNNING)

    def _backward_begins(self, losses: Sequence[Any]) -> int | None:
        # another one, of which it is a part
        is_within = backward_id() != NO_BACKWARD
        if is_within or not self._in_step or threading.get_ident() != self._thread:
            return None
        self.hear_wait(*losses)
        return (
            None
            if self.depth_of("backward") is not None
            else self.begin("backward", RUNNING, (*losses,))
        )

    def _backward_ends(self, around: int) -> None:
        self.leave(around)

    def _optimizer_begins(self, *_: object) -> None:
        if self._in_step:
            self.enter("optimizer", RUNNING)

"""Detect the phases of a custom loop with torch's hooks on models, backward passes and optimizers.

    with monitor.step(batch):
        loss = criterion(model(x), y)       forward, from the first call of a model
        loss.backward()                     backward
        clip_grad_norm_(...)                clip if it takes long, else other
        optimizer.step()                    optimizer

Some loops call no model but methods such as `model.loss(x)`. If a step runs backward without such a
call, the time in no phase before backward is forward, from the next step on. A call of
`torch.autograd.grad` is no backward pass: it is part of the phase in which it runs.
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
from lflops.monitoring.inputs.phases import Phases, Within
from lflops.phase_log import RUN
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, wrap_backward

RUNNING = ""
"""Stands for the running stage."""

ENGINE = {
    "backward": ("backward", RUNNING),
    "clip_grad_norm_": ("clip", RUNNING),
    "clip_grad_value_": ("clip", RUNNING),
    "clip_gradients": ("clip", RUNNING),
    "save": ("checkpoint_save", RUN),
    "save_state": ("checkpoint_save", RUN),
    "save_model": ("checkpoint_save", RUN),
    "load": ("checkpoint_load", RUN),
    "load_state": ("checkpoint_load", RUN),
    "log": ("logging", RUN),
    "log_dict": ("logging", RUN),
}
"""Methods of a `Fabric` or an `Accelerator`, with their phase and stage.

Methods of stage `RUN` belong to no step; their phase is a category of the ledger.
"""


class LoopPhases(Phases):
    """The phases of one loop."""

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self._engine = engine
        self._stage = "train"
        self._in_step = False
        # set when the step has called a model
        self._has_called = False
        # backward passes of the step
        self._passes = 0
        # backward passes to expect if the step calls no model: as many as in the step before
        self._expected = 0
        self._thread = threading.get_ident()

    def install(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        boundary: ErrorGuard,
        undo: CleanupStack,
    ) -> None:
        """Hook the models, the optimizers and the engine, until `undo` is closed."""
        self.boundary = boundary
        guard = boundary.guard
        undo.add(self.clear)
        wrap_backward(undo, guard(self._backward_begins), guard(self._backward_ends))
        hook_models(undo, models, guard(self._model_is_called))
        begins = guard(self._optimizer_begins)
        ends = guard(partial(self.leave_last, "optimizer"))
        for optimizer in optimizers:
            hook_optimizers(undo, begins, ends, optimizer)
        for name, (phase, stage) in ENGINE.items():
            if hasattr(self._engine, name):
                wrap(undo, self._engine, name, partial(self.call_in, phase, stage))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run another stage. A step that is running continues after it."""
        stage = self._stage
        in_step = self._in_step
        goes_on = self._goes_on
        self._stage = name
        self._in_step = False
        self._goes_on = None
        with self.boundary:
            if self.innermost == "forward":
                self.leave(self.depth - 1)
        try:
            yield
        finally:
            self._stage = stage
            self._in_step = in_step
            self._goes_on = goes_on
            with self.boundary:
                # resumes forward if the step was in it
                self.leave(self.depth)

    def begin_step(self) -> None:
        """Begin a step: models that are called from now on are called for it.

        If the loop calls only methods of its models, forward begins with the step.
        """
        self._in_step = True
        self._thread = threading.get_ident()
        if self._stage == "train":
            self._expected = 0 if self._has_called else self._passes
            self._has_called = False
            self._passes = 0
        if self._expected:
            self._goes_on = self._forward_goes_on
            with self.boundary:
                self._forward_goes_on()

    def end_step(self, *, failed: bool = False) -> None:
        """End the step and its phases; `failed` if an exception ends it."""
        self._in_step = False
        self._goes_on = None
        if self._running:
            self.leave(0, failed=failed)

    def named(self, phase: str) -> Within:
        """Name the phase of a `with` block."""
        return Within(self, phase, RUNNING, ())

    def within(self, category: str) -> Within:
        """Assign a `with` block to a category of the ledger and to no step."""
        return Within(self, category, RUN, ())

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        goes_on = self._goes_on
        self._goes_on = None
        # No hook reports the end of forward: it lasts until the next phase begins.
        if self._running and self._running[-1][0] == "forward":
            self.leave(len(self._running) - 1)
        # Forward is named by the loop, or begins with the call of a model.
        self._has_called |= phase == "forward" and self._stage == "train"
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
        is_nested = backward_id() != NO_BACKWARD
        if is_nested or not self._in_step or threading.get_ident() != self._thread:
            return None
        self.hook_wait(*losses)
        if self.depth_of("backward") is not None:
            return None
        self.enter("backward", RUNNING, (*losses,))
        return self.depth - 1

    def _backward_ends(self, around: int) -> None:
        self.leave(around)

    def _optimizer_begins(self, *_: object) -> None:
        if self._in_step:
            self.enter("optimizer", RUNNING)

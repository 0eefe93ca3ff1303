"""Detect the phases of a custom loop with torch's hooks on models, backward passes and optimizers.

A phase is a part of a step:

    with monitor.step(batch):
        loss = criterion(model(x), y)       forward, from the first call of a model
        loss.backward()                     backward
        clip_grad_norm_(...)                clip if it takes long, else other
        optimizer.step()                    optimizer

Some loops do not call the model itself, but a method such as `model.loss(x)`. lflops cannot detect
the beginning of such a forward. If a step runs backward without calling a model, the next step is
treated differently: its time before backward counts as forward, except for the time in other
phases. A call of `torch.autograd.grad` is not treated as a backward pass. It is part of the phase
in which it runs.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from lflops.attribution.hooks import hook_models, hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard, wrap
from lflops.errors import UnknownTorchError
from lflops.monitoring.inputs.phases import Phases, Within
from lflops.phase_log import ENTER, LEAVE, MANY, RUN
from lflops.torch_private.autograd import NO_BACKWARD, backward_id, wrap_backward
from lflops.torch_private.saving import wrap_saves
from lflops.torch_private.self_check import check_saves

RUNNING = ""
"""Passed instead of a stage name, such as "train". It means the stage that is currently running."""

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
"""Maps methods of a `Fabric` or an `Accelerator` to the phase and the stage of their calls.

The stage `RUNNING` means the stage that runs at the moment, such as training. The stage `RUN`
means that the call is not part of a step. Then the first value is not a phase, but
a category of the ledger, the time account of the run.
"""


def _do_nothing() -> None:
    """Do nothing until a monitor wants to know about checkpoints."""


class LoopPhases(Phases):
    """Detects the phases of one custom loop.

    Attributes:
        updated: Indices of the optimizers that have made a step since the monitor last cleared this
            set. Only steps between `begin_step` and `end_step` are included.
        checkpoint_begins: Called when `torch.save` begins to write a file.
    """

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self.updated: set[int] = set()
        self.checkpoint_begins: Callable[[], None] = _do_nothing
        self._engine = engine
        self._stage = "train"
        self._in_step = False
        # set when the step has called a model
        self._has_called = False
        # Number of calls of models in the step that have not returned. A call that has raised an
        # exception is counted until the end of the step.
        self._open_calls = 0
        # number of backward passes in the step so far
        self._passes = 0
        # number of backward passes in the previous step if it called no model, else 0
        self._expected = 0
        self._thread = threading.get_ident()

    def install(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        guard: ErrorGuard,
        undo: CleanupStack,
    ) -> None:
        """Hook the models, the optimizers and the engine, until `undo` is closed."""
        self.guard = guard
        undo.add(self.clear)
        wrap_backward(undo, self._backward_begins, self._backward_ends)
        self._watch_saves(undo)
        hook_models(undo, models, self._model_hook(), self._model_end_hook())
        begins = self._optimizer_hook()
        for place, optimizer in enumerate(optimizers):
            hook_optimizers(undo, begins, self._optimizer_end_hook(place), optimizer)
        for name, (phase, stage) in ENGINE.items():
            if hasattr(self._engine, name):
                wrap(undo, self._engine, name, partial(self.call_in, phase, stage))

    def forget_monitor(self) -> None:
        """Drop the function of the monitor, so that the monitor and its models can be freed."""
        self.checkpoint_begins = _do_nothing

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Return a context manager for another stage, such as "validate".

        If a training step is running, it continues after the `with` block.
        """
        stage = self._stage
        in_step = self._in_step
        goes_on = self._goes_on
        self._stage = name
        self._in_step = False
        self._goes_on = None
        with self.guard:
            if self.innermost == "forward":
                self.leave(self.depth - 1)
        try:
            yield
        finally:
            self._stage = stage
            self._in_step = in_step
            self._goes_on = goes_on
            with self.guard:
                # resumes forward if the step was in forward
                self.leave(self.depth)

    def begin_step(self) -> None:
        """Begin a step. From now on, calls of models belong to this step.

        If the previous step ran backward without calling a model, forward begins now.
        """
        self._in_step = True
        self._open_calls = 0
        self._thread = threading.get_ident()
        if self._stage == "train":
            self._expected = 0 if self._has_called else self._passes
            self._has_called = False
            self._passes = 0
        if self._expected:
            self._goes_on = self._forward_goes_on
            with self.guard:
                self._forward_goes_on()

    _backward_ends = Phases.leave_guarded

    def end_step(self, *, failed: bool = False) -> None:
        """End the step and its running phases.

        Args:
            failed: Whether an exception ended the step.
        """
        self._in_step = False
        self._goes_on = None
        if self.running:
            self.leave(0, failed=failed)

    def named(self, phase: str) -> Within:
        """Return a context manager that assigns the time of its `with` block to a phase."""
        return Within(self, phase, RUNNING, ())

    def within(self, category: str) -> Within:
        """Return a context manager that assigns the time of its `with` block to a ledger category.

        This time is not part of any step. The ledger is the time account of the whole run.
        """
        return Within(self, category, RUN, ())

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase. If forward is running, it ends first.

        If the phase begins within a call of a model, forward continues after the phase. An example
        is a model that runs backward on the loss of each of its layers.

        Args:
            phase: Name of the phase.
            stage: The stage, or `RUNNING` for the stage that is running.
            given: Values to pass to the listeners of the stage, which are called when a phase
                begins. An example is the losses of a backward pass.
        """
        running = self.running
        log = self.log
        if len(log.events) > MANY:
            log.deliver()
        now = log.clock()
        goes_on = self._goes_on
        self._goes_on = None
        # Forward includes the computation of the loss, so no hook reports its end: it lasts until
        # the next phase begins.
        if running and running[-1][0] == "forward":
            if self._open_calls:
                goes_on = self._forward_goes_on
            _, listeners = running.pop()
            log.append((now, LEAVE, None, None))
            for each in listeners:
                each.leave()
        if phase == "backward":
            self._passes += 1
        elif phase == "forward" and self._stage == "train":
            # The loop has called a model, or has named this phase itself.
            self._has_called = True
        if self._open_calls or (self._passes < self._expected and not self._has_called):
            # Either the model's call has not returned, or further backward passes are expected. So
            # forward continues after this phase.
            self._goes_on = goes_on
        stage = stage or self._stage
        listeners = self._listeners.get(stage, ())
        running.append((phase, listeners))
        log.append((now, ENTER, phase, stage))
        for each in listeners:
            each.enter(phase, given)

    def _forward_goes_on(self) -> None:
        super().enter("forward", self._stage)

    # The following hooks run in every step. To be fast, each hook is a single function with its own
    # error guard.

    def _model_hook(self) -> Callable[..., None]:
        """Return a hook that begins the `forward` phase when a model is called in a step.

        If the model is called while a batch is prepared (phase `transfer`), the call is inference.
        For example, it generates text on which the model will be trained.
        """

        def model_is_called(*_: Any) -> None:
            if is_compiling() or not self._in_step:
                return
            try:
                innermost = self.running[-1][0] if self.running else None
                if innermost == "transfer":
                    self.enter("inference", RUNNING)
                    return
                if innermost == "backward":
                    # backward computes a part of forward again
                    return
                self._open_calls += 1
                if self._stage == "train" and innermost != "inference":
                    self._has_called = True
                if innermost is None or innermost == "optimizer":
                    self.enter("forward", RUNNING)
            except BaseException as error:
                if not self.guard.contains(error):
                    raise

        return model_is_called

    def _model_end_hook(self) -> Callable[..., None]:
        """Return a hook that notes the end of a model's call."""

        def model_has_returned(*_: Any) -> None:
            if is_compiling():
                return
            running = self.running
            if self._open_calls and not (running and running[-1][0] == "backward"):
                self._open_calls -= 1

        return model_has_returned

    def _optimizer_hook(self) -> Callable[..., None]:
        """Return a hook that begins the `optimizer` phase."""

        def optimizer_begins(*_: Any) -> None:
            if is_compiling() or not self._in_step:
                return
            try:
                self.enter("optimizer", RUNNING)
            except BaseException as error:
                if not self.guard.contains(error):
                    raise

        return optimizer_begins

    def _optimizer_end_hook(self, place: int) -> Callable[..., None]:
        """Return a hook that ends the `optimizer` phase.

        `place` is the index of the hooked optimizer in the list of optimizers.
        """

        def optimizer_ends(*_: Any) -> None:
            if is_compiling() or not self.running:
                return
            try:
                if self._in_step:
                    self.updated.add(place)
                if self.running[-1][0] == "optimizer":
                    self.leave(len(self.running) - 1)
                else:
                    self.leave_last("optimizer")
            except BaseException as error:
                if not self.guard.contains(error):
                    raise

        return optimizer_ends

    def _watch_saves(self, undo: CleanupStack) -> None:
        """Recognize calls of `torch.save`, if lflops knows how this torch writes files."""
        with contextlib.suppress(UnknownTorchError):
            check_saves()
            wrap_saves(undo, self._save_begins, self._save_ends)

    def _save_begins(self) -> int | None:
        """Begin the category `checkpoint_save`.

        Returns how many phases are running around it, or `None` if a phase or category that the
        user has named already includes the time.
        """
        if threading.get_ident() != self._thread or self.innermost not in {None, "forward"}:
            return None
        with self.guard:
            self.checkpoint_begins()
            self.enter("checkpoint_save", RUN)
        return self.depth - 1

    def _save_ends(self, depth: int | None) -> None:
        if depth is not None:
            self.leave_guarded(depth)

    def _backward_begins(self, losses: Sequence[Any]) -> int | None:
        """Begin the `backward` phase, and return the number of phases that contain it.

        Returns `None` if the pass begins no phase, for example because it is nested in another
        backward pass.
        """
        is_nested = backward_id() != NO_BACKWARD
        if is_nested or not self._in_step or threading.get_ident() != self._thread:
            return None
        try:
            if self.awaits_others:
                self.hook_wait(*losses)
            for phase, _ in self.running:
                # A method of the engine has already begun this phase.
                if phase == "backward":
                    return None
            self.enter("backward", RUNNING, (*losses,))
        except BaseException as error:
            if not self.guard.contains(error):
                raise
            return None
        return len(self.running) - 1

"""The phases of a Trainer, from what Lightning tells its profiler and its callbacks.

Lightning reports each fetch of a batch, its transfer, each step of a stage, the optimizer's step
and the clipping of gradients to its profiler, whichever that is, in automatic and in manual
optimization. Backward begins and ends with callback hooks, and the optimizer's own work begins with
one:

    [data] [transfer]  optimizer_step: (training_step: [forward])  on_before_backward: [backward]  on_before_optimizer_step: [optimizer]

So two or three methods of the profiler are wrapped, from the beginning of the run to its end. With
several ranks Lightning's own collectives are wrapped as well, because ranks wait for each other in
them.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from lflops.attribution.hooks import hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard, wrap
from lflops.monitoring.inputs.phases import RUN, Phases
from lflops.timing.step_phases import OTHER, SYNC

SYNCHRONIZING = (
    "all_gather",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_boolean_decision",
    # of the strategy: Lightning's own collectives
)
# of the training's loop: a broadcast before each batch, in newer Lightnings
SIGTERM_CHECK = "_broadcast_sigterm_tensor"
# in place of a stage: the one that is running
RUNNING = None

LOADING = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
"""Of the strategy: reading a checkpoint, and what is in it."""

STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""By stage, as `FlopsMonitor` names it, the method of a LightningModule that a batch goes to."""

ACTIONS: dict[str, tuple[str | None, str | None]] = {
    "train_dataloader_next": ("data", "train"),
    "val_next": ("data", "validate"),
    "test_next": ("data", "test"),
    "predict_next": ("data", "predict"),
    ".batch_to_device": ("transfer", RUNNING),
    **{f".{step}": ("forward", name) for name, step in STEPS.items()},
    "save_checkpoint": ("checkpoint_save", RUN),
    "optimizer_step": (
        None,
        "train",
        # of itself no phase, but what began within it is over with it
    ),
}
"""Actions of the profiler, by the end of their names: the phase that each is, and whose.

The longest end counts.
"""

CLIP, BEFORE_STEP = "configure_gradient_clipping", "on_before_optimizer_step"
"""Actions that are phases of the training if somebody gives them something to do."""

DEFAULT_HOOKS = (".core.hooks", ".core.module", ".callbacks.callback")
"""Where Lightning keeps the hooks that do nothing unless somebody gives them something to do."""


class PhaseListener:
    """A monitor, whose hooks tell of phases: a mark for its class."""


class TrainerPhases(Phases):
    """The phases of one Trainer.

    They come in every step of the training, so little is done for each, and nothing twice.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        # whether one of its monitors keeps it
        self.has_ledger = False
        # what is kept as long as it lives must not keep it
        self._trainer = ref(trainer)
        self._state = trainer.state
        self._known: dict[str, tuple[str | None, str | None] | None] = {}
        self._begun: list[tuple[str, int]] = []
        self._contexts: dict[str, AbstractContextManager[str]] = {}
        # of optimizers that run, one within the other
        self._steps = 0
        self._users: dict[ErrorGuard, Callable[[BaseException | None], None]] = {}
        self.boundary = ErrorGuard(self._fail)
        self._undo = CleanupStack()

    def join(
        self,
        boundary: ErrorGuard,
        undo: CleanupStack,
        close: Callable[[BaseException | None], None],
    ) -> int:
        """Hear the Trainer for one more monitor, until its `undo` is closed.

        With the last one the wrappers come off.

        Returns how many there are then.
        """
        # `close` ends the monitor's run where the Trainer ends without a word to its callbacks.
        undo.add(self._leave, boundary)
        self._users[boundary] = close
        if len(self._users) == 1:
            self._install(self._trainer())
        return len(self._users)

    def _leave(self, boundary: ErrorGuard) -> None:
        self._users.pop(boundary, None)
        if not self._users:
            self._undo.close()
            self.forget()
            trainer = self._trainer()
            if trainer is not None:
                _PHASES.pop(trainer, None)

    def backward_begins(self, loss: Any) -> None:
        """The callback says: the loss is about to go backward."""
        if self.innermost != "backward":
            self.enter("backward", "train", (loss,))
            self.hear_wait(loss)

    def backward_ends(self) -> None:
        if self.innermost == "backward":
            self.leave(self.depth - 1)

    def optimizer_begins(self) -> None:
        """The callback says: the gradients are there, and the optimizer's own work begins."""
        # It ends with the optimizer's step. With mixed precision that has yet to begin; with a
        # closure it is already running.
        if self.innermost != "optimizer":
            self.enter("optimizer", "train")

    def _install(self, trainer: Any) -> None:
        strategy, profiler = trainer.strategy, trainer.profiler
        step_begins, step_ends = (
            self.boundary.guard(self._step_begins),
            self.boundary.guard(self._step_ends),
        )
        hook_optimizers(self._undo, step_begins, step_ends)
        wrap(self._undo, profiler, "start", self._start)
        wrap(self._undo, profiler, "stop", self._stop)
        if type(profiler).__name__ == "PassThroughProfiler":
            wrap(self._undo, profiler, "profile", self._profile)
        for name in LOADING:
            if hasattr(strategy, name):
                wrap(self._undo, strategy, name, partial(self.call_in, "checkpoint_load", RUN))
        wrap(self._undo, strategy, "teardown", self._torn_down)
        # calls all loggers
        connector = getattr(trainer, "_logger_connector", None)
        if hasattr(connector, "log_metrics"):
            wrap(self._undo, connector, "log_metrics", partial(self.call_in, "logging", RUN))
        self.awaits_others = trainer.world_size > 1
        if self.awaits_others:
            for owner, name in [
                *((strategy, name) for name in SYNCHRONIZING),
                (trainer.fit_loop.epoch_loop, SIGTERM_CHECK),
            ]:
                if hasattr(owner, name):
                    wrap(self._undo, owner, name, self._synchronize)

    def _fail(self, error: BaseException) -> None:
        for each in [*self._users]:
            each.contains(error)

    def _torn_down(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer ends.

        Its callbacks do not hear it where others stand in their place, as after a failed search for
        a rate.
        """
        with self.boundary:
            for close in [*self._users.values()]:
                # The program may be handling another error, which did not end this.
                close(sys.exc_info()[1] if self._state.status == "interrupted" else None)
        return call(*args, **kwargs)

    def _step_begins(self, *_: object) -> None:
        self._steps += 1

    def _step_ends(self, *_: object) -> None:
        self._steps -= 1
        if self.innermost == "optimizer" and self._steps <= 0:
            self.leave(self.depth - 1)

    def _start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        with self.boundary:
            self._begins(_name(args, kwargs))
        return result

    def _stop(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.boundary:
            self._ends(_name(args, kwargs))
        return call(*args, **kwargs)

    def _profile(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of Lightning's own, which makes a generator for each action, and calls what does nothing twice."""
        # That would take longer than all that is done here. What is no phase, and is Lightning's
        # own to name, gets a context of Python's.
        name = _name(args, kwargs)
        context = self._contexts.get(name)
        if context is None:
            if not name.startswith("[") and name != "run_training_batch":
                return call(*args, **kwargs)
            context = self._contexts[name] = (
                nullcontext(name) if self._phase_of(name) is None else _Action(self, name)
            )
        return context

    def _synchronize(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._running_stage()
        return (
            call(*args, **kwargs)
            if stage is None
            else self.call_in(SYNC, stage, call, *args, **kwargs)
        )

    def _begins(self, name: str) -> None:
        known = self._phase_of(name)
        if known is None:
            return
        phase, stage = known
        stage = stage or self._running_stage()
        if not self._begun:
            # an earlier one may have failed
            self._steps = 0
        self._begun.append((name, self.depth))
        if phase is not None and stage is not None:
            self.enter(phase, stage)

    def _ends(self, name: str, *, failed: bool = False) -> None:
        # What began before the wrappers were there is none of theirs; what was left without an end
        # is over with what it is within.
        for place in reversed(range(len(self._begun))):
            if self._begun[place][0] == name:
                depth = self._begun[place][1]
                del self._begun[place:]
                self.leave(depth, failed=failed)
                return

    def _running_stage(self) -> str | None:
        stage = self._state.stage
        name: str | None = (
            None if stage is None else stage._value_
            # quicker than a hash of Lightning's own enumeration
        )
        return name if name in STEPS else None

    def _phase_of(self, name: str) -> tuple[str | None, str | None] | None:
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def _look_up(self, name: str) -> tuple[str | None, str | None] | None:
        trainer = self._trainer()
        if name.endswith(BEFORE_STEP):
            return (
                (OTHER, "train")
                if trainer is not None and _has_hook_before_step(trainer, name)
                else None
            )
        if name.endswith(CLIP):
            does_clip = trainer is not None and (
                trainer.gradient_clip_val or _is_overridden(trainer.lightning_module, CLIP)
            )
            return ("clip", "train") if does_clip else None
        return next((known for end, known in ACTIONS.items() if name.endswith(end)), None)


class _Action:
    """Tells of an action that is a phase, each time that it is entered."""

    def __init__(self, phases: TrainerPhases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> str:
        with self._phases.boundary:
            self._phases._begins(self._name)  # noqa: SLF001 - the two are one
        return self._name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._phases.boundary:
            self._phases._ends(self._name, failed=kind is not None)  # noqa: SLF001


def phases_of(trainer: Any) -> TrainerPhases:
    """The phases of a Trainer, which all its monitors share."""
    if trainer not in _PHASES:
        _PHASES[trainer] = TrainerPhases(trainer)
    return _PHASES[trainer]


def _name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return str(args[0] if args else kwargs.get("action_name", ""))


def _has_hook_before_step(trainer: Any, action: str) -> bool:
    """Whether somebody but a monitor has a hook there.

    In a monitor's the phase of the optimizer begins, so that is no phase itself.
    """
    others = [each for each in trainer.callbacks if not isinstance(each, PhaseListener)]
    is_monitors = any(
        action == f"[Callback]{each.state_key}.{BEFORE_STEP}"
        for each in trainer.callbacks
        if each not in others
    )
    return not is_monitors and any(
        _is_overridden(each, BEFORE_STEP) for each in (trainer.lightning_module, *others)
    )


def _is_overridden(owner: Any, hook: str) -> bool:
    home: str = getattr(getattr(owner, hook, None), "__module__", "")
    return not (
        home.startswith(("lightning.pytorch.", "pytorch_lightning."))
        and home.endswith(DEFAULT_HOOKS)
    )


_PHASES: WeakKeyDictionary[Any, TrainerPhases] = WeakKeyDictionary()

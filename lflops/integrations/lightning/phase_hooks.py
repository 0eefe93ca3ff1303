"""Detect the phases of a Trainer from calls of its profiler and its callbacks.

Lightning reports each fetch of a batch, its host-to-device copy, each step of a stage, the
optimizer's step and gradient clipping to its profiler, in automatic and in manual optimization.
Backward begins and ends with callback hooks, and the optimizer's own work begins with a callback
hook:

    [data] [transfer]  optimizer_step: (training_step: [forward])
    on_before_backward: [backward]  on_before_optimizer_step: [optimizer]

So two or three methods of the profiler are wrapped from the begin of the run to its end. With
several ranks, Lightning's internal collectives are wrapped as well, because ranks wait for each
other in them.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from lflops.attribution.hooks import hook_optimizers
from lflops.error_guard import CleanupStack, ErrorGuard, wrap
from lflops.monitoring.inputs.phases import Phases
from lflops.phase_log import RUN
from lflops.timing.step_phases import OTHER, SYNC

SYNCHRONIZING = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
"""Methods of the strategy: Lightning's internal collectives."""

SIGTERM_CHECK = "_broadcast_sigterm_tensor"
"""Method of the training epoch loop: a broadcast before each batch in newer versions."""

RUNNING = None
"""Stands for the running stage."""

LOADING = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
"""Methods of the strategy that read a checkpoint or load its contents."""

STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""The method of a LightningModule that receives a batch, by stage."""

ACTIONS: dict[str, tuple[str | None, str | None]] = {
    "train_dataloader_next": ("data", "train"),
    "val_next": ("data", "validate"),
    "test_next": ("data", "test"),
    "predict_next": ("data", "predict"),
    ".batch_to_device": ("transfer", RUNNING),
    ".training_step": ("forward", "train"),
    ".validation_step": ("forward", "validate"),
    ".test_step": ("forward", "test"),
    ".predict_step": ("forward", "predict"),
    "save_checkpoint": ("checkpoint_save", RUN),
    # no phase itself, but phases that begin within it end with it
    "optimizer_step": (None, "train"),
}
"""Phase and stage of actions of the profiler, by the end of their names."""

CLIP, BEFORE_STEP = "configure_gradient_clipping", "on_before_optimizer_step"
"""Actions that are phases of the training stage if a hook does something in them."""

DEFAULT_HOOKS = (".core.hooks", ".core.module", ".callbacks.callback")
"""Modules of Lightning that contain the default hooks, which do nothing."""


class PhaseListener:
    """Base class of monitors, whose hooks report phases."""


class TrainerPhases(Phases):
    """The phases of one Trainer, which all its monitors share.

    They occur in every step, so each does little work, and none twice.

    Attributes:
        has_ledger: Set if one of the monitors keeps the ledger.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.has_ledger = False
        # Weak, because `_PHASES` keeps this object as long as the Trainer lives.
        self._trainer = ref(trainer)
        self._state = trainer.state
        # phase and stage of each action, or `None` for actions that are no phase
        self._known: dict[str, tuple[str | None, str | None] | None] = {}
        # running actions, with the number of phases around them
        self._begun: list[tuple[str, int]] = []
        self._contexts: dict[str, AbstractContextManager[str]] = {}
        # number of nested optimizer steps that are running
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
        """Add a monitor until its `undo` is closed. Removing the last monitor removes the wrappers.

        `close` ends the monitor's run if the Trainer ends without calling its callbacks.

        Returns the number of monitors.
        """
        undo.add(self._leave, boundary)
        self._users[boundary] = close
        if len(self._users) == 1:
            self._install(self._trainer())
        return len(self._users)

    def _leave(self, boundary: ErrorGuard) -> None:
        self._users.pop(boundary, None)
        if not self._users:
            self._undo.close()
            self.clear()
            trainer = self._trainer()
            if trainer is not None:
                _PHASES.pop(trainer, None)

    def backward_begins(self, loss: Any) -> None:
        """Begin backward, from the callback hook before it."""
        if self.innermost != "backward":
            self.enter("backward", "train", (loss,))
            self.hook_wait(loss)

    def backward_ends(self) -> None:
        if self.innermost == "backward":
            self.leave(self.depth - 1)

    def optimizer_begins(self) -> None:
        """Begin the optimizer's own work, from the callback hook before it."""
        # It ends with the optimizer's step. With a closure this step is already running; with mixed
        # precision it has yet to begin.
        if self.innermost != "optimizer":
            self.enter("optimizer", "train")

    def _install(self, trainer: Any) -> None:
        strategy = trainer.strategy
        profiler = trainer.profiler
        guard = self.boundary.guard
        hook_optimizers(self._undo, guard(self._step_begins), guard(self._step_ends))
        wrap(self._undo, profiler, "start", self._start)
        wrap(self._undo, profiler, "stop", self._stop)
        if type(profiler).__name__ == "PassThroughProfiler":
            wrap(self._undo, profiler, "profile", self._profile)
        for name in LOADING:
            if hasattr(strategy, name):
                wrap(self._undo, strategy, name, partial(self.call_in, "checkpoint_load", RUN))
        wrap(self._undo, strategy, "teardown", self._torn_down)
        # This method calls all loggers.
        connector = getattr(trainer, "_logger_connector", None)
        if hasattr(connector, "log_metrics"):
            wrap(self._undo, connector, "log_metrics", partial(self.call_in, "logging", RUN))
        self.awaits_others = trainer.world_size > 1
        if self.awaits_others:
            for name in SYNCHRONIZING:
                self._wrap_collective(strategy, name)
            self._wrap_collective(trainer.fit_loop.epoch_loop, SIGTERM_CHECK)

    def _wrap_collective(self, owner: Any, name: str) -> None:
        if hasattr(owner, name):
            wrap(self._undo, owner, name, self._synchronize)

    def _fail(self, error: BaseException) -> None:
        for each in [*self._users]:
            each.contains(error)

    def _torn_down(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End all runs with the Trainer.

        Lightning does not call the monitors if others replaced its callbacks, for example after a
        failed search for a learning rate.
        """
        with self.boundary:
            for close in [*self._users.values()]:
                # The program may be handling an unrelated exception.
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
        """Replace Lightning's method, which makes a generator for each action.

        A generator would take longer than everything that is done here. Actions that are no phase
        and that Lightning itself named get a context of Python.
        """
        name = _name(args, kwargs)
        context = self._contexts.get(name)
        if context is not None:
            return context
        is_lightnings = name.startswith("[") or name == "run_training_batch"
        if not is_lightnings:
            return call(*args, **kwargs)
        if self._phase_of(name) is None:
            context = nullcontext(name)
        else:
            context = _Action(self, name)
        self._contexts[name] = context
        return context

    def _synchronize(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._running_stage()
        if stage is None:
            return call(*args, **kwargs)
        return self.call_in(SYNC, stage, call, *args, **kwargs)

    def _begins(self, name: str) -> None:
        known = self._phase_of(name)
        if known is None:
            return
        phase, stage = known
        stage = stage or self._running_stage()
        if not self._begun:
            # An earlier step may have failed without calling its hook.
            self._steps = 0
        self._begun.append((name, self.depth))
        if phase is not None and stage is not None:
            self.enter(phase, stage)

    def _ends(self, name: str, *, failed: bool = False) -> None:
        # An action that began before the wrappers were installed is unknown. An action without an
        # end is over when the action around it ends.
        for place in reversed(range(len(self._begun))):
            begun, depth = self._begun[place]
            if begun == name:
                del self._begun[place:]
                self.leave(depth, failed=failed)
                return

    def _running_stage(self) -> str | None:
        stage = self._state.stage
        if stage is None:
            return None
        # This attribute of an enumeration is faster than hashing its member.
        name: str = stage._value_
        return name if name in STEPS else None

    def _phase_of(self, name: str) -> tuple[str | None, str | None] | None:
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def _look_up(self, name: str) -> tuple[str | None, str | None] | None:
        trainer = self._trainer()
        if name.endswith(BEFORE_STEP):
            is_phase = trainer is not None and _has_hook_before_step(trainer, name)
            return (OTHER, "train") if is_phase else None
        if name.endswith(CLIP):
            clips = trainer is not None and (
                trainer.gradient_clip_val or _is_overridden(trainer.lightning_module, CLIP)
            )
            return ("clip", "train") if clips else None
        return next((known for end, known in ACTIONS.items() if name.endswith(end)), None)


class _Action:
    """A context that reports an action as a phase each time that it is entered."""

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
    """Whether the action before the optimizer's step runs a hook other than a monitor's.

    In the hook of a monitor the phase of the optimizer begins, so it is no phase itself.
    """
    owners = [trainer.lightning_module]
    for callback in trainer.callbacks:
        is_monitor = isinstance(callback, PhaseListener)
        if is_monitor and action == f"[Callback]{callback.state_key}.{BEFORE_STEP}":
            return False
        if not is_monitor:
            owners.append(callback)
    return any(_is_overridden(owner, BEFORE_STEP) for owner in owners)


def _is_overridden(owner: Any, hook: str) -> bool:
    home: str = getattr(getattr(owner, hook, None), "__module__", "")
    is_lightnings = home.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return not (is_lightnings and home.endswith(DEFAULT_HOOKS))


_PHASES: WeakKeyDictionary[Any, TrainerPhases] = WeakKeyDictionary()

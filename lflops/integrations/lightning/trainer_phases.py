"""Detect the phases of a Trainer's steps from calls of its profiler and its callbacks.

In automatic and in manual optimization, Lightning reports the following to its profiler: each fetch
of a batch, its host-to-device copy, each step of a stage, the optimizer's step, and gradient
clipping. Callback hooks show when backward begins and ends, and when the optimizer's own work
begins. The names in brackets are phases:

    [data] [transfer]  optimizer_step: (training_step: [forward])
    on_before_backward: [backward]  on_before_optimizer_step: [optimizer]

An action is a piece of work that Lightning reports to its profiler by name. During the run, two or
three methods of the profiler are wrapped. Lightning calls them about thirty times in a step, and
most actions are not phases. The default profiler does nothing, so its methods are replaced with
functions written in C. For actions that are not phases, no Python code of lflops runs. With several
ranks, Lightning's internal collectives are wrapped too, because ranks wait for each other in them.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import ContextDecorator, nullcontext
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from lflops.attribution.hooks import hook_optimizers, unless_compiled
from lflops.error_guard import CleanupStack, ErrorGuard, wrap
from lflops.monitoring.inputs.phases import Phases
from lflops.phase_log import LEAVE, RUN
from lflops.timing.step_phases import OTHER, SYNC

SYNCHRONIZING = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
"""Methods of Lightning's strategy that are collectives."""

SIGTERM_CHECK = "_broadcast_sigterm_tensor"
"""Name of a method of Lightning's training epoch loop. The method runs a collective.

Newer versions of Lightning call it before each batch.
"""

RUNNING = None
"""Used instead of a stage name, such as "train". It means the stage that is currently running."""

LOADING = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
"""Methods of the strategy that read a checkpoint or load its contents."""

STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""For each stage, the method of a LightningModule that receives a batch."""

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
    # This action is not a phase, but phases that begin inside it end with it.
    "optimizer_step": (None, "train"),
}
"""Maps the end of an action's name in Lightning's profiler to the action's phase and stage.

Other actions are not listed, because they are not phases. The stage `RUN` means that the action is
not part of a step.
"""

# Actions that are phases of the training stage only if a hook does something in them.
CLIP = "configure_gradient_clipping"
BEFORE_STEP = "on_before_optimizer_step"

PROFILER_METHODS = {"start", "stop", "profile"}
"""Methods of Lightning's profiler that are wrapped or replaced."""

MOST_ACTIONS = 512
"""Maximum number of actions whose context objects are kept, so that they can be used again."""

DEFAULT_HOOKS = (".core.hooks", ".core.module", ".callbacks.callback")
"""Suffixes of the names of Lightning's Python modules that define the default, empty hooks."""


class PhaseListener:
    """Base class of monitors.

    It lets `_has_hook_before_step` recognize monitors among the callbacks of a Trainer.
    """


class TrainerPhases(Phases):
    """Detects the phases of one Trainer, for all monitors of this Trainer.

    This code runs in every step. Therefore it does little work, and only once for all monitors.

    Attributes:
        has_ledger: Set if one of the monitors keeps the ledger, the time account of the run.
        actions: The running actions, with the number of phases that were running when the action
            began.
        context_of: Returns the context in which Lightning runs an action.
        optimizer_steps: The number of optimizer steps that are running. It may be more than 1,
            because an optimizer may call another optimizer.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.has_ledger = False
        # A weak reference, because `_PHASES` keeps this object as long as the Trainer is alive.
        self._trainer = ref(trainer)
        self._state = trainer.state
        # a cache written in C, which calls `_new_context` only for new actions
        self._usual_contexts: Callable[[str], Any] = lru_cache(MOST_ACTIONS)(self._new_context)
        self.context_of: Callable[[str], Any] = self._usual_contexts
        self._context_wrappers: list[Callable[[str, Any], Any]] = []
        self._replaced_profile: _Shortcut | None = None
        self.actions: list[tuple[str, int]] = []
        self.optimizer_steps = 0
        self._users: dict[ErrorGuard, Callable[[BaseException | None], None]] = {}
        self.guard = ErrorGuard(self._fail)
        self._undo = CleanupStack()

    def join(
        self,
        guard: ErrorGuard,
        undo: CleanupStack,
        close: Callable[[BaseException | None], None],
    ) -> int:
        """Add a monitor, and return the number of monitors.

        Adding the first monitor installs the wrappers around the profiler's methods. Removing the
        last monitor removes them.

        Args:
            guard: Error guard of the monitor.
            undo: Cleanup stack of the monitor. Closing this stack removes the monitor.
            close: Ends the run of the monitor. It is called if the Trainer ends without calling its
                callbacks.
        """
        undo.add(self._leave, guard)
        self._users[guard] = close
        if len(self._users) == 1:
            self._install(self._trainer())
        return len(self._users)

    def _leave(self, guard: ErrorGuard) -> None:
        self._users.pop(guard, None)
        if not self._users:
            self._undo.close()
            self.awaits_others = False
            self.clear()
            trainer = self._trainer()
            if trainer is not None:
                _PHASES.pop(trainer, None)

    def _install(self, trainer: Any) -> None:
        strategy = trainer.strategy
        profiler = trainer.profiler
        begins = unless_compiled(self._step_begins, self.guard)
        ends = unless_compiled(self._step_ends, self.guard)
        hook_optimizers(self._undo, begins, ends)
        does_nothing = type(profiler).__name__ == "PassThroughProfiler"
        if does_nothing and not PROFILER_METHODS & vars(profiler).keys():
            self._replace(profiler, "start", self._begin_action)
            self._replace(profiler, "stop", self._end_action)
            self._replace_profile(profiler)
            self._undo.add(self._restore_profile, profiler)
        else:
            wrap(self._undo, profiler, "start", self._start)
            wrap(self._undo, profiler, "stop", self._stop)
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

    def _replace(self, profiler: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of the default profiler. The original method does nothing.

        It is restored when the last monitor is removed.
        """
        shortcut = _Shortcut(function)
        shortcut.lflops_method = getattr(profiler, name)
        self._undo.add(_restore, profiler, name, shortcut)
        setattr(profiler, name, shortcut)

    def _replace_profile(self, profiler: Any) -> None:
        """Replace the profiler's method `profile`, or the function that replaces it already."""
        original = profiler.profile
        if self._replaced_profile is not None:
            original = self._replaced_profile.lflops_method
        self._replaced_profile = _Shortcut(self.context_of)
        self._replaced_profile.lflops_method = original
        profiler.profile = self._replaced_profile

    def _restore_profile(self, profiler: Any) -> None:
        if self._replaced_profile is not None:
            _restore(profiler, "profile", self._replaced_profile)
            self._replaced_profile = None

    def wrap_contexts(self, wrapper: Callable[[str, Any], Any]) -> Callable[[], None]:
        """Wrap the context manager in which each action of the Trainer runs.

        An action is a call that Lightning's profiler would time, such as a hook. `wrapper` gets the
        name of an action and its context manager, and returns another context manager. Several
        wrappers can be active at the same time. Calling the returned function removes this one.
        """
        self._context_wrappers.append(wrapper)
        self._update_contexts()

        def remove() -> None:
            self._context_wrappers.remove(wrapper)
            self._update_contexts()

        return remove

    def _update_contexts(self) -> None:
        wrappers = tuple(self._context_wrappers)

        def wrapped(name: str) -> Any:
            context = self._usual_contexts(name)
            for wrapper in wrappers:
                context = wrapper(name, context)
            return context

        self.context_of = lru_cache(MOST_ACTIONS)(wrapped) if wrappers else self._usual_contexts
        profiler: Any = getattr(self._trainer(), "profiler", None)
        replaced = self._replaced_profile
        if replaced is not None and vars(profiler).get("profile") is replaced:
            self._replace_profile(profiler)

    def _wrap_collective(self, owner: Any, name: str) -> None:
        if hasattr(owner, name):
            wrap(self._undo, owner, name, self._synchronize)

    def _fail(self, error: BaseException) -> None:
        """Pass an error that occurred in this object to the error guards of all monitors."""
        for each in [*self._users]:
            each.contains(error)

    def _torn_down(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End the runs of all monitors when the Trainer is torn down.

        Usually, Lightning has already called the monitors as callbacks, and their runs have ended.
        But if the callbacks of the Trainer were replaced, for example after a failed search for a
        learning rate, Lightning does not call the monitors.
        """
        with self.guard:
            for close in [*self._users.values()]:
                # The program may be handling an unrelated exception.
                close(sys.exc_info()[1] if self._state.status == "interrupted" else None)
        return call(*args, **kwargs)

    def _step_begins(self, *_: object) -> None:
        self.optimizer_steps += 1

    def _step_ends(self, *_: object) -> None:
        self.optimizer_steps -= 1
        running = self.running
        if self.optimizer_steps <= 0 and running and running[-1][0] == "optimizer":
            self.leave(len(running) - 1)

    def _start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        self._begin_action(*args, **kwargs)
        return result

    def _stop(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_action(*args, **kwargs)
        return call(*args, **kwargs)

    def _begin_action(self, action_name: str) -> None:
        self.context_of(action_name).__enter__()

    def _end_action(self, action_name: str) -> None:
        self.context_of(action_name).__exit__(None, None, None)

    def _new_context(self, action_name: str) -> "_Action | _NoPhase":
        """Create the context of an action. The same context is used each time the action runs."""
        known = None
        try:
            known = self._look_up(action_name)
        except BaseException as error:
            if not self.guard.contains(error):
                raise
        return _NoPhase(action_name) if known is None else _Action(self, action_name, *known)

    def _synchronize(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self.running_stage()
        if stage is None:
            return call(*args, **kwargs)
        return self.call_in(SYNC, stage, call, *args, **kwargs)

    def running_stage(self) -> str | None:
        stage = self._state.stage
        if stage is None:
            return None
        # This attribute of an enumeration is faster than hashing its member.
        name: str = stage._value_
        return name if name in STEPS else None

    def _look_up(self, name: str) -> tuple[str | None, str | None] | None:
        """Return the phase of an action, and the stage (such as validation) that it belongs to.

        Returns `None` if the action is not a phase and no phases run inside it.
        """
        trainer = self._trainer()
        if name.endswith(BEFORE_STEP):
            is_phase = trainer is not None and _has_hook_before_step(trainer, name)
            return (OTHER, "train") if is_phase else None
        if name.endswith(CLIP):
            clips = trainer is not None and (
                trainer.gradient_clip_val or _is_overridden(trainer.lightning_module, CLIP)
            )
            return ("clip", "train") if clips else None
        for ending, phase_and_stage in ACTIONS.items():
            if name.endswith(ending):
                return phase_and_stage
        return None


class _NoPhase(nullcontext[str], ContextDecorator):
    """A context for an action that is not a phase."""


class _Action(ContextDecorator):
    """A context that reports an action as a phase each time it is entered."""

    def __init__(
        self, phases: TrainerPhases, name: str, phase: str | None, stage: str | None
    ) -> None:
        self._phases = phases
        self._name = name
        self._phase = phase
        self._stage = stage

    def __enter__(self) -> str:
        phases = self._phases
        try:
            if not phases.actions:
                # An earlier step may have failed without calling its hook.
                phases.optimizer_steps = 0
            phases.actions.append((self._name, len(phases.running)))
            if self._phase is not None:
                stage = self._stage or phases.running_stage()
                if stage is not None:
                    phases.enter(self._phase, stage)
        except BaseException as error:
            if not phases.guard.contains(error):
                raise
        return self._name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        phases = self._phases
        actions = phases.actions
        running = phases.running
        try:
            # An action that began before the wrappers were installed is not in `actions`. An action
            # whose end was not reported is over when an action around it ends.
            for place in range(len(actions) - 1, -1, -1):
                name, depth = actions[place]
                if name == self._name:
                    del actions[place:]
                    if len(running) - 1 == depth and not running[depth][1] and kind is None:
                        # This is what `leave` does for one phase without listeners, as in most
                        # steps.
                        running.pop()
                        phases.log.append((phases.log.clock(), LEAVE, None, None))
                    elif len(running) > depth:
                        phases.leave(depth, failed=kind is not None)
                    break
        except BaseException as error:
            if not phases.guard.contains(error):
                raise


class _Shortcut(partial[Any]):
    """A function of lflops that replaces a method of the default profiler.

    Calling it runs only the function, and no other Python code. It looks like the original method,
    and copying or pickling it returns the original method.

    Attributes:
        lflops_method: The original method.
    """

    lflops_method: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        if name == "lflops_method":
            raise AttributeError(name)
        return getattr(self.lflops_method, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.lflops_method)

    def __eq__(self, other: object) -> bool:
        return bool(self.lflops_method == other)

    def __hash__(self) -> int:
        return hash(self.lflops_method)

    def __repr__(self) -> str:
        return repr(self.lflops_method)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.lflops_method, memo)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self.lflops_method,)


def _restore(profiler: Any, name: str, shortcut: _Shortcut) -> None:
    if vars(profiler).get(name) is shortcut:
        delattr(profiler, name)


def phases_of(trainer: Any) -> TrainerPhases:
    """Return the `TrainerPhases` of a Trainer. All its monitors get the same object."""
    if trainer not in _PHASES:
        _PHASES[trainer] = TrainerPhases(trainer)
    return _PHASES[trainer]


def _has_hook_before_step(trainer: Any, action: str) -> bool:
    """Return whether an `on_before_optimizer_step` action is a phase.

    It is a phase if it runs a user's hook. An action that only calls the hook of an lflops monitor
    is not a phase, because that hook begins the optimizer phase.

    Args:
        trainer: The Trainer.
        action: Name of the action.
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

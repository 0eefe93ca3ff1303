"""Events at the beginning and end of each training phase, by instance attributes on the Trainer's strategy and profiler alone.

Lightning looks the strategy's methods up on the instance at each call, in automatic and in manual optimization. It reports every fetch of a
batch, and the clipping of gradients, to its profiler, whichever that is. Callback hooks are too few. None comes after the optimizer's step.
The first one before that step comes before forward, because the step calls forward.

With several ranks the training's loop has such an attribute too: its check for SIGTERM is a broadcast, in which ranks wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lflops.collect.timing.step_phases import OTHER, SYNC
from lflops.lightning.stages import STAGES
from lflops.session.inputs.phases import Listener
from lflops.session.inputs.wrappers import Wrappers

__all__ = ["listen"]

ALL = "all"
"""Receives the phases of the stage that is running."""

METHODS = {
    "batch_to_device": ("transfer", ALL),
    **{stage.step: ("forward", name) for name, stage in STAGES.items()},
    "backward": ("backward", "train"),
}
"""Of the strategy: the phase that it is, and whose. `optimizer_step` is the phase `optimizer`."""

SYNCHRONIZING = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
"""Of the strategy: Lightning's own collectives, in which ranks wait for each other."""

SIGTERM_CHECK = "_broadcast_sigterm_tensor"
"""Of the training's loop: a broadcast before each batch, in newer Lightnings."""

FETCHES = {"train_dataloader_next": "train", "val_next": "validate", "test_next": "test", "predict_next": "predict"}
CLIP, BEFORE_STEP = "configure_gradient_clipping", "on_before_optimizer_step"
"""Actions of the profiler, by the end of their names. The hook before the optimizer's step runs within the step's method."""

DEFAULT_HOOKS = (".core.hooks", ".core.module", ".callbacks.callback")
"""Where Lightning keeps the hooks that do nothing unless somebody gives them something to do."""


_ActionCallback = Callable[[str], None]
_PhaseOfStage = tuple[str, str]
"""A phase, and the stage that it belongs to."""


def listen(trainer: Any, stage: str, listener: Listener) -> Callable[[], None]:
    """Tell a listener of a stage's phases, until what is returned is called.

    All listeners share the wraps: the first one's are put on, and are taken off with the last.
    """
    hooks = _HOOKS.get(trainer)
    if hooks is None:
        hooks = _HOOKS[trainer] = _PhaseHooks(trainer)
    listeners = hooks.listeners
    for each in (stage, ALL):
        listeners[each] = (*listeners[each], listener)

    def undo() -> None:
        for each in (stage, ALL):
            listeners[each] = tuple(other for other in listeners[each] if other is not listener)
        if not listeners[ALL] and _HOOKS.get(trainer) is hooks:
            del _HOOKS[trainer]
            hooks.wrappers.uninstall()

    return undo


class _PhaseHooks:
    """Those of one Trainer. They run in every step of the training, so they do little, and nothing twice."""

    def __init__(self, trainer: Any) -> None:
        """Put them on."""
        self.listeners: dict[str, tuple[Listener, ...]] = dict.fromkeys((*STAGES, ALL), ())
        self.wrappers = Wrappers()
        self._running = trainer.state  # not the Trainer: what is kept as long as it lives must not keep it
        try:
            self._install_all(trainer)
        except BaseException:
            self.wrappers.uninstall()
            raise

    def _install_all(self, trainer: Any) -> None:
        strategy, profiler = trainer.strategy, trainer.profiler
        for name, (phase, stage) in METHODS.items():
            self._install(strategy, name, phase, stage)
        self.wrappers.install(strategy, "optimizer_step", _tell_of_step, strategy.optimizer_step, self.listeners)
        actions = _actions(trainer)
        if trainer.world_size > 1:
            synchronizing = [(strategy, name) for name in SYNCHRONIZING] + [(trainer.fit_loop.epoch_loop, SIGTERM_CHECK)]
            for owner, name in synchronizing:
                if hasattr(owner, name):
                    self._install(owner, name, SYNC, ALL)
        for name, wrapper in zip(("start", "stop"), self._with_actions(profiler.start, profiler.stop, actions), strict=True):
            self.wrappers.install(profiler, name, wrapper)
        if type(profiler).__name__ == "PassThroughProfiler":
            self.wrappers.install(profiler, "profile", self._replacement_of_profile(actions))

    def _install(self, owner: Any, name: str, phase: str, stage: str) -> None:
        tell, whose = (_tell_running, self._running) if stage == ALL else (_tell, stage)
        self.wrappers.install(owner, name, tell, getattr(owner, name), self.listeners, phase, whose)

    def _with_actions(
        self, start: _ActionCallback, stop: _ActionCallback, actions: dict[str, _PhaseOfStage]
    ) -> tuple[_ActionCallback, _ActionCallback]:
        known: dict[str, _PhaseOfStage | None] = {}
        begun: list[tuple[str, tuple[Listener, ...]]] = []

        def started(action_name: str) -> None:
            start(action_name)
            if action_name not in known:
                known[action_name] = _phase_of(action_name, actions)
            if (found := known[action_name]) is not None:
                phase, stage = found
                begun.append((action_name, self.listeners[stage]))
                for each in self.listeners[stage]:
                    each.enter(phase)

        def stopped(action_name: str) -> None:
            # What began before the wraps were put on is none of theirs.
            if begun and begun[-1][0] == action_name:
                for each in begun.pop()[1]:
                    each.leave()
            stop(action_name)

        return started, stopped

    def _replacement_of_profile(self, actions: dict[str, _PhaseOfStage]) -> Callable[[str], AbstractContextManager[str]]:
        """What tells of actions where Lightning's profiler does nothing.

        Its own makes a generator for each of them, and calls what does nothing twice: that takes longer than all that is done here.
        """
        contexts: dict[str, AbstractContextManager[str]] = {}

        def profile(action_name: str) -> AbstractContextManager[str]:
            context = contexts.get(action_name)
            if context is None:
                known = _phase_of(action_name, actions)
                context = contexts[action_name] = nullcontext(action_name) if known is None else _Action(self, action_name, known)
            return context

        return profile


_Listeners = Mapping[str, Sequence[Listener]]
"""By stage."""


def _tell(call: Callable[..., Any], listeners_of: _Listeners, phase: str, stage: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method, and tell of it as a phase of a stage. What it takes is bound to it, which touches less memory than a closure does."""
    listeners = listeners_of[stage]
    for each in listeners:
        each.enter(phase, args)
    try:
        result = call(*args, **kwargs)
    except BaseException:
        for each in listeners:
            each.drop()
        raise
    for each in listeners:
        each.leave()
    return result


def _tell_running(call: Callable[..., Any], listeners_of: _Listeners, phase: str, running: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same of the stage that is running. That is asked by its value, which is quicker than a hash of Lightning's own enumeration."""
    stage = running.stage
    if stage is None or stage._value_ not in listeners_of:
        return call(*args, **kwargs)
    return _tell(call, listeners_of, phase, stage._value_, *args, **kwargs)


def _tell_of_step(
    method: Callable[..., Any], listeners_of: _Listeners, /, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    """The same of the optimizer's. What its closure runs is part of what the step is called in, training_step if that is by hand."""
    around = OTHER
    for each in listeners_of["train"]:
        if each.innermost:  # what follows no phase has none
            around = each.innermost
            break
    return _tell(
        method, listeners_of, "optimizer", "train", optimizer, partial(_tell, closure, listeners_of, around, "train"), *args, **kwargs
    )


class _Action:
    """Tells of an action that is a phase, each time that it is entered."""

    def __init__(self, hooks: _PhaseHooks, name: str, known: _PhaseOfStage) -> None:
        self._hooks = hooks
        self._name = name
        self._phase, self._stage = known
        self._told: list[tuple[Listener, ...]] = []

    def __enter__(self) -> str:
        listeners = self._hooks.listeners[self._stage]
        self._told.append(listeners)
        for each in listeners:
            each.enter(self._phase)
        return self._name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for each in self._told.pop():
            if kind is None:
                each.leave()
            else:
                each.drop()


def _phase_of(action_name: str, actions: dict[str, _PhaseOfStage]) -> _PhaseOfStage | None:
    return next((known for end, known in actions.items() if action_name.endswith(end)), None)


def _actions(trainer: Any) -> dict[str, _PhaseOfStage]:
    """What to listen for. A hook that does nothing is not worth a mark."""
    module = trainer.lightning_module
    actions = {action: ("data", stage) for action, stage in FETCHES.items()}
    if trainer.gradient_clip_val or _is_overridden(module, CLIP):
        actions[CLIP] = "clip", "train"
    if any(_is_overridden(each, BEFORE_STEP) for each in (module, *trainer.callbacks)):
        actions[BEFORE_STEP] = OTHER, "train"
    return actions


def _is_overridden(owner: Any, hook: str) -> bool:
    home: str = getattr(getattr(owner, hook, None), "__module__", "")
    return not (home.startswith(("lightning.pytorch.", "pytorch_lightning.")) and home.endswith(DEFAULT_HOOKS))


_HOOKS: WeakKeyDictionary[Any, _PhaseHooks] = WeakKeyDictionary()

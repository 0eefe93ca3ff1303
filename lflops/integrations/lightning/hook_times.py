"""Time the hooks of callbacks and of the LightningModule that run outside all phases.

A phase is a part of a step, such as forward. Lightning reports each hook to its profiler as an
action. In most steps, these actions run no Python code of lflops. In module-timing steps, in which
lflops times every module, the context of each action is wrapped in a context that also reads a
clock.
"""

from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from time import perf_counter
from typing import Any

from lflops.integrations.lightning.trainer_phases import (
    CLIP,
    STEPS,
    PhaseListener,
    TrainerPhases,
)
from lflops.monitoring.inputs.training import HookTimes
from lflops.timing.step_phases import OTHER

OWNERS = ("[Callback]", "[LightningModule]")
"""Prefixes of action names. An action is a hook if its name begins with one of them."""

TIMED_AS_PHASES = {*STEPS.values(), "backward", "optimizer_step", CLIP}
"""Hooks that are not timed here, because they are phases or contain phases."""


class LightningHookTimes(HookTimes):
    """The seconds of each hook of one Trainer, summed over the steps in which hooks are timed."""

    def __init__(self, trainer: Any, phases: TrainerPhases) -> None:
        self.seconds: dict[str, float] = {}
        self._phases = phases
        self._monitors: set[str] = set()
        for callback in trainer.callbacks:
            key: str = callback.state_key
            if isinstance(callback, PhaseListener):
                self._monitors.add(key)
        self._restore: Callable[[], None] | None = None
        # For each running action, the time at which it began, and the seconds of the actions that
        # have run inside it.
        self.running: list[list[float]] = []

    def start(self) -> None:
        if self._restore is None:
            self.running.clear()
            self._restore = self._phases.wrap_contexts(partial(_TimedAction, self))

    def stop(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    def label_of(self, action: str) -> str | None:
        """Return the class and the method of a hook; `None` if the action is not timed."""
        kind, _, name = action.partition("]")
        owner, _, method = name.rpartition(".")
        if f"{kind}]" not in OWNERS or method in TIMED_AS_PHASES or owner in self._monitors:
            return None
        # The name of a callback may end with its settings in braces.
        class_name = owner.partition("{")[0]
        return f"{class_name}.{method}"

    def begin(self) -> None:
        self.running.append([perf_counter(), 0.0])

    def end(self, label: str | None, *, is_outside: bool) -> None:
        """End the innermost action, and add its time to its hook if it is outside all phases.

        The time of other actions inside the action is not included.
        """
        if not self.running:
            return
        begin, inner = self.running.pop()
        took = perf_counter() - begin
        if self.running:
            self.running[-1][1] += took
        if label is not None and is_outside:
            self.seconds[label] = self.seconds.get(label, 0.0) + took - inner

    def is_outside_phases(self) -> bool:
        """Return whether no phase is running, or only the phase `OTHER`, in which hooks run."""
        return self._phases.innermost in {None, OTHER}


class _TimedAction(ContextDecorator):
    """A context that times an action. It also enters the context that the action usually has."""

    def __init__(self, times: LightningHookTimes, name: str, usual: Any) -> None:
        self._times = times
        self._label = times.label_of(name)
        self._usual = usual
        # Whether the action is outside all phases. This is a list, because an action can run inside
        # itself.
        self._are_outside: list[bool] = []

    def __enter__(self) -> Any:
        result = self._usual.__enter__()
        self._are_outside.append(self._times.is_outside_phases())
        self._times.begin()
        return result

    def __exit__(self, *error: object) -> None:
        if self._are_outside:
            self._times.end(self._label, is_outside=self._are_outside.pop())
        self._usual.__exit__(*error)

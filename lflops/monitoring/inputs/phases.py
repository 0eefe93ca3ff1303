"""Track the phases of a training run, such as forward and backward.

An integration, such as the one for Lightning, reports when a phase begins or ends. The phase is
added to a log, and listeners are called.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lflops.error_guard import ErrorGuard, Guard, unguarded
from lflops.ledger.deferred import DeferredCalls
from lflops.phase_log import DROP, ENTER, LEAVE, MANY, WAIT, PhaseLog
from lflops.profile.records import Phase
from lflops.timing.clock import HostClock
from lflops.torch_private.autograd import after_backward


class Listener(Protocol):
    """An object that is called immediately when a phase, such as forward, begins or ends.

    Code that can wait reads the phase log later instead.
    """

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase.

        `given` has the arguments of the method that runs as this phase, such as `training_step`.
        """

    def leave(self) -> None:
        """End the innermost phase."""

    def drop(self) -> None:
        """End the innermost phase because of an exception."""


class _GuardedListener(NamedTuple):
    """The methods of a listener, wrapped in an error guard."""

    enter: Callable[..., None]
    leave: Callable[[], None]
    drop: Callable[[], None]
    wait: Callable[[], None] | None


_Listeners = tuple[_GuardedListener, ...]


class Phases:
    """Tracks which phases of a training run, such as forward, are running.

    An integration calls this object when a phase begins or ends. Each beginning and each end is
    appended to the log. A listener that was called when a phase began is also called when the phase
    ends.

    Attributes:
        awaits_others: Whether `hook_wait` installs hooks. It is true if backward can end with a
            wait for other ranks, and only a hook can detect when this wait begins. An integration
            that detects the beginning in another way calls `wait` itself.
        guard: The error guard of the run; a placeholder until a run begins.
        log: The log of all phases.
        running: The running phases, each with its listeners; the innermost phase is the last. Only
            this class and its subclasses change the list.
        deferred: A queue of function calls that the training thread records. The thread of the
            ledger (the run's time account) makes these calls later.
    """

    awaits_others = False

    def __init__(self) -> None:
        self.guard = ErrorGuard(lambda _: None)
        self.log = PhaseLog(HostClock().mark)
        self.deferred = DeferredCalls(self.log)
        self._listeners: dict[str, _Listeners] = {}
        self.running: list[tuple[str, _Listeners]] = []
        # called after the last running phase ends
        self._goes_on: Callable[[], None] | None = None

    def listen(self, stage: str, listener: Listener, guard: Guard) -> Callable[[], None]:
        """From now on, call a listener when phases of a stage begin and end.

        Returns a function that removes the listener. A second call of this function does nothing.
        """
        # Integrations already enter phases inside the run's guard, so no second guard is needed.
        if guard == self.guard.guard:
            guard = unguarded
        wait = getattr(listener, "wait", None)
        guarded = _GuardedListener(
            enter=guard(listener.enter),
            leave=guard(listener.leave),
            drop=guard(listener.drop),
            wait=None if wait is None else guard(wait),
        )

        def undo() -> None:
            self._listeners[stage] = _without(guarded, self._listeners.get(stage, ()))
            self.running[:] = [
                (phase, _without(guarded, listeners)) for phase, listeners in self.running
            ]

        self._listeners[stage] = (*self._listeners.get(stage, ()), guarded)
        return undo

    @property
    def innermost(self) -> str | None:
        return self.running[-1][0] if self.running else None

    @property
    def depth(self) -> int:
        return len(self.running)

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase of a stage.

        `given` has the arguments of the method that runs as this phase, such as `training_step`.
        """
        log = self.log
        if len(log.events) > MANY:
            log.deliver()
        log.append((log.clock(), ENTER, phase, stage))
        listeners = self._listeners.get(stage, ())
        self.running.append((phase, listeners))
        for each in listeners:
            each.enter(phase, given)

    def call_in(
        self, phase: str, stage: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method as a phase of a stage. Listeners receive the positional arguments."""
        running = self.running
        depth = 0
        try:
            self.enter(phase, stage, args)
            depth = len(running) - 1
        except BaseException as error:
            if not self.guard.contains(error):
                raise
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self.leave_guarded(depth, failed=True)
            raise
        if len(running) - 1 == depth and not running[depth][1] and self._goes_on is None:
            # This is what `leave` does for one phase without listeners, as in most steps.
            running.pop()
            self.log.append((self.log.clock(), LEAVE, None, None))
        else:
            self.leave_guarded(depth)
        return result

    def leave_guarded(self, depth: int, *, failed: bool = False) -> None:
        """End the innermost phases until only `depth` phases run.

        The error guard handles the errors of this method.
        """
        running = self.running
        log = self.log
        try:
            is_one = len(running) - 1 == depth and not running[depth][1]
            if is_one and not failed and self._goes_on is None:
                # This is what `leave` does for one phase without listeners, as in most steps.
                running.pop()
                log.append((log.clock(), LEAVE, None, None))
            else:
                self.leave(depth, failed=failed)
        except BaseException as error:
            if not self.guard.contains(error):
                raise

    def leave(self, depth: int, *, failed: bool = False) -> None:
        """End the innermost phases until only `depth` phases run.

        `failed` is true if an exception ends the phases.
        """
        log = self.log
        running = self.running
        while len(running) > depth:
            _, listeners = running.pop()
            log.append((log.clock(), DROP if failed else LEAVE, None, None))
            for each in listeners:
                (each.drop if failed else each.leave)()
        if self._goes_on is not None and not running:
            self._goes_on()

    def hook_wait(self, *losses: Any) -> None:
        """Install a hook that calls `wait` when all autograd nodes of the first loss have run.

        At this moment, backward begins to wait until the gradients of all ranks are synchronized.
        This method does nothing if `awaits_others` is false, or if the first loss has no `grad_fn`.
        """
        node = None
        if losses:
            node = getattr(losses[0], "grad_fn", None)
        # The loss's node runs first. It registers a callback that runs after the last node.
        if self.awaits_others and node is not None:

            def first_runs(_gradients: Any) -> None:
                # Compiled autograd accepts no callback.
                if not torch.compiler.is_compiling():
                    handle.remove()
                    after_backward(self.guard.guard(partial(self.deferred.note, self.wait)))

            handle = node.register_prehook(self.guard.guard(first_runs))

    def wait(self) -> None:
        """Record that backward now only waits for other ranks, because all its nodes have run."""
        if not self.running:
            return
        phase, listeners = self.running[-1]
        if phase != "backward":
            return
        self.log.append((self.log.clock(), WAIT, None, None))
        for each in listeners:
            if each.wait is not None:
                each.wait()

    def leave_last(self, phase: str, *_: object) -> None:
        """End the innermost running phase with this name, and all phases inside it.

        If no phase with this name is running, this method does nothing.
        """
        for depth in range(len(self.running) - 1, -1, -1):
            if self.running[depth][0] == phase:
                self.leave(depth)
                return

    def clear(self) -> None:
        """Drop all listeners and all running phases."""
        self._listeners.clear()
        self.running.clear()


def _without(listener: _GuardedListener, listeners: _Listeners) -> _Listeners:
    return tuple(each for each in listeners if each is not listener)


class Within:
    """Context manager for a phase that lasts as long as the `with` block."""

    def __init__(self, phases: Phases, phase: str, stage: str, given: tuple[Any, ...]) -> None:
        self._phases = phases
        self._phase = phase
        self._stage = stage
        self._given = given
        self._outer_depth = 0

    def __enter__(self) -> None:
        phases = self._phases
        try:
            phases.enter(self._phase, self._stage, self._given)
            # Entering may have ended another phase first.
            self._outer_depth = phases.depth - 1
        except BaseException as error:
            if not phases.guard.contains(error):
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._phases.leave_guarded(self._outer_depth, failed=kind is not None)


class OutsideModules:
    """A listener that determines to which phase an operator outside all modules belongs.

    This phase is `forward` within `training_step` and similar methods, and `other` elsewhere. The
    listener passes it to `tell` whenever a phase of the training loop begins or ends.
    """

    def __init__(self, tell: Callable[[Phase], None]) -> None:
        self._tell = tell
        self._phases: list[Phase] = ["other"]

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """Pass `forward` or `other` to `tell`.

        If `training_step` itself runs backward or an optimizer, the rest of `training_step`, such
        as gradient clipping, belongs to `other`.
        """
        if phase in {"backward", "optimizer"}:
            self._phases = ["other"] * len(self._phases)
        self._phases.append("forward" if phase == "forward" else "other")
        self._tell(self._phases[-1])

    def leave(self) -> None:
        self._phases.pop()
        self._tell(self._phases[-1])

    drop = leave

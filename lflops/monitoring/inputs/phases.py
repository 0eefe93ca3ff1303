"""The phases of a training run: integrations report them, and listeners receive them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lflops.error_guard import ErrorGuard, Guard, unguarded
from lflops.ledger.keeper import DeferredCalls
from lflops.profile.records import Phase
from lflops.torch_private.autograd import after_backward

RUN = "run"
"""Stands for the stage of phases that belong to no step, such as saving a checkpoint."""


class Listener(Protocol):
    """A listener to phases."""

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase; `given` are the arguments of its method."""

    def leave(self) -> None:
        """End the innermost phase."""

    def drop(self) -> None:
        """End the innermost phase because of an exception."""


class _Ear(NamedTuple):
    """The guarded methods of a listener."""

    enter: Callable[..., None]
    leave: Callable[[], None]
    drop: Callable[[], None]
    wait: Callable[[], None] | None


class Phases:
    """The phases that a training run is in, innermost last.

    An integration enters and leaves them. A listener receives the end of every phase whose begin it
    received.

    Attributes:
        awaits_others: Set if backward may end with a wait for other ranks. An integration that
            detects the wait itself calls `wait`.
        boundary: The error guard of the run. Before a run begins, nothing is installed.
    """

    awaits_others = False

    def __init__(self) -> None:
        self.boundary = ErrorGuard(lambda _: None)
        self.tape = DeferredCalls()
        self._ears: dict[str, tuple[_Ear, ...]] = {}
        self._running: list[tuple[str, tuple[_Ear, ...]]] = []
        # called after the last running phase ends
        self._goes_on: Callable[[], None] | None = None

    def listen(self, stage: str, listener: Listener, guard: Guard) -> Callable[[], None]:
        """Call a listener for the phases of a stage.

        Returns a function that removes the listener. It can be called more than once.
        """
        # Integrations already enter phases inside the run's own guard.
        if guard == self.boundary.guard:
            guard = unguarded
        wait = getattr(listener, "wait", None)
        ear = _Ear(
            guard(listener.enter), guard(listener.leave), guard(listener.drop), wait and guard(wait)
        )

        def undo() -> None:
            self._ears[stage] = _without(ear, self._ears.get(stage, ()))
            self._running[:] = [(phase, _without(ear, ears)) for phase, ears in self._running]

        self._ears[stage] = (*self._ears.get(stage, ()), ear)
        return undo

    @property
    def innermost(self) -> str | None:
        return self._running[-1][0] if self._running else None

    @property
    def depth(self) -> int:
        return len(self._running)

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        """Begin a phase of a stage; `given` are the arguments of its method."""
        ears = self._ears.get(stage, ())
        self._running.append((phase, ears))
        for each in ears:
            each.enter(phase, given)

    def begin(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> int:
        """Begin a phase of a stage. Returns the number of phases around it."""
        self.enter(phase, stage, given)
        return len(self._running) - 1

    def call_in(
        self, phase: str, stage: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method as a phase; listeners receive its positional arguments."""
        with Within(self, phase, stage, args):
            return call(*args, **kwargs)

    def leave(self, depth: int, *, failed: bool = False) -> None:
        """End all phases beyond a depth; `failed` if an exception ends them."""
        while len(self._running) > depth:
            for each in self._running.pop()[1]:
                (each.drop if failed else each.leave)()
        if self._goes_on is not None and not self._running:
            self._goes_on()

    def hear_wait(self, *losses: Any) -> None:
        """Hook the start of gradient synchronization in backward from these losses.

        Does nothing if there are no other ranks.
        """
        node = getattr(losses[0], "grad_fn", None) if losses else None
        # The first node that runs registers a callback that runs after the last node.
        if self.awaits_others and node is not None:

            def first_runs(_gradients: Any) -> None:
                # Compiled autograd accepts no callback.
                if not torch.compiler.is_compiling():
                    handle.remove()
                    after_backward(self.boundary.guard(partial(self.tape.note, self.wait)))

            handle = node.register_prehook(self.boundary.guard(first_runs))

    def wait(self) -> None:
        """Report the wait for other ranks: every node of the backward pass has run."""
        if not self._running:
            return
        phase, ears = self._running[-1]
        if phase != "backward":
            return
        for each in ears:
            if each.wait is not None:
                each.wait()

    def leave_last(self, phase: str, *_: object) -> None:
        """End the innermost phase of a name and everything within it, if it is running."""
        depth = self.depth_of(phase)
        if depth is not None:
            self.leave(depth)

    def depth_of(self, phase: str) -> int | None:
        """Number of phases around the innermost phase of a name; `None` if it is not running."""
        # A generator would be another call for each of several phases in a step.
        for depth in range(len(self._running) - 1, -1, -1):
            if self._running[depth][0] == phase:
                return depth
        return None

    def forget(self) -> None:
        """Drop all listeners and all running phases."""
        self._ears.clear()
        self._running.clear()


def _without(ear: _Ear, ears: tuple[_Ear, ...]) -> tuple[_Ear, ...]:
    return tuple(each for each in ears if each is not ear)


class Within:
    """A phase that lasts as long as a `with` block."""

    def __init__(self, phases: Phases, phase: str, stage: str, given: tuple[Any, ...]) -> None:
        self._phases = phases
        self._of = phase, stage, given
        self._around = 0

    def __enter__(self) -> None:
        with self._phases.boundary:
            self._around = self._phases.begin(*self._of)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._phases.boundary:
            self._phases.leave(self._around, failed=kind is not None)


class OutsideModules:
    """Reports the phase of operators outside modules.

    It is forward within `training_step` and similar methods, otherwise other.
    """

    def __init__(self, tell: Callable[[Phase], None]) -> None:
        self._tell = tell
        self._phases: list[Phase] = ["other"]

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """Report forward or other.

        Operators after backward in the same `training_step` are clipping and the like.
        """
        if phase in {"backward", "optimizer"}:
            self._phases = ["other"] * len(self._phases)
        self._phases.append("forward" if phase == "forward" else "other")
        self._tell(self._phases[-1])

    def leave(self) -> None:
        self._phases.pop()
        self._tell(self._phases[-1])

    drop = leave

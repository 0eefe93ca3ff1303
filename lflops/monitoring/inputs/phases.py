"""The phases of a training as they begin and end, from any driver, and who listens to them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lflops.error_guard import ErrorGuard, Guard, unguarded
from lflops.ledger.keeper import DeferredCalls
from lflops.profile.records import Phase
from lflops.torch_private.autograd import after_backward

# in place of a stage: what belongs to no step, as saving a checkpoint
RUN = "run"


class Listener(Protocol):
    """A listener to phases."""

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """The phase begins, with what its method is given."""

    def leave(self) -> None:
        """The innermost phase ends."""

    def drop(self) -> None:
        """The innermost phase is left by an exception."""


class _Ear(NamedTuple):
    enter: Callable[..., None]
    leave: Callable[[], None]
    drop: Callable[[], None]
    wait: Callable[[], None] | None


class Phases:
    """The phases that one training is in, the innermost last; a driver enters and leaves them.

    Listeners hear ends of heard beginnings.
    """

    # whether backward may end with a wait for other ranks. A driver that finds it out tells of it
    # by `wait`
    awaits_others = False

    def __init__(self) -> None:
        self.boundary = ErrorGuard(
            lambda _: None
            # the run's; before one begins, nothing is installed
        )
        self.tape = DeferredCalls()
        self._ears: dict[str, tuple[_Ear, ...]] = {}
        self._running: list[tuple[str, tuple[_Ear, ...]]] = []
        self._goes_on: Callable[[], None] | None = (
            # called where the last running phase has ended
            None
        )

    def listen(self, stage: str, listener: Listener, guard: Guard) -> Callable[[], None]:
        """Call a listener for a stage's phases. Returns what ends that; it can be called again."""
        # phases of this training are entered within its boundary
        if guard == self.boundary.guard:
            guard = unguarded
        wait = getattr(listener, "wait", None)
        ear = _Ear(
            guard(listener.enter), guard(listener.leave), guard(listener.drop), wait and guard(wait)
        )

        def undo() -> None:
            self._ears[stage] = tuple(each for each in self._ears.get(stage, ()) if each is not ear)
            self._running[:] = [
                (phase, tuple(each for each in ears if each is not ear))
                for phase, ears in self._running
            ]

        self._ears[stage] = (*self._ears.get(stage, ()), ear)
        return undo

    @property
    def innermost(self) -> str | None:
        return self._running[-1][0] if self._running else None

    @property
    def depth(self) -> int:
        return len(self._running)

    def enter(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> None:
        """A phase of a stage begins, with what its method is given."""
        ears = self._ears.get(stage, ())
        self._running.append((phase, ears))
        for each in ears:
            each.enter(phase, given)

    def begin(self, phase: str, stage: str, given: tuple[Any, ...] = ()) -> int:
        """A phase of a stage begins. Returns how many are around it."""
        self.enter(phase, stage, given)
        return len(self._running) - 1

    def call_in(
        self, phase: str, stage: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method as a phase of a stage.

        Listeners are given the method's positional arguments.
        """
        with Within(self, phase, stage, args):
            return call(*args, **kwargs)

    def leave(self, depth: int, *, failed: bool = False) -> None:
        """All phases beyond that depth end; by an exception, if one passes."""
        while len(self._running) > depth:
            for each in self._running.pop()[1]:
                (each.drop if failed else each.leave)()
        if self._goes_on is not None and not self._running:
            self._goes_on()

    def hear_wait(self, *losses: Any) -> None:
        """Hear where backward from these losses begins to wait for other ranks, if there are others."""
        node = getattr(losses[0], "grad_fn", None) if losses else None
        if (
            self.awaits_others and node is not None
            # what runs first in backward registers what runs when all nodes have
        ):

            def first_runs(_gradients: Any) -> None:
                # compiled autograd takes no callback
                if not torch.compiler.is_compiling():
                    handle.remove()
                    after_backward(self.boundary.guard(partial(self.tape.note, self.wait)))

            handle = node.register_prehook(self.boundary.guard(first_runs))

    def wait(self) -> None:
        """Every node of the backward pass has run: what is left of it is the wait for other ranks."""
        phase, ears = self._running[-1] if self._running else ("", ())
        for each in ears if phase == "backward" else ():
            if each.wait is not None:
                each.wait()

    def leave_last(self, phase: str, *_: object) -> None:
        """The innermost phase of that name ends, and what is within it; if there is one."""
        if (depth := self.depth_of(phase)) is not None:
            self.leave(depth)

    def depth_of(self, phase: str) -> int | None:
        """How many phases are around the innermost one of that name.

        `None` where it is not running.
        """
        for depth in range(
            len(self._running) - 1,
            -1,
            -1,
            # a generator would be a call more for each of several a step
        ):
            if self._running[depth][0] == phase:
                return depth
        return None

    def forget(self) -> None:
        """Drop all listeners; no phase is running any more."""
        self._ears.clear()
        self._running.clear()


class Within:
    """A phase that lasts as long as a block."""

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
    """Listens to phases, and tells of what is outside of modules.

    Forward within training_step and its like, else other.
    """

    def __init__(self, tell: Callable[[Phase], None]) -> None:
        self._tell = tell
        self._phases: list[Phase] = ["other"]

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """Forward, or something else.

        What comes behind a backward in the same training_step is clipping and the like.
        """
        if phase in {"backward", "optimizer"}:
            self._phases = ["other"] * len(self._phases)
        self._phases.append("forward" if phase == "forward" else "other")
        self._tell(self._phases[-1])

    def leave(self) -> None:
        self._phases.pop()
        self._tell(self._phases[-1])

    drop = leave

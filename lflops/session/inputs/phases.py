"""Listeners to the phases of a training, from any driver."""

from collections.abc import Callable
from typing import Any, Protocol

from lflops.profile.records import Phase

__all__ = ["Listener", "OutsideModules"]


class Listener(Protocol):
    """A listener to phases."""

    @property
    def innermost(self) -> str:
        """The phase that is running."""

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        """The phase begins, with what its method is given."""

    def leave(self) -> None:
        """The innermost phase ends."""

    def drop(self) -> None:
        """The innermost phase is left by an exception."""


class OutsideModules:
    """Listens to the training's phases, and tells of what is outside of modules: forward within training_step and its like, else other.

    Args:
        tell: Is called each time that this changes.
    """

    def __init__(self, tell: Callable[[Phase], None]) -> None:
        """Begin outside of a step."""
        self._tell = tell
        self._phases: list[Phase] = ["other"]

    @property
    def innermost(self) -> str:
        """Whether it is forward."""
        return self._phases[-1]

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """Forward, or something else; what comes behind a backward in the same training_step is clipping and the like."""
        if phase in {"backward", "optimizer"}:
            self._phases = ["other"] * len(self._phases)
        self._phases.append("forward" if phase == "forward" else "other")
        self._tell(self._phases[-1])

    def leave(self) -> None:
        """Back to what it was within."""
        self._phases.pop()
        self._tell(self._phases[-1])

    drop = leave

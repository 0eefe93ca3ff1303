"""The stack of modules and scopes that a thread has entered and not yet left, and what else is known of the thread."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from torch.optim import Optimizer

from lflops.collect.attribution.autograd_segments import AutogradSegments
from lflops.collect.torch_private.autograd import NO_BACKWARD


@dataclass(slots=True)
class Frame:
    """Something entered and not yet left."""

    key: int  # the identity by which it is left


AnyFrame = TypeVar("AnyFrame", bound=Frame)


class FrameStack(list[AnyFrame]):
    """Frames, the innermost last."""

    __slots__ = ()

    def cut(self, key: int) -> list[AnyFrame]:
        """Remove the innermost frame of that key, and those above it, which were left by an exception without a hook; outermost first."""
        if self and self[-1].key == key:
            return [self.pop()]
        for position in reversed(range(len(self))):
            if self[position].key == key:
                removed = self[position:]
                del self[position:]
                return removed
        return []


@dataclass(slots=True)
class TrackedFrame(Frame):
    """A module or scope that a `ModuleTracker` follows."""

    row: str  # its row in the tree of names
    module_row: str  # the nearest row at or above it that is a module's
    backward: int  # the backward pass in which it was entered
    # The Python frame that entered a module. Once that is gone, so is this: after an interrupt torch calls no hook.
    caller: FrameType | None


class ThreadState:
    """What one thread is running."""

    def __init__(self) -> None:
        self.stack: FrameStack[TrackedFrame] = FrameStack()
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        # The last backward pass seen here with gradients on, and whether it is one that is itself differentiated
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.recomputed_round = -1  # the last round of forward in whose backward modules were entered here
        # Whether the next operator has to begin a segment: nodes were built in backward, or a frame was found abandoned
        self.detour = False
        self.unfollow: Callable[[], None] | None = None  # what to call when the thread has left the tree's modules
        # The optimizer steps that are running, each with the backward pass that it began in; `None` for a step's closure
        self.steps: list[tuple[Optimizer | None, int]] = []


class ThreadLocal(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.state = ThreadState()

"""The stack of modules and scopes that a thread has entered and not yet left, and what else is known of the thread."""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from torch.optim import Optimizer
from torch.utils import checkpoint

from lflops.collect.attribution.autograd_segments import AutogradSegments
from lflops.collect.torch_private.autograd import NO_BACKWARD

__all__ = ["Frame", "FrameStack", "ThreadLocal", "ThreadState", "TrackedFrame", "caller", "checkpoint_is_running", "is_running"]


_AROUND_HOOKS = ("lflops/boundary.py", "lflops/collect/count_and_time.py", "torch/_dynamo/eval_frame.py")
"""Files whose functions may stand between torch's call of a hook and `ModuleTracker`."""


@dataclass(slots=True)
class Frame:
    """Something entered and not yet left.

    Attributes:
        key: The identity by which it is left.
    """

    key: int


AnyFrame = TypeVar("AnyFrame", bound=Frame)


class FrameStack(list[AnyFrame]):
    """Frames, the innermost last."""

    __slots__ = ()

    def cut(self, key: int) -> list[AnyFrame]:
        """Remove the innermost frame of that key, and those above it, which were left by an exception without a hook.

        Returns:
            The removed frames, outermost first; none where no frame has the key.
        """
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
    """A module or scope that a `ModuleTracker` follows.

    Attributes:
        row: Its row in the tree of names.
        module_row: The nearest row at or above it that is a module's.
        backward: The backward pass in which it was entered.
        caller: The Python frame that entered a module. Once that is gone, so is this: after an interrupt torch calls no hook.
    """

    row: str
    module_row: str
    backward: int
    caller: FrameType | None


class ThreadState:
    """What one thread is running.

    Attributes:
        backward: The last backward pass seen here with gradients on, and whether it is one that is itself differentiated.
        recomputed_in: The last backward pass in which modules were entered here, in which round of forward.
        detour: Whether the next operator has to begin a segment: nodes were built in backward, or a frame was found abandoned.
        unfollow: What to call when the thread has left the tree's modules.
        steps: The optimizer steps that are running, each with the backward pass that it began in; `None` for a step's closure.
    """

    def __init__(self) -> None:
        """Begin a thread: nothing entered, no node built."""
        self.stack: FrameStack[TrackedFrame] = FrameStack()
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.recomputed_in = (NO_BACKWARD, 0)
        self.detour = False
        self.unfollow: Callable[[], None] | None = None
        self.steps: list[tuple[Optimizer | None, int]] = []


class ThreadLocal(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        """Begin a thread."""
        self.state = ThreadState()


def caller() -> FrameType | None:
    """The Python frame that called a hook of ours, past the guard around it."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - in half the time of `inspect.currentframe`
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_HOOKS):
        frame = frame.f_back
    return frame


def is_running(caller: FrameType | None) -> bool:
    """Whether the Python frame is on this thread's stack; taken to be so where there is none to look for."""
    if caller is None:
        return True
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `inspect.currentframe`, in half the time, for every operator
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def checkpoint_is_running() -> bool:
    """Whether torch's activation checkpointing is on this thread's Python stack, above the backward that is running."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False

"""What one thread has entered and not yet left, and whether it still is there."""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from torch.utils import checkpoint

from lflops.collect.attribution.autograd_segments import AutogradSegments
from lflops.collect.torch_private.autograd import NO_BACKWARD

__all__ = ["Frame", "ThreadLocal", "ThreadState", "checkpoint_is_running", "is_running"]


class Frame(NamedTuple):
    """Something entered and not yet left.

    Attributes:
        key: What it is left by.
        row: Its row, and the nearest at or above it that is a module's.
        backward: The backward pass that it was entered in.
        caller: The Python frame that entered it, for those that may be left unsaid: torch calls no hook when forward is left by an
            interrupt. Once the frame is gone, so is this.
    """

    key: int
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
    """

    def __init__(self) -> None:
        """Begin a thread: nothing entered, no node built."""
        self.stack: list[Frame] = []
        self.segments: AutogradSegments | None = None
        self.calls: Counter[str] = Counter()
        self.backward = NO_BACKWARD
        self.differentiated = False
        self.recomputed_in = (NO_BACKWARD, 0)
        self.detour = False
        self.unfollow: Callable[[], None] | None = None


class ThreadLocal(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        """Begin a thread."""
        self.state = ThreadState()


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

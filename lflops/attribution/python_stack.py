"""What the Python frames of this thread say.

Who called a hook, and which of torch's functions an operator runs in.
"""

import sys
from itertools import takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import function
from torch.utils import checkpoint

_AROUND_HOOKS = ("lflops/error_guard.py", "lflops/timing/measure.py", "torch/_dynamo/eval_frame.py")
"""Files whose functions may stand between torch's call of a hook and `ModuleTracker`."""

BUCKET: Any = getattr(distributed, "GradBucket", None)
"""What DDP gives a communication hook.

There is none where torch was built without distributed training.
"""

# the function from which autograd's engine is called. Where it runs nodes on its own thread there
# is none.
ENGINE = "_engine_run_backward"

MODE = "__torch_dispatch__"


def caller() -> FrameType | None:
    """The Python frame that called a hook of ours, past the guard around it."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - in half the time of `inspect.currentframe`
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_HOOKS):
        frame = frame.f_back
    return frame


def is_running(caller: FrameType | None) -> bool:
    """Whether the Python frame is on this thread's stack.

    Taken to be so where there is none to look for.
    """
    # It is looked for below the nearest three frames, which are ours: Python makes an object of
    # each frame that is looked at.
    if caller is None:
        return True
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - as `inspect.currentframe`, in half the time, for every operator
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def checkpoint_is_running() -> bool:
    """Whether torch's activation checkpointing is on this thread's Python stack, above the backward that is running."""
    within = takewhile(lambda each: each[0].f_code.co_name != ENGINE, walk_stack(sys._getframe()))  # noqa: SLF001 - the same
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in within)


def in_inner_backward() -> bool:
    """Whether the backward pass that is running was begun in the backward of another pass's node, as a reentrant checkpoint's is."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the same
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != function.__file__:
        frame = frame.f_back
    return frame is not None


def in_communication_hook() -> bool:
    """Whether the operator, within a node that writes a gradient, was called by a communication hook of DDP, such as PowerSGD."""
    # It is no module's backward then. The nearest three frames are ours, and what a frame holds
    # takes long to ask.
    if BUCKET is None:
        return False
    frame = sys._getframe(3).f_back  # noqa: SLF001 - the public way makes a list of all frames
    while frame is not None and frame.f_code.co_name != ENGINE:
        if any(type(value) is BUCKET for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def sums_gradients(args: Any, kwargs: Any) -> bool:
    """Whether an addition in backward is one of the engine's, which it makes in place where no dispatch mode is on."""
    # The engine calls it without a frame of Python in between. The formulas of a few operators'
    # gradients look the same.
    if kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    first, second = args
    if (
        not isinstance(first, Tensor)
        or not isinstance(second, Tensor)
        or first.shape != second.shape
        or first.dtype != second.dtype
    ):
        return False
    if first.numel() * first.element_size() != first.untyped_storage().nbytes():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the public way makes a list of all frames
    while frame is not None and frame.f_code.co_name != MODE:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is None or caller.f_code.co_name == ENGINE

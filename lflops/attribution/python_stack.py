"""Read facts from the Python frames of this thread.

The frames show which code called a hook, and in which of torch's functions an operator runs.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import function
from torch.utils import checkpoint

_AROUND_HOOKS = ("lflops/error_guard.py", "lflops/timing/measure.py", "torch/_dynamo/eval_frame.py")
"""Files of functions that may be on the stack between torch's hook call and `ModuleTracker`."""

BUCKET: Any = getattr(distributed, "GradBucket", None)
"""The class of the bucket that DDP passes to a communication hook.

`None` if torch was built without distributed training.
"""

ENGINE = "_engine_run_backward"
"""The function that calls autograd's engine.

It is not on the stack of the engine's own threads.
"""

MODE = "__torch_dispatch__"
"""The function that a dispatch mode runs for an operator."""


def caller() -> FrameType | None:
    """Return the Python frame that called a hook of lflops, skipping the guard around the hook."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_HOOKS):
        frame = frame.f_back
    return frame


def is_running(caller: FrameType | None) -> bool:
    """Return whether a Python frame is on this thread's stack; true for `None`.

    The search skips the nearest three frames, which belong to lflops, because Python creates an
    object for each frame that is read.
    """
    if caller is None:
        return True
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def checkpoint_is_running() -> bool:
    """Return whether torch's activation checkpointing is on the stack above the running backward."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the same
    while frame is not None and frame.f_code.co_name != ENGINE:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def in_inner_backward() -> bool:
    """Return whether an autograd node of another pass started the running backward pass.

    A reentrant checkpoint starts such a pass.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the same
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != function.__file__:
        frame = frame.f_back
    return frame is not None


def in_communication_hook() -> bool:
    """Return whether a DDP communication hook such as PowerSGD called the running operator.

    Such an operator is not part of a module's backward. Call this only in a node that writes a
    gradient. The nearest three frames, which belong to lflops, are skipped, because reading a
    frame's variables is slow.
    """
    if BUCKET is None:
        return False
    frame = sys._getframe(3).f_back  # noqa: SLF001 - the public way makes a list of all frames
    while frame is not None and frame.f_code.co_name != ENGINE:
        if any(type(value) is BUCKET for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def sums_gradients(args: Any, kwargs: Any) -> bool:
    """Return whether autograd's engine called an addition in backward to sum gradients.

    Without a dispatch mode, the engine would add in place. The engine calls such an addition with
    no Python frame in between. Additions in the gradient formulas of a few operators look the same.
    """
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
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the same
    while frame is not None and frame.f_code.co_name != MODE:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is None or caller.f_code.co_name == ENGINE

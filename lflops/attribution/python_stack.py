"""Find out from the Python stack of the current thread which code is running.

The stack shows which code called a hook, and which function of torch is running an operator.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import function
from torch.utils import checkpoint

_AROUND_HOOKS = ("lflops/error_guard.py", "lflops/timing/measure.py", "torch/_dynamo/eval_frame.py")
"""Files whose functions may be on the stack between torch's hook call and `ModuleTracker`.

`caller` skips these functions.
"""

BUCKET: Any = getattr(distributed, "GradBucket", None)
"""The class of the bucket that DDP passes to a communication hook.

`None` if torch was built without distributed training.
"""

ENGINE = "_engine_run_backward"
"""Name of torch's Python function that calls autograd's engine.

The engine runs the backward pass of the CPU on the thread that called this function, so the
function is on the stack of that thread. The engine has its own threads for other devices, for
example for a GPU. The function is not on the stacks of these threads.
"""

MODE = "__torch_dispatch__"
"""Name of the method that torch calls on a dispatch mode for each operator."""


def caller() -> FrameType | None:
    """Return the Python frame that called a hook of lflops.

    Frames of lflops that wrap the hook, such as the error guard, are skipped.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_HOOKS):
        frame = frame.f_back
    return frame


def is_running(caller: FrameType | None) -> bool:
    """Return whether `caller` is on this thread's Python stack; true if it is `None`.

    The search skips the three innermost frames, which always belong to lflops. This saves time,
    because Python creates an object for each frame that is read.
    """
    if caller is None:
        return True
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def checkpoint_is_running() -> bool:
    """Return whether the running backward pass is now executing code of torch's checkpointing.

    In that case, the current operator recomputes forward.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame.f_code.co_name != ENGINE:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def in_inner_backward() -> bool:
    """Return whether the running backward pass was started inside another backward pass.

    Reentrant checkpointing does this: its `torch.autograd.Function` recomputes forward, and then
    runs a backward pass through the recomputed nodes.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != function.__file__:
        frame = frame.f_back
    return frame is not None


def in_communication_hook() -> bool:
    """Return whether a DDP communication hook such as PowerSGD called the running operator.

    The work of an operator in a communication hook does not belong to any module. DDP calls its
    hooks when a gradient has been written, so this function is needed only while a node writes a
    gradient. The search skips the four innermost frames, which belong to lflops, because reading
    the variables of a frame is slow.
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
    """Return whether an addition was called by autograd's engine to sum two gradients.

    `args` and `kwargs` are the arguments of the addition. Such an addition allocates a result only
    because a dispatch mode is active. In a normal run, the engine adds in place, so the addition
    needs no memory. The addition is recognized by the stack: no Python function runs between the
    engine and the dispatch mode. A few operators have additions in their gradient formulas with the
    same stack, so this function wrongly returns true for them.
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
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - faster than `inspect.currentframe`
    while frame is not None and frame.f_code.co_name != MODE:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is None or caller.f_code.co_name == ENGINE

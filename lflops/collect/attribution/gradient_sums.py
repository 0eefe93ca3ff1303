"""Sums that autograd's engine makes: the gradients of a tensor that is used more than once."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ENGINE", "sums_gradients"]

ENGINE = "_engine_run_backward"
"""The function from which autograd's engine is called. Where it runs nodes on its own thread there is none."""

MODE = "__torch_dispatch__"


def sums_gradients(args: Any, kwargs: Any) -> bool:
    """Whether an addition in backward is one of the engine's, which it makes in place where no dispatch mode is on.

    The engine calls it without a frame of Python in between. The formulas of a few operators' gradients look the same.
    """
    if kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    first, second = args
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.numel() * first.element_size() != first.untyped_storage().nbytes():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the public way makes a list of all frames
    while frame is not None and frame.f_code.co_name != MODE:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is None or caller.f_code.co_name == ENGINE

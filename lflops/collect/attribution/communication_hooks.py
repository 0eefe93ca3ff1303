"""Whether a communication hook of DDP is running, such as PowerSGD: what it computes is no module's backward."""

import sys
from types import FrameType
from typing import Any

from torch import distributed

from lflops.collect.attribution.gradient_sums import ENGINE
from lflops.collect.torch_private.autograd import ACCUMULATES_GRADIENT, current_node, sequence_number

__all__ = ["in_communication_hook"]

BUCKET: Any = getattr(distributed, "GradBucket", None)
"""What such a hook is given; there is none where torch was built without distributed training."""


def in_communication_hook() -> bool:
    """Whether the operator that runs now was called by a hook that DDP gave a bucket of gradients."""
    node = current_node()
    if node is None or sequence_number(node) < ACCUMULATES_GRADIENT or BUCKET is None:
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the public way makes a list of all frames
    while frame is not None and frame.f_code.co_name != ENGINE:
        if any(type(value) is BUCKET for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False

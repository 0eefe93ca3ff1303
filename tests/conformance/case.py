"""What a case of the conformance suite is: a model, its inputs, and the MACs that a pencil gives."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
"""Makes a model, its positional and its keyword arguments, from scratch at each call."""

Setting = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a case is built and counted, as one with kernels that stand in for a GPU's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and what it costs.

    Attributes:
        name: Unique in the suite.
        family: What kind of operator or model it stands for.
        build: Makes the model and its inputs.
        forward: MACs of forward.
        backward: MACs of backward from the sum of the floating outputs; `None` where nothing is
            differentiated.
        recompute: MACs run again in backward: checkpointing's, and a fused attention's scores.
        grad: Whether forward runs with gradients on; `False` takes the paths of inference.
        executed: MACs of forward that a mask leaves to run; `None` where it leaves all.
        setting: What it is built and counted in.
    """

    name: str
    family: str
    build: Build
    forward: int
    backward: int | None
    recompute: int = 0
    grad: bool = True
    executed: int | None = None
    setting: Setting = nullcontext

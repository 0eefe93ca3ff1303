"""Define a case of the conformance suite: a model, its inputs, and its MACs worked out by hand."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

Build = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
"""A function that creates a new model, its positional arguments and its keyword arguments."""

Setting = Callable[[], AbstractContextManager[None]]
"""A function that returns the context in which a case is built and counted.

For example, the context replaces the kernels of a GPU by stand-ins.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its inputs and its MACs.

    Attributes:
        name: A unique name.
        family: The kind of operator or model.
        build: Creates the model and its inputs.
        forward: MACs of forward.
        backward: MACs of backward, from the sum of all floating-point outputs. `None` if there is
            no backward pass.
        recompute: MACs that run again in backward, because of checkpointing or because fused
            attention does not keep its scores.
        grad: Whether forward records gradients. Without gradients, torch takes other code paths.
        executed: MACs of forward without the part that a mask skips. `None` if nothing is skipped.
        setting: Returns the context in which the case is built and counted.
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

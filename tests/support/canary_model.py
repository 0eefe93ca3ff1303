"""A model and a batch for tests which check that counting changes neither of them."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOOKING_IN: list[Callable[[], object]] = []
"""Functions that each `Patient` calls in the middle of its forward."""


@contextlib.contextmanager
def in_forward(look: Callable[[], object]) -> Iterator[None]:
    """Call a function in the middle of every forward of a `Patient`. The function may raise."""
    LOOKING_IN.append(look)
    try:
        yield
    finally:
        LOOKING_IN.remove(look)


def watched(*_: object) -> None:
    """Do nothing: this is a hook that the user has registered."""


class Patient(nn.Module):
    """A model with some of everything that counting could change by mistake.

    In training mode it draws random numbers from torch, Python and NumPy, and its buffers change.
    """

    steps: Tensor
    average: Tensor
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.evaluating = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(8, 4)
        self.head.register_forward_hook(watched)
        self.head.register_forward_pre_hook(watched)
        self.head.register_full_backward_hook(watched)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("mask", None)
        self.register_buffer("unused", torch.tensor([float("nan"), -0.0, float("inf")]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.embedding(x)))
        if self.training:
            # The global generators are used because counting could leave their states changed.
            factor = random.random()  # noqa: S311
            offset = float(np.random.rand())  # noqa: NPY002
            x = x * factor + offset
            self.steps += 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            if self.mask is None:
                self.mask = torch.ones_like(self.average)
        for look in LOOKING_IN:
            look()
        return self.head(self.evaluating(self.frozen(x)))


def patient() -> Patient:
    """Return a `Patient` in the middle of a training run.

    It has gradients. Two optimizers have been made for it, because torch patches an optimizer class
    when its first instance is made.
    """
    model = Patient()
    model(torch.randn(3, 4)).sum().backward()
    model.mask = None
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(model.parameters())
    return model


def batch() -> Tensor:
    """Return an input that already has a gradient."""
    x = torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    return x


class Raises(torch.autograd.Function):
    """Return the input in forward, and raise an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error

"""A model and its batch for tests that counting does not change a model."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOOKING_IN: list[Callable[[], object]] = []
"""What a `Patient` calls in the middle of its forward."""


@contextlib.contextmanager
def in_forward(look: Callable[[], object]) -> Iterator[None]:
    """Have something done in the middle of every `Patient`'s forward: look around, or raise."""
    LOOKING_IN.append(look)
    try:
        yield
    finally:
        LOOKING_IN.remove(look)


def watched(*_: object) -> None:
    """A hook of the user's own."""


class Patient(nn.Module):
    """A bit of everything that can be changed.

    In train mode it draws from all generators and its buffers move.
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
            x = x * random.random() + float(np.random.rand())  # noqa: NPY002, S311 - the global ones are what can be left changed
            self.steps += 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            self.mask = torch.ones_like(self.average) if self.mask is None else self.mask
        for look in LOOKING_IN:
            look()
        return self.head(self.evaluating(self.frozen(x)))


def patient() -> Patient:
    """One in the middle of a training.

    It has gradients, and there have been optimizers, for the first of which torch patches its
    class.
    """
    model = Patient()
    model(torch.randn(3, 4)).sum().backward()
    model.mask = None
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(model.parameters())
    return model


def batch() -> Tensor:
    """An input that has a gradient already."""
    x = torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    return x


class Raises(torch.autograd.Function):
    """Passes a tensor on, and raises an error when its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error

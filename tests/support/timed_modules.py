"""Modules that take a chosen time, on a clock that the test advances."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock


class Takes(torch.autograd.Function):
    """Return the input, and advance a clock in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor | None, clock: StillClock, seconds: tuple[float, float]
    ) -> Tensor:
        forward_seconds, backward_seconds = seconds
        ctx.clock = clock
        ctx.seconds = backward_seconds
        clock.advance(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.advance(ctx.seconds)
        return gradients[0], None, None, None


class Part(nn.Module):
    """A module that takes so many seconds in forward and in backward.

    It has a weight, so its backward runs even if the input requires no gradient.
    """

    def __init__(self, clock: StillClock, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(x, self.weight, self.clock, self.seconds)  # type: ignore[no-untyped-call]


class Itself(nn.Module):
    """A module with submodules that can also take time itself.

    It has a weight, so its backward runs even if the input requires no gradient.
    """

    def __init__(self, clock: StillClock, **parts: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        for name, part in parts.items():
            self.add_module(name, part)
        self.weight = nn.Parameter(torch.ones(()))

    def take(self, x: Tensor, forward: float = 0.0, backward: float = 0.0) -> Tensor:
        """Take so many seconds in forward and in backward, outside the submodules."""
        return Takes.apply(x, self.weight, self.clock, (forward, backward))  # type: ignore[no-untyped-call]


class Squares(torch.autograd.Function):
    """The square of the input. Its derivative takes time too, and has a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: StillClock, seconds: Sequence[float]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clock, ctx.seconds = clock, seconds
        clock.advance(seconds[0])
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        derivative = SquaresDerivative.apply(x, gradients[0], ctx.clock, ctx.seconds[1:])  # type: ignore[no-untyped-call]
        return derivative, None, None


class SquaresDerivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Tensor, clock: StillClock, seconds: Sequence[float]
    ) -> Tensor:
        ctx.save_for_backward(x, gradient)
        ctx.clock, ctx.seconds = clock, seconds
        clock.advance(seconds[0])
        return 2 * x * gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, gradient = ctx.saved_tensors
        ctx.clock.advance(ctx.seconds[1])
        return 2 * gradient * gradients[0], 2 * x * gradients[0], None, None


class Square(nn.Module):
    """A module that takes so many seconds in forward, in backward, and in the second derivative."""

    def __init__(self, clock: StillClock, *seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Squares.apply(x, self.clock, self.seconds)  # type: ignore[no-untyped-call]

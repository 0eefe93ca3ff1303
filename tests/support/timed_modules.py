"""Modules that take a chosen time, on a clock that the test advances."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock


class Takes(torch.autograd.Function):
    """Passes a tensor on; forward and backward take their time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor | None, clock: StillClock, seconds: tuple[float, float]
    ) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds[1]
        clock.advance(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.advance(ctx.seconds)
        return gradients[0], None, None, None


class Part(nn.Module):
    """Takes so many seconds forward and backward.

    It has a weight, so it goes backward whatever its input is.
    """

    def __init__(self, clock: StillClock, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(x, self.weight, self.clock, self.seconds)  # type: ignore[no-untyped-call]


class Itself(nn.Module):
    """A module with work of its own beside its parts.

    It too has a weight, so it goes backward whatever its input is.
    """

    def __init__(self, clock: StillClock, **parts: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        for name, part in parts.items():
            self.add_module(name, part)
        self.weight = nn.Parameter(torch.ones(()))

    def take(self, x: Tensor, forward: float = 0.0, backward: float = 0.0) -> Tensor:
        """Work that is in no part."""
        return Takes.apply(x, self.weight, self.clock, (forward, backward))  # type: ignore[no-untyped-call]

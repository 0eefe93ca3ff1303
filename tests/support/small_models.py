"""Models that are small enough to count by hand.

Each of their matmuls is one of `square`, `up` and `down`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

batch, length, hidden, wide = 2, 3, 5, 7
tokens = batch * length
square = tokens * hidden * hidden
up = tokens * hidden * wide
down = tokens * wide * hidden


def sequence(*, requires_grad: bool = False) -> Tensor:
    """An input of `tokens` vectors."""
    return torch.randn(batch, length, hidden, requires_grad=requires_grad)


class Block(nn.Module):
    """Two products, `up` and `down`; the ReLU between them is the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide)
        self.down = nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Projections(nn.Module):
    """What every transformer does, and what attribution by the gradient of a module's input gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.q(x) + self.k(x) + self.v(x)


class Towers(nn.Module):
    """Two inputs, two blocks, one head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.head = nn.Linear(hidden, hidden)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.a(a) * self.b(b))


def between_linears(body: nn.Module) -> nn.Sequential:
    """The body, with something before and behind it to tell it from."""
    return nn.Sequential(nn.Linear(hidden, hidden), body, nn.Linear(hidden, hidden))

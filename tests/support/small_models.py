"""Models that are small enough to count by hand.

Each of their matmuls has `square`, `up` or `down` MACs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

batch = 2
length = 3
hidden = 5
wide = 7
tokens = batch * length

# MACs of the matmuls.
square = tokens * hidden * hidden
up = tokens * hidden * wide
down = tokens * wide * hidden


def sequence(*, requires_grad: bool = False) -> Tensor:
    """Return a random input with the shape [batch, length, hidden]."""
    return torch.randn(batch, length, hidden, requires_grad=requires_grad)


class Block(nn.Module):
    """Two linear layers, `up` and `down`. The ReLU between them belongs to the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide)
        self.down = nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Projections(nn.Module):
    """Three projections of the same input, as in every transformer.

    Attribution by the gradients of module inputs is wrong here, because the modules share an input.
    """

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
    """A model with two inputs, a block for each of them, and one head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.head = nn.Linear(hidden, hidden)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.a(a) * self.b(b))


def between_linears(body: nn.Module) -> nn.Sequential:
    """Return a module between two linear layers, from which attribution must distinguish it."""
    return nn.Sequential(nn.Linear(hidden, hidden), body, nn.Linear(hidden, hidden))

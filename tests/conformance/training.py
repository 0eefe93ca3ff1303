"""Cases in which only a part of the model is trained.

A frozen weight saves one of the two matmuls in backward. An input without a gradient saves the
other one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.making import Family, data, layer, leaf, words
from tests.conformance.pencil import Macs, product

__all__ = ["CASES"]

batch = 2
length = 3
hidden = 5
wide = 7
rank = 2
vocabulary = 11
rows = batch * length
x = leaf(batch, length, hidden)
given = data(batch, length, hidden)
square = product(rows, hidden, hidden)
of_one = product(rows, hidden, hidden, gradients=1)
trained = Family("training").trained


def stack(*frozen: int, layers: int = 3) -> nn.Sequential:
    """Create a stack of layers, in which the layers at the positions `frozen` are frozen."""
    model = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))
    for place in frozen:
        model[place].requires_grad_(requires_grad=False)
    return model


class Adapted(nn.Module):
    """A frozen projection, to which a trained projection of low rank is added."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, wide).requires_grad_(requires_grad=False)
        self.narrow = nn.Linear(hidden, rank, bias=False)
        self.widen = nn.Linear(rank, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.widen(self.narrow(x))


class Tied(nn.Module):
    """A model with an embedding that is also the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


class Shared(nn.Module):
    """One layer under four names, which is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = self.third = nn.Linear(hidden, hidden)
        self.all = nn.ModuleList([self.first])

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.first, self.second, self.third, *self.all):
            x = each(x)
        return x


class Parted(nn.Module):
    """A model with a detached branch, an unused branch, and a branch for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = stack(layers=1)
        self.unused = stack(layers=1)
        self.kept = stack(layers=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x) + self.cut(x).detach()


class Several(nn.Module):
    """A model that returns several results in a dict, also integers and detached tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide)
        self.down = nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> dict[str, Any]:
        up = self.up(x)
        return {"up": up, "all": [self.down(up), up.argmax(-1)], "rest": (up.detach(), None)}


class Contrastive(nn.Module):
    """Two towers, and the products of all pairs of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(hidden, wide)
        self.right = nn.Linear(hidden, wide)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) @ self.right(y).mT


def normed() -> nn.Module:
    """Create a layer with spectral normalization.

    Its weight is divided by its largest singular value, which each call improves by one step of the
    power iteration.
    """
    return nn.utils.parametrizations.spectral_norm(nn.Linear(hidden, wide))


class Loop(nn.Module):
    """A layer that is called several times, each time with its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.step(x))
        return x


rounds = 4
once = Macs(square.forward)
CASES = (
    trained("all trained, of data", layer(stack, given), of_one + 2 * square),
    trained("the first frozen", layer(lambda: stack(0), given), once + of_one + square),
    trained("the middle frozen", layer(lambda: stack(1), given), of_one + of_one + square),
    trained("the last frozen", layer(lambda: stack(2), given), of_one + square + of_one),
    trained("all but the last frozen", layer(lambda: stack(0, 1), given), 2 * once + of_one),
    trained("all frozen, but the input wanted", layer(lambda: stack(0, 1, 2), x), 3 * of_one),
    trained(
        "low-rank adapters",
        layer(Adapted, x),
        product(rows, hidden, wide, gradients=1)
        + product(rows, hidden, rank)
        + product(rows, rank, wide),
    ),
    trained(
        "low-rank adapters of data",
        layer(Adapted, given),
        product(rows, hidden, wide, gradients=0)
        + product(rows, hidden, rank, gradients=1)
        + product(rows, rank, wide),
    ),
    trained(
        "tied weights",
        layer(Tied, words(batch, length, vocabulary)),
        product(rows, hidden, vocabulary),
    ),
    trained("a shared layer", layer(Shared, x), 4 * square),
    trained("a branch cut off", layer(Parted, x), once + square),
    trained(
        "several results",
        layer(Several, x),
        product(rows, hidden, wide) + product(rows, wide, hidden),
    ),
    trained(
        "two towers of data",
        layer(Contrastive, given, given),
        2 * product(rows, hidden, wide, gradients=1) + product(batch, length, length, wide),
    ),
    trained(
        "spectral normalisation",
        layer(normed, x),
        # The weight is multiplied by a vector three times: twice to improve the vectors and once
        # for the singular value. The singular value is then a product of two vectors.
        product(rows, hidden, wide) + Macs(3 * hidden * wide + wide),
    ),
    trained("a loop", layer(Loop, x, rounds), rounds * square),
)

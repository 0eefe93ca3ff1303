"""What is trained and what is not.

A weight that is frozen saves one product, an input that needs no gradient the other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.making import Family, data, layer, leaf, words
from tests.conformance.pencil import Macs, product

__all__ = ["CASES"]

batch, length, hidden, wide, rank, vocabulary = 2, 3, 5, 7, 2, 11
rows = batch * length
x, given = leaf(batch, length, hidden), data(batch, length, hidden)
square = product(rows, hidden, hidden)
of_one = product(rows, hidden, hidden, gradients=1)
trained = Family("training").trained


def stack(*frozen: int, layers: int = 3) -> nn.Sequential:
    """Layers of which some are frozen."""
    model = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))
    for place in frozen:
        model[place].requires_grad_(requires_grad=False)
    return model


class Adapted(nn.Module):
    """A frozen projection, and beside it a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, wide).requires_grad_(requires_grad=False)
        self.narrow = nn.Linear(hidden, rank, bias=False)
        self.widen = nn.Linear(rank, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.widen(self.narrow(x))


class Tied(nn.Module):
    """An embedding that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


class Shared(nn.Module):
    """One layer by three names, and once more in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = self.third = nn.Linear(hidden, hidden)
        self.all = nn.ModuleList([self.first])

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.first, self.second, self.third, *self.all):
            x = each(x)
        return x


class Parted(nn.Module):
    """A branch that is cut off, one that is never used, one that is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.unused, self.kept = stack(layers=1), stack(layers=1), stack(layers=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x) + self.cut(x).detach()


class Several(nn.Module):
    """More than one result, in a mapping; integers and what needs no gradient among them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> dict[str, Any]:
        up = self.up(x)
        return {"up": up, "all": [self.down(up), up.argmax(-1)], "rest": (up.detach(), None)}


class Contrastive(nn.Module):
    """Two towers on data, and the product of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(hidden, wide), nn.Linear(hidden, wide)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) @ self.right(y).mT


def normed() -> nn.Module:
    """A layer whose weight is divided by its largest singular value, found by one more step of an iteration."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(hidden, wide))


class Loop(nn.Module):
    """A layer run until the values are small, the state carried on."""

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
        # Twice to a better vector and once for the value: the weight by a vector; the value is a
        # vector by a vector.
        product(rows, hidden, wide) + Macs(3 * hidden * wide + wide),
    ),
    trained("a loop", layer(Loop, x, rounds), rounds * square),
)

"""Work out the MACs of matmuls and attention by hand, from their dimensions.

This file uses no code of lflops, so the expected values are independent of it.
"""

from dataclasses import dataclass
from math import prod

__all__ = ["NOTHING", "Macs", "attention", "product"]


@dataclass(frozen=True)
class Macs:
    """MACs of forward, backward and recompute. Sums and multiples apply to each of the three."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    def __add__(self, other: "Macs") -> "Macs":
        return Macs(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
        )

    def __mul__(self, times: int) -> "Macs":
        return Macs(self.forward * times, self.backward * times, self.recompute * times)

    __rmul__ = __mul__


NOTHING = Macs()


def product(*dimensions: int, gradients: int = 2) -> Macs:
    """Return the MACs of a product with these dimensions, including the dimension it sums over.

    Forward has one MAC for each combination of indices. Backward has as many for each operand that
    requires a gradient; `gradients` is the number of these operands.
    """
    return Macs(prod(dimensions), gradients * prod(dimensions))


def attention(
    scores: int, width: int, value_width: int | None = None, *, fused: bool = True
) -> Macs:
    """Return the MACs of attention: the product of queries and keys, and of scores and values.

    A fused kernel does not keep the scores, and computes them again in backward.

    Args:
        scores: Number of scores, that is, pairs of a query and a key, in all heads and batches.
        width: Features of a query and a key.
        value_width: Features of a value, if they are different.
        fused: Whether a fused kernel runs.
    """
    if value_width is None:
        value_width = width
    macs = product(scores, width) + product(scores, value_width)
    if fused:
        macs += Macs(recompute=scores * width)
    return macs

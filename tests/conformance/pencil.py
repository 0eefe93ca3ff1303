"""The pencil: what products cost forward and backward, by the names of their dimensions.

It knows nothing of lflops.
"""

from dataclasses import dataclass
from math import prod

__all__ = ["NOTHING", "Macs", "attention", "product"]


@dataclass(frozen=True)
class Macs:
    """MACs of forward, of backward, and of what backward runs again.

    Sums and multiples are taken part by part.
    """

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
    """One MAC for each place in all the dimensions.

    In backward as many again for each operand whose gradient is wanted.
    """
    return Macs(prod(dimensions), gradients * prod(dimensions))


def attention(
    scores: int, width: int, value_width: int | None = None, *, fused: bool = True
) -> Macs:
    """Q x K and P x V, two operands each.

    The fused kernel has kept no scores, and multiplies Q x K once more in backward.
    """
    plain = product(scores, width) + product(scores, width if value_width is None else value_width)
    return plain + Macs(recompute=scores * width) if fused else plain

"""Distances and forms between all pairs of rows, and products over three tensors."""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula


@formula("_cdist_forward", "_euclidean_dist")
def cdist(x: Shape, y: Shape) -> Cost:
    """Each pair of rows once: a difference and a multiply-accumulate an element, a root a pair."""
    batch = prod(x[:-2]) or 1
    pairs = batch * x[-2] * y[-2]
    return Cost(pairs * x[-1], other_flops=pairs * (x[-1] + 1))


formula("_cdist_backward")(adapted(cdist, "grad"))  # a difference, scaled and added to the gradient


@formula("_pdist_forward")
def pdist(x: Shape) -> Cost:
    """Each pair of different rows once."""
    pairs = x[0] * (x[0] - 1) // 2
    return Cost(pairs * x[1], other_flops=pairs * (x[1] + 1))


formula("_pdist_backward")(adapted(pdist, "grad"))


@formula("_trilinear")
def trilinear(a: Shape, b: Shape, c: Shape, *, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int]) -> Cost:
    """The product of three tensors over all dimensions together: a multiplication, and a multiply-accumulate into the sum."""
    expanded = [_expand(shape, places) for shape, places in ((a, expand1), (b, expand2), (c, expand3))]
    elements = prod(map(max, zip(*expanded, strict=True)))
    return Cost(elements, other_flops=elements)


def _expand(shape: Shape, places: Sequence[int]) -> list[int]:
    expanded = list(shape)
    for place in sorted(places):
        expanded.insert(place, 1)
    return expanded

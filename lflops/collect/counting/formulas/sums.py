"""Sums over windows and over indices: one operation an element that goes in."""

from math import prod
from typing import Any

from lflops.collect.counting.formulas.table import Cost, Shape, formula


@formula("max_pool2d_with_indices", "avg_pool2d")
def pool2d(x: Shape, kernel: Shape, *, out: Any) -> Cost:
    """Each window once."""
    return Cost(other_flops=_windows(out, kernel, 2))


@formula("max_pool3d_with_indices", "avg_pool3d")
def pool3d(x: Shape, kernel: Shape, *, out: Any) -> Cost:
    """Each window once."""
    return Cost(other_flops=_windows(out, kernel, 3))


def _windows(out: Any, kernel: Any, dimensions: int) -> int:
    pooled: Shape = out if not out or isinstance(out[0], int) else out[0]
    window: list[int] = list(kernel) * dimensions if len(kernel) == 1 else list(kernel)
    return prod(pooled) * prod(window)


@formula("index_add", "index_add_")
def index_add(x: Shape, dim: int, index: Shape, source: Shape) -> Cost:
    """One addition an element of the source."""
    return Cost(other_flops=prod(source))


@formula("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter_add(x: Shape, dim: int, index: Shape, source: Shape) -> Cost:
    """One addition an element that the index names."""
    return Cost(other_flops=prod(index))


@formula("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(weight: Shape, indices: Shape) -> Cost:
    """One addition an element of the rows gathered."""
    return Cost(other_flops=prod(indices) * weight[-1])

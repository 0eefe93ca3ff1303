"""Sums over windows and over indices.

One operation an element that goes in, two where it is weighted.
"""

from math import prod
from typing import Any

from lflops.formulas.table import Cost, Formula, Shape, adapted, formula, per_element


def _pool(dimensions: int) -> Formula:
    """Each window once."""

    def cost(x: Shape, kernel: Shape, *, out: Any) -> Cost:
        pooled: Shape = out if not out or isinstance(out[0], int) else out[0]
        return Cost(
            other_flops=prod(pooled)
            * (kernel[0] ** dimensions if len(kernel) == 1 else prod(kernel))
        )

    cost.__name__ = f"pool{dimensions}d"
    return cost


for dimensions, operators in {
    1: "quantized_max_pool1d quantized::max_pool1d",
    2: "max_pool2d_with_indices avg_pool2d fractional_max_pool2d quantized_max_pool2d quantized::max_pool2d mkldnn_max_pool2d",
    3: "max_pool3d_with_indices avg_pool3d fractional_max_pool3d quantized_max_pool3d mkldnn_max_pool3d",
}.items():
    formula(operators)(_pool(dimensions))


@formula("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter_add(x: Shape, dim: int, index: Shape, source: Shape) -> Cost:
    """One addition an element that the index names."""
    return Cost(other_flops=prod(index))


# One addition an element of the source, and one a target.
formula("index_add index_add_ index_reduce index_reduce_")(
    adapted(per_element(1), "into dim index")
)
formula("nll_loss_forward nll_loss2d_forward")(adapted(per_element(1), "scores"))
formula("nll_loss_backward nll_loss2d_backward")(
    adapted(per_element(1), "grad scores")
    # all other elements are zero
)


@formula(
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
)
def embedding_bag(rows: Shape, indices: Shape) -> Cost:
    """One addition an element of the rows gathered: of the weight, or backward of the gradient."""
    return Cost(other_flops=prod(indices) * rows[-1])


@formula("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(grad: Shape, weight: Shape, indices: Shape) -> Cost:
    """A product and an addition an element of the rows that were gathered."""
    return Cost(other_flops=2 * prod(indices) * grad[-1])


@formula("embedding_renorm_")
def embedding_renorm(weight: Shape, indices: Shape) -> Cost:
    """Square, sum and scale the rows that the indices name."""
    return Cost(other_flops=3 * prod(indices) * weight[-1])


@formula("grid_sampler_2d", "grid_sampler_3d")
def grid_sample(x: Shape, grid: Shape, interpolation: int, *, out: Shape) -> Cost:
    """Two operations for each neighbour."""
    return Cost(other_flops=prod(out) * 2 * _neighbours(grid, interpolation))


@formula("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sample_backward(
    grad: Shape, x: Shape, grid: Shape, interpolation: int, *, output_mask: tuple[bool, bool]
) -> Cost:
    """The forward once for each gradient asked for: of the input, of the places."""
    return Cost(other_flops=prod(grad) * 2 * _neighbours(grid, interpolation) * sum(output_mask))


def _neighbours(grid: Shape, interpolation: int) -> int:
    """Neighbours by torch's number of the method.

    Linear weighs 2 in each dimension, nearest takes one and weighs none, cubic weighs 4.
    """
    linear, nearest = 0, 1
    if interpolation == nearest:
        return 0
    return int((2 if interpolation == linear else 4) ** grid[-1])

"""Formulas for operators that add elements, such as pooling, scatter-add and embedding bags.

Each added element costs one operation, or two if it is multiplied by a weight.
"""

from math import prod
from typing import Any

from lflops.formulas.table import Cost, Formula, Shape, adapted, formula, per_element


def _pool(dimensions: int) -> Formula:
    """Return a formula for pooling over 1, 2 or 3 `dimensions`.

    Each element of each window costs one operation.
    """

    def cost(x: Shape, kernel: Shape, *, out: Any) -> Cost:
        # Some operators return the pooled tensor and indices.
        has_several_results = out and not isinstance(out[0], int)
        pooled: Shape = out[0] if has_several_results else out
        is_square = len(kernel) == 1
        if is_square:
            kernel = kernel * dimensions
        return Cost(other_flops=prod(pooled) * prod(kernel))

    cost.__name__ = f"pool{dimensions}d"
    return cost


formula("quantized_max_pool1d", "quantized::max_pool1d")(_pool(1))
formula(
    "max_pool2d_with_indices",
    "avg_pool2d",
    "fractional_max_pool2d",
    "quantized_max_pool2d",
    "quantized::max_pool2d",
    "mkldnn_max_pool2d",
)(_pool(2))
formula(
    "max_pool3d_with_indices",
    "avg_pool3d",
    "fractional_max_pool3d",
    "quantized_max_pool3d",
    "mkldnn_max_pool3d",
)(_pool(3))


@formula("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter_add(x: Shape, dim: int, index: Shape, source: Shape) -> Cost:
    """Cost of a scatter-add: one addition per element of the index."""
    return Cost(other_flops=prod(index))


# One addition per element of the source.
formula("index_add", "index_add_", "index_reduce", "index_reduce_")(
    adapted(per_element(1), "into dim index")
)

# One addition per target. In backward, only the scores of the targets get a gradient.
formula("nll_loss_forward", "nll_loss2d_forward")(adapted(per_element(1), "scores"))
formula("nll_loss_backward", "nll_loss2d_backward")(adapted(per_element(1), "grad scores"))


@formula(
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
)
def embedding_bag(table: Shape, indices: Shape) -> Cost:
    """Cost of an embedding bag in forward or in backward.

    The cost is one addition per element of the table rows that the indices select.
    """
    return Cost(other_flops=prod(indices) * table[-1])


@formula("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(grad: Shape, weight: Shape, indices: Shape) -> Cost:
    """Cost of the gradients of the per-sample weights of an embedding bag.

    The cost is a multiplication and an addition per element of the table rows that the indices
    select.
    """
    return Cost(other_flops=2 * prod(indices) * grad[-1])


@formula("embedding_renorm_")
def embedding_renorm(weight: Shape, indices: Shape) -> Cost:
    """Cost of limiting the norm of the embedding rows that the indices select.

    The cost is a square, an addition and a multiplication per element of these rows.
    """
    return Cost(other_flops=3 * prod(indices) * weight[-1])


@formula("grid_sampler_2d", "grid_sampler_3d")
def grid_sample(x: Shape, grid: Shape, interpolation: int, *, out: Shape) -> Cost:
    """Cost of sampling an image at the points of a grid.

    Each output element is a weighted sum of neighbouring elements of the image, with two operations
    per neighbour.
    """
    return Cost(other_flops=2 * prod(out) * _neighbours(grid, interpolation))


@formula("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sample_backward(
    grad: Shape, x: Shape, grid: Shape, interpolation: int, *, output_mask: tuple[bool, bool]
) -> Cost:
    """Cost of the requested gradients of `grid_sample`: the image's, the grid's, or both.

    Each gradient costs as much as the forward pass.
    """
    gradients = sum(output_mask)
    return Cost(other_flops=2 * prod(grad) * _neighbours(grid, interpolation) * gradients)


# torch's numbers for interpolation methods. Number 2 is cubic.
_LINEAR = 0
_NEAREST = 1


def _neighbours(grid: Shape, interpolation: int) -> int:
    """Count the image elements that are summed to get the interpolated value at a grid point.

    Linear interpolation uses 2 elements per dimension, and cubic interpolation uses 4. If the
    nearest element is used, there is no sum, so the result is 0.
    """
    if interpolation == _NEAREST:
        return 0
    per_dimension = 2 if interpolation == _LINEAR else 4
    dimensions = grid[-1]
    return int(per_dimension**dimensions)

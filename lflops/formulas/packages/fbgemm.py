"""Formulas for FBGEMM: jagged tensors, and embedding bags over several tables.

A jagged tensor stores sequences of different lengths one after the other.
"""

from itertools import pairwise
from math import prod

from lflops.formulas.table import Cost, Shape, Values, formula, per_element

Offsets = Values | Shape
"""The positions at which sequences begin; the shape of this tensor if its values are unknown."""


def _rows(values: Shape, offsets: Offsets, longest: int) -> int:
    """Count the rows of a jagged tensor that a kernel uses: at most `longest` per sequence.

    If the lengths of the sequences are unknown, the result is the number of all rows.
    """
    if not isinstance(offsets, Values):
        return values[0]
    return sum(min(end - begin, longest) for begin, end in pairwise(offsets))


@formula("fbgemm::jagged_dense_bmm", "fbgemm::jagged_dense_bmm_forward", reads="x_offsets")
def jagged_by_dense(
    x: Shape,
    *,
    x_offsets: Offsets,
    y: Shape,
    max_L: int,  # noqa: N803 - FBGEMM's name
) -> Cost:
    """Cost of a jagged tensor times dense matrices: a matmul [rows, k] x [k, n] per sequence."""
    _, k, n = y
    rows = _rows(x, x_offsets, max_L)
    return Cost(rows * k * n, is_upper_bound=not isinstance(x_offsets, Values))


@formula("fbgemm::jagged_jagged_bmm", "fbgemm::jagged_jagged_bmm_forward", reads="x_offsets")
def jagged_by_jagged(x: Shape, y: Shape, *, x_offsets: Offsets, max_L: int) -> Cost:  # noqa: N803
    """Cost of the product of two jagged tensors: a matmul [k, rows] x [rows, n] per sequence."""
    k = x[-1]
    n = y[-1]
    rows = _rows(x, x_offsets, max_L)
    return Cost(rows * k * n, is_upper_bound=not isinstance(x_offsets, Values))


@formula(
    "fbgemm::batched_dense_vec_jagged_2d_mul", "fbgemm::batched_dense_vec_jagged_2d_mul_forward"
)
def vectors_by_jagged(v: Shape, a: Shape) -> int:
    """MACs of a weighted sum of the rows of each sequence, as in attention with a single query.

    Each sequence has one vector of weights for each head.
    """
    return prod(a)


@formula("fbgemm::batched_dense_vec_jagged_2d_mul_backward")
def vectors_by_jagged_backward(grad: Shape, v: Shape, a: Shape) -> int:
    """MACs of the gradients of `vectors_by_jagged`: of the weights `v` and of the rows `a`."""
    return 2 * prod(a)


# A softmax and its gradient cost as much as in `conventions.toml`.
formula("fbgemm::jagged_softmax", "fbgemm::jagged_softmax_forward")(per_element(5))
formula("fbgemm::jagged_softmax_backward")(per_element(4))
formula(
    "fbgemm::jagged_dense_elementwise_add_jagged_output",
    "fbgemm::jagged_dense_elementwise_mul",
    "fbgemm::jagged_dense_elementwise_mul_forward",
)(per_element(1))
# Each of the two gradients costs one operation per element.
formula("fbgemm::jagged_dense_elementwise_mul_backward")(per_element(2))
formula(
    "fbgemm::jagged_to_padded_dense",
    "fbgemm::jagged_to_padded_dense_forward",
    "fbgemm::jagged_to_padded_dense_backward",
    "fbgemm::dense_to_jagged",
    "fbgemm::dense_to_jagged_forward",
    "fbgemm::jagged_index_select_2d_forward",
    "fbgemm::jagged_slice_forward",
    "fbgemm::stacked_jagged_2d_to_dense_forward",
    "fbgemm::bounds_check_indices",
)(per_element(0))


@formula("fbgemm::jagged_dense_elementwise_add")
def elementwise_to_dense(values: Shape, *, y: Shape) -> Cost:
    """Cost of adding a jagged tensor and a dense tensor: one operation per element of `y`."""
    return Cost(other_flops=prod(y))


@formula(
    "fbgemm::dense_embedding_codegen_lookup_function",
    "fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper",
)
def embedding_bags(
    *,
    indices: Shape,
    D_offsets: Shape,  # noqa: N803
    max_D: int,  # noqa: N803
    total_D: int,  # noqa: N803
) -> Cost:
    """Cost of embedding bags over several tables.

    The cost is one addition per element of the table rows that the indices select. If the tables
    have different widths, the result is an upper bound, because it is unknown how many rows belong
    to each table.
    """
    tables = D_offsets[0] - 1
    same_width = tables * max_D == total_D
    return Cost(other_flops=prod(indices) * max_D, is_upper_bound=not same_width)


@formula("fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper")
def weighted_embedding_bags(
    *,
    indices: Shape,
    D_offsets: Shape,  # noqa: N803
    max_D: int,  # noqa: N803
    total_D: int,  # noqa: N803
) -> Cost:
    """Cost of embedding bags over several tables, with a weight for each index.

    Each element of the table rows that the indices select is multiplied by the weight of its index,
    and added to the sum.
    """
    bags = embedding_bags(indices=indices, D_offsets=D_offsets, max_D=max_D, total_D=total_D)
    return bags._replace(other_flops=2 * bags.other_flops)

"""FBGEMM: jagged tensors, whose rows of several lengths lie end to end, and embedding bags of many tables."""

from itertools import pairwise
from math import prod

from lflops.formulas.table import Cost, Shape, Values, formula, per_element

Offsets = Values | Shape


def _rows(values: Shape, offsets: Offsets, longest: int) -> tuple[int, bool]:
    """Rows that a kernel works on, none of a sequence beyond the longest.

    And whether their number is known.
    """
    if not isinstance(offsets, Values):
        return values[0], False
    return sum(min(end - begin, longest) for begin, end in pairwise(offsets)), True


@formula("fbgemm::jagged_dense_bmm", "fbgemm::jagged_dense_bmm_forward", reads="x_offsets")
def jagged_by_dense(x: Shape, *, x_offsets: Offsets, y: Shape, max_L: int) -> Cost:  # noqa: N803 - FBGEMM's names
    """The rows of each sequence by its own [k, n]."""
    rows, known = _rows(x, x_offsets, max_L)
    return Cost(rows * prod(y[1:]), is_upper_bound=not known)


@formula("fbgemm::jagged_jagged_bmm", "fbgemm::jagged_jagged_bmm_forward", reads="x_offsets")
def jagged_by_jagged(x: Shape, y: Shape, *, x_offsets: Offsets, max_L: int) -> Cost:  # noqa: N803
    """[k, rows] x [rows, n] of each sequence."""
    rows, known = _rows(x, x_offsets, max_L)
    return Cost(rows * x[-1] * y[-1], is_upper_bound=not known)


@formula(
    "fbgemm::batched_dense_vec_jagged_2d_mul", "fbgemm::batched_dense_vec_jagged_2d_mul_forward"
)
def vectors_by_jagged(v: Shape, a: Shape) -> int:
    """A weight of each head for each row."""
    return prod(a)


@formula("fbgemm::batched_dense_vec_jagged_2d_mul_backward")
def vectors_by_jagged_backward(grad: Shape, v: Shape, a: Shape) -> int:
    """The gradients of both."""
    return 2 * prod(a)


for operators, operations in {
    # by the convention for softmax, and for its gradient
    "jagged_softmax jagged_softmax_forward": 5,
    "jagged_softmax_backward": 4,
    "jagged_dense_elementwise_add_jagged_output jagged_dense_elementwise_mul jagged_dense_elementwise_mul_forward": 1,
    # one for each of the two gradients
    "jagged_dense_elementwise_mul_backward": 2,
    "jagged_to_padded_dense jagged_to_padded_dense_forward jagged_to_padded_dense_backward dense_to_jagged dense_to_jagged_forward": 0,
    "jagged_index_select_2d_forward jagged_slice_forward stacked_jagged_2d_to_dense_forward bounds_check_indices": 0,
}.items():
    formula(*(f"fbgemm::{name}" for name in operators.split()))(per_element(operations))


@formula("fbgemm::jagged_dense_elementwise_add")
def elementwise_to_dense(values: Shape, *, y: Shape) -> Cost:
    """One operation an element of the dense tensor."""
    return Cost(other_flops=prod(y))


@formula(
    "fbgemm::dense_embedding_codegen_lookup_function",
    "fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper",
)
def embedding_bags(*, indices: Shape, D_offsets: Shape, max_D: int, total_D: int) -> Cost:  # noqa: N803
    """One addition an element of the rows gathered.

    How many of each table only the offsets tell, where tables differ in width.
    """
    tables = D_offsets[0] - 1
    return Cost(other_flops=prod(indices) * max_D, is_upper_bound=tables * max_D != total_D)


@formula("fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper")
def weighted_embedding_bags(*, indices: Shape, D_offsets: Shape, max_D: int, total_D: int) -> Cost:  # noqa: N803
    """Embedding bags, and a product with the row's weight."""
    bags = embedding_bags(indices=indices, D_offsets=D_offsets, max_D=max_D, total_D=total_D)
    return bags._replace(other_flops=2 * bags.other_flops)

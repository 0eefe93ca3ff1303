"""Matrix products: every output element is a dot product over the inner dimension.

A bias adds one operation an element.

Distances and forms between all pairs of rows, and products of three tensors, are here too.
"""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, SparseShape, Values, adapted, formula


@formula("mm", "_int_mm", "hspmm")
def mm(a: Shape, b: Shape) -> int:
    """[n, k] x [k, m]; of a sparse matrix, what it stores."""
    if isinstance(a, SparseShape) and isinstance(b, SparseShape):
        raise NotImplementedError("two sparse matrices: the places of their elements decide")
    if isinstance(a, SparseShape):
        return a.stored * b[1]
    return a[0] * (b.stored if isinstance(b, SparseShape) else prod(b))


@formula("_sparse_mm_reduce_impl")
def reduced_mm(a: Shape, b: Shape, reduce: str) -> Cost:
    """A sparse matrix by a dense one, where sums may be means, or the largest or smallest products."""
    stored, columns = a.stored if isinstance(a, SparseShape) else prod(a), b[-1]
    if reduce in ("sum", "mean"):
        return Cost(stored * columns, other_flops=a[0] * columns if reduce == "mean" else 0)
    return Cost(other_flops=2 * stored * columns)


@formula("_sparse_mm_reduce_impl_backward")
def reduced_mm_backward(
    a: Shape, grad: Shape, weight: Shape, reduce: str, *, output_mask: Sequence[bool]
) -> Cost:
    """The gradients of the matrices that are asked for.

    Of the largest or smallest products only one in each place has any.
    """
    stored = a.stored if isinstance(a, SparseShape) else prod(a)
    if reduce in ("sum", "mean"):
        return Cost(stored * grad[-1] * sum(output_mask))
    return Cost(other_flops=2 * prod(grad) * sum(output_mask))


@formula("quantized::matmul", "transformers::grouped_mm_fallback")
def matmul(a: Shape, b: Shape) -> int:
    """[..., n, k] x [..., k, m].

    Where torch or the chip has no grouped product, transformers runs [rows, k] x [groups, k, m].
    """
    return prod(a) * b[-1]


# [..., m] x [m, k]
formula("mkldnn_linear_backward_input")(adapted(matmul, "size"))


@formula("mkldnn_linear_backward_weights")
def packed_linear_backward_weights(
    grad: Shape, x: Shape, weight: Shape, *, bias_defined: bool
) -> Cost:
    """[m, ...] x [..., k], and a sum for the bias."""
    return Cost(prod(grad) * x[-1], other_flops=prod(grad) if bias_defined else 0)


@formula("_foreach_mm")
def foreach_mm(a: Sequence[Shape], b: Sequence[Shape]) -> int:
    """Pairs of [n, k] x [k, m]."""
    return sum(map(mm, a, b))


@formula("sparse_sampled_addmm")
def sampled_addmm(x: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """X + [n, k] x [k, m], only where the sparse x stores something."""
    places = x.stored if isinstance(x, SparseShape) else prod(x)
    return Cost(places * a[-1], other_flops=places if beta else 0)


@formula("_scaled_mm", "_scaled_mm_v2")
def scaled_mm(a: Shape, b: Shape) -> Cost:
    """[n, k] x [k, m] of scaled eight-bit floats; scaling the result is one operation an element."""
    return Cost(mm(a, b), other_flops=a[0] * b[1])


@formula("addmm", "addmm_", "_sparse_addmm")
def addmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Bias + [n, k] x [k, m]."""
    return Cost(mm(a, b), other_flops=a[0] * b[1] if beta else 0)


@formula("_addmm_activation")
def addmm_activation(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """`addmm`, and one operation an element for the activation."""
    return Cost(mm(a, b), other_flops=a[0] * b[1] * (2 if beta else 1))


@formula("bmm")
def bmm(a: Shape, b: Shape) -> int:
    """[batch, n, k] x [batch, k, m]; of a sparse batch, what it stores."""
    return a.stored * b[2] if isinstance(a, SparseShape) else a[0] * mm(a[1:], b[1:])


@formula("baddbmm", "baddbmm_")
def baddbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Bias + [batch, n, k] x [batch, k, m]."""
    return Cost(bmm(a, b), other_flops=a[0] * a[1] * b[2] if beta else 0)


@formula("addbmm", "addbmm_")
def addbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Bias + the sum over the batch of [n, k] x [k, m]: the sum is one longer dot product."""
    return Cost(bmm(a, b), other_flops=a[1] * b[2] if beta else 0)


@formula("mv")
def mv(a: Shape, x: Shape) -> int:
    """[n, k] x [k]."""
    return a.stored if isinstance(a, SparseShape) else prod(a)


@formula("addmv", "addmv_")
def addmv(bias: Shape, a: Shape, x: Shape, *, beta: float = 1) -> Cost:
    """Bias + [n, k] x [k]."""
    return Cost(mv(a, x), other_flops=a[0] if beta else 0)


@formula("dot", "vdot")
def dot(x: Shape, y: Shape) -> int:
    """[k] x [k]."""
    return x[0]


@formula("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", reads="offs")
def grouped_mm(a: Shape, b: Shape, *, offs: Values | Shape | None = None) -> Cost:
    """Each group times its own matrix.

    What the groups divide is 2-d: rows of `a`, columns of `b`, or the inner dimension of both.
    """
    # Groups may end before what they divide does: the rest is not multiplied
    each = a[1:] if len(a) > len(b) else a
    macs = prod(each) * b[-1]
    if not isinstance(offs, Values) or not offs or (len(a) == 3 and len(b) == 3):
        return Cost(macs)
    divided = b[-1] if len(a) == 3 else a[-1] if len(b) == 2 else a[0]
    return Cost(macs, macs // divided * min(offs[-1], divided) if divided else 0)


@formula("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(x: Shape, weights: Shape) -> int:
    """The gradients of the rows and of the weights, both always."""
    return 2 * matmul(x, weights)


@formula("affine_grid_generator")
def affine_grid(theta: Shape, *, out: Shape) -> int:
    """[positions, k] x [k, dimensions] a sample, k one more than the dimensions."""
    return prod(out) * theta[-1]


@formula("_cdist_forward", "_euclidean_dist")
def cdist(x: Shape, y: Shape) -> Cost:
    """Each pair of rows once: a difference and a multiply-accumulate an element, a root a pair."""
    batch = prod(x[:-2]) or 1
    pairs = batch * x[-2] * y[-2]
    return Cost(pairs * x[-1], other_flops=pairs * (x[-1] + 1))


# a difference, scaled and added to the gradient
formula("_cdist_backward")(adapted(cdist, "grad"))


@formula("_pdist_forward")
def pdist(x: Shape) -> Cost:
    """Each pair of different rows once."""
    pairs = x[0] * (x[0] - 1) // 2
    return Cost(pairs * x[1], other_flops=pairs * (x[1] + 1))


formula("_pdist_backward")(adapted(pdist, "grad"))


@formula("_trilinear")
def trilinear(
    a: Shape,
    b: Shape,
    c: Shape,
    *,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
) -> Cost:
    """The product of three tensors over all dimensions together.

    A multiplication, and a multiply-accumulate into the sum.
    """
    expanded = [
        _expand(shape, places) for shape, places in ((a, expand1), (b, expand2), (c, expand3))
    ]
    elements = prod(map(max, zip(*expanded, strict=True)))
    return Cost(elements, other_flops=elements)


def _expand(shape: Shape, places: Sequence[int]) -> list[int]:
    expanded = list(shape)
    for place in sorted(places):
        expanded.insert(place, 1)
    return expanded

"""Formulas for matrix products, distances between rows, and products of three tensors.

In a matrix product, each output element is a dot product over the inner dimension. A bias adds one
operation per output element.
"""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, SparseShape, Values, adapted, formula


def _stored(x: Shape) -> int:
    """Count the elements that a tensor stores: all elements, or fewer if it is sparse."""
    return x.stored if isinstance(x, SparseShape) else prod(x)


def _bias_additions(elements: int, beta: float) -> int:
    """Count the operations of adding a bias: one per element, or none if `beta` is 0."""
    if not beta:
        return 0
    return elements


@formula("mm", "_int_mm", "hspmm")
def mm(a: Shape, b: Shape) -> int:
    """MACs of a matmul [n, k] x [k, m]. In a sparse matrix, only the stored elements count."""
    if isinstance(a, SparseShape) and isinstance(b, SparseShape):
        raise NotImplementedError(
            "the cost of multiplying two sparse matrices depends on the positions of their nonzero "
            "elements"
        )
    if isinstance(a, SparseShape):
        return a.stored * b[1]
    return a[0] * _stored(b)


@formula("_sparse_mm_reduce_impl")
def reduced_mm(a: Shape, b: Shape, reduce: str) -> Cost:
    """Cost of a sparse matrix times a dense matrix, with a choice of reduction.

    `reduce` defines how the products for an element of the result are combined: by a sum, a mean, a
    maximum or a minimum.
    """
    rows = a[0]
    columns = b[-1]
    pairs = _stored(a) * columns
    if reduce == "sum":
        return Cost(pairs)
    if reduce == "mean":
        return Cost(pairs, other_flops=rows * columns)
    # A multiplication and a comparison for each product.
    return Cost(other_flops=2 * pairs)


@formula("_sparse_mm_reduce_impl_backward")
def reduced_mm_backward(
    a: Shape, grad: Shape, weight: Shape, reduce: str, *, output_mask: Sequence[bool]
) -> Cost:
    """Cost of the requested gradients of the two matrices in `reduced_mm`.

    If the products were reduced by a maximum or a minimum, only one product per element of the
    result has a gradient.
    """
    gradients = sum(output_mask)
    if reduce in ("sum", "mean"):
        return Cost(_stored(a) * grad[-1] * gradients)
    return Cost(other_flops=2 * prod(grad) * gradients)


@formula("quantized::matmul", "transformers::grouped_mm_fallback")
def matmul(a: Shape, b: Shape) -> int:
    """MACs of a batch of matmuls [..., n, k] x [..., k, m].

    The formula is also correct for the grouped matmul of Hugging Face transformers, [rows, k] x
    [groups, k, m], which multiplies each row by only one of the matrices.
    """
    return prod(a) * b[-1]


# The gradient of the input is a matmul [..., m] x [m, k].
formula("mkldnn_linear_backward_input")(adapted(matmul, "size"))


@formula("mkldnn_linear_backward_weights")
def packed_linear_backward_weights(
    grad: Shape, x: Shape, weight: Shape, *, bias_defined: bool
) -> Cost:
    """Cost of the gradients of a linear layer's weight and bias.

    The gradient of the weight is a matmul [m, ...] x [..., k]. The gradient of the bias is a sum.
    """
    return Cost(prod(grad) * x[-1], other_flops=prod(grad) * bias_defined)


@formula("_foreach_mm")
def foreach_mm(a: Sequence[Shape], b: Sequence[Shape]) -> int:
    """MACs of several matmuls [n, k] x [k, m] in one call."""
    return sum(map(mm, a, b))


@formula("sparse_sampled_addmm")
def sampled_addmm(x: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Cost of x + [n, k] x [k, m], only for the elements that the sparse matrix x stores."""
    k = a[-1]
    return Cost(_stored(x) * k, other_flops=_bias_additions(_stored(x), beta))


@formula("_scaled_mm", "_scaled_mm_v2")
def scaled_mm(a: Shape, b: Shape) -> Cost:
    """Cost of a matmul [n, k] x [k, m] of 8-bit floats with scales.

    The scaling costs one operation per element of the result.
    """
    return Cost(mm(a, b), other_flops=a[0] * b[1])


@formula("addmm", "addmm_", "_sparse_addmm")
def addmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Cost of a matmul with a bias: bias + [n, k] x [k, m]."""
    return Cost(mm(a, b), other_flops=_bias_additions(a[0] * b[1], beta))


@formula("_addmm_activation")
def addmm_activation(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Cost of `addmm`, plus an activation function with one operation per element."""
    elements = a[0] * b[1]
    return Cost(mm(a, b), other_flops=elements + _bias_additions(elements, beta))


@formula("bmm")
def bmm(a: Shape, b: Shape) -> int:
    """MACs of a batched matmul [batch, n, k] x [batch, k, m].

    If the first tensor is sparse, only its stored elements count.
    """
    if isinstance(a, SparseShape):
        return a.stored * b[2]
    return a[0] * mm(a[1:], b[1:])


@formula("baddbmm", "baddbmm_")
def baddbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Cost of a batched matmul with a bias: bias + [batch, n, k] x [batch, k, m]."""
    return Cost(bmm(a, b), other_flops=_bias_additions(a[0] * a[1] * b[2], beta))


@formula("addbmm", "addbmm_")
def addbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """Cost of a bias plus the sum of a batch of matmuls [n, k] x [k, m].

    Each element of the result is a dot product over k and over the batch.
    """
    return Cost(bmm(a, b), other_flops=_bias_additions(a[1] * b[2], beta))


@formula("mv")
def mv(a: Shape, x: Shape) -> int:
    """MACs of a matrix [n, k] times a vector [k]."""
    return _stored(a)


@formula("addmv", "addmv_")
def addmv(bias: Shape, a: Shape, x: Shape, *, beta: float = 1) -> Cost:
    """Cost of a matrix times a vector, with a bias: bias + [n, k] x [k]."""
    return Cost(mv(a, x), other_flops=_bias_additions(a[0], beta))


@formula("dot", "vdot")
def dot(x: Shape, y: Shape) -> int:
    """MACs of the dot product of two vectors [k]."""
    return x[0]


@formula("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", reads="offs")
def grouped_mm(a: Shape, b: Shape, *, offs: Values | Shape | None = None) -> Cost:
    """Cost of a grouped matmul: several matmuls with groups of different sizes.

    A 2-d operand is divided into groups: `a` by its rows, `b` by its columns, or both by their
    inner dimension. `offs` contains the end of each group. If the last group ends before the end of
    the dimension, the kernel skips the rest.
    """
    columns = b[-1]
    if len(a) == 3 and len(b) == 3:
        return Cost(prod(a) * columns)
    if len(a) == 3:
        rows, inner = a[1:]
        divided = columns
    else:
        rows, inner = a
        divided = rows if len(b) == 3 else inner
    macs = rows * inner * columns
    if not isinstance(offs, Values) or not offs:
        return Cost(macs)
    if not divided:
        return Cost(macs, executed_macs=0)
    end = min(offs[-1], divided)
    return Cost(macs, executed_macs=macs // divided * end)


@formula("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(x: Shape, weights: Shape) -> int:
    """MACs of the gradients of a grouped matmul: of the rows `x`, and of `weights`."""
    return 2 * matmul(x, weights)


@formula("affine_grid_generator")
def affine_grid(theta: Shape, *, out: Shape) -> int:
    """MACs of an affine grid: one matmul [positions, k] x [k, dimensions] for each sample.

    Here, k is the number of dimensions plus one.
    """
    return prod(out) * theta[-1]


def _distances(pairs: int, width: int) -> Cost:
    """Cost of the Euclidean distances between pairs of rows with `width` elements.

    Each pair costs a difference and a multiply-accumulate per element, and one root.
    """
    return Cost(pairs * width, other_flops=pairs * (width + 1))


@formula("_cdist_forward", "_euclidean_dist")
def cdist(x: Shape, y: Shape) -> Cost:
    """Cost of the distances between each row of x and each row of y."""
    batch = prod(x[:-2]) or 1
    return _distances(pairs=batch * x[-2] * y[-2], width=x[-1])


# Backward costs as much as forward: each difference is multiplied by a factor and added to the
# gradient.
formula("_cdist_backward")(adapted(cdist, "grad"))


@formula("_pdist_forward")
def pdist(x: Shape) -> Cost:
    """Cost of the distances between all pairs of rows of a matrix."""
    rows, width = x
    return _distances(rows * (rows - 1) // 2, width)


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
    """Cost of multiplying three tensors element by element, and summing the products.

    The tensors are broadcast to the same shape. Each element needs a multiplication, and a
    multiply-accumulate into the sum.
    """
    expanded = (_expand(a, expand1), _expand(b, expand2), _expand(c, expand3))
    elements = prod(map(max, zip(*expanded, strict=True)))
    return Cost(elements, other_flops=elements)


def _expand(shape: Shape, places: Sequence[int]) -> list[int]:
    """Return the shape with dimensions of length 1 inserted at the given positions."""
    expanded = list(shape)
    for place in sorted(places):
        expanded.insert(place, 1)
    return expanded

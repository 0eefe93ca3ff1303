"""Matrix products: every output element is a dot product over the inner dimension. A bias adds one operation an element."""

from math import prod

from lflops.collect.counting.formulas.table import Cost, Shape, formula


@formula("mm", "_int_mm")
def mm(a: Shape, b: Shape) -> int:
    """[n, k] x [k, m]."""
    return a[0] * a[1] * b[1]


@formula("_scaled_mm")
def scaled_mm(a: Shape, b: Shape) -> Cost:
    """[n, k] x [k, m] of scaled eight-bit floats; scaling the result is one operation an element."""
    return Cost(mm(a, b), other_flops=a[0] * b[1])


@formula("addmm", "_addmm_activation")
def addmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """bias + [n, k] x [k, m]."""
    return Cost(mm(a, b), other_flops=a[0] * b[1] if beta else 0)


@formula("bmm")
def bmm(a: Shape, b: Shape) -> int:
    """[batch, n, k] x [batch, k, m]."""
    return a[0] * mm(a[1:], b[1:])


@formula("baddbmm")
def baddbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """bias + [batch, n, k] x [batch, k, m]."""
    return Cost(bmm(a, b), other_flops=a[0] * a[1] * b[2] if beta else 0)


@formula("addbmm")
def addbmm(bias: Shape, a: Shape, b: Shape, *, beta: float = 1) -> Cost:
    """bias + the sum over the batch of [n, k] x [k, m]: the sum is one longer dot product."""
    return Cost(bmm(a, b), other_flops=a[1] * b[2] if beta else 0)


@formula("mv")
def mv(a: Shape, x: Shape) -> int:
    """[n, k] x [k]."""
    return prod(a)


@formula("addmv")
def addmv(bias: Shape, a: Shape, x: Shape, *, beta: float = 1) -> Cost:
    """bias + [n, k] x [k]."""
    return Cost(prod(a), other_flops=a[0] if beta else 0)


@formula("dot", "vdot")
def dot(x: Shape, y: Shape) -> int:
    """[k] x [k]."""
    return x[0]


@formula("_grouped_mm", "_scaled_grouped_mm")
def grouped_mm(a: Shape, b: Shape, *, offs: Shape | None = None) -> int:
    """Rows in groups, each group times its own matrix. Where both are 2-d it is the inner dimension that the groups divide."""
    if offs is not None and len(a) == len(b) == 2:
        return a[0] * a[1] * b[1]
    return prod(a) * b[-1]

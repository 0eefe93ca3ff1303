"""Products with packed weights: the packing hides the weight's shape, but not the input's and the result's."""

from math import prod

from lflops.formulas.table import Cost, Shape, formula


@formula(
    "quantized::linear",
    "quantized::linear_relu",
    "quantized::linear_dynamic",
    "quantized::linear_relu_dynamic",
    "quantized::linear_dynamic_fp16",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_dyn_quant_matmul_4bit",
    "mkldnn_linear",
)
def packed_linear(x: Shape, *, out: Shape) -> int:
    """[..., k] x [k, m]."""
    return prod(x) * out[-1]


@formula("_sparse_semi_structured_linear")
def half_sparse_linear(x: Shape, weight: Shape, *, out: Shape) -> int:
    """Two of every four weights are kept, and those are multiplied."""
    return prod(x[:-1]) * out[-1] * (x[-1] // 2)


@formula("_sparse_semi_structured_mm")
def half_sparse_mm(weight: Shape, meta: Shape, x: Shape) -> int:
    """[n, k / 2] of [n, k] x [k, m]."""
    return prod(weight) * x[-1]


@formula("_sparse_semi_structured_addmm")
def half_sparse_addmm(bias: Shape, weight: Shape, meta: Shape, x: Shape) -> Cost:
    """The same, and a bias."""
    return Cost(half_sparse_mm(weight, meta, x), other_flops=weight[0] * x[-1])


@formula("_cslt_sparse_mm")
def packed_half_sparse_mm(weight: Shape, x: Shape, bias: Shape | None, *, out: Shape) -> Cost:
    """[n, k] x [k, m] of which the packing hides half of k."""
    return Cost(prod(out) * x[0] // 2, other_flops=prod(out) if bias is not None else 0)

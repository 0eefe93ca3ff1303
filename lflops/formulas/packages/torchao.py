"""torchao: products with short weights and short activations.

Most of what it does is ATen's, as `_scaled_mm` and `_grouped_mm`.
"""

from math import prod

from lflops.formulas.attention.fused import Scores, attention_formula, scaled_dot_product
from lflops.formulas.quantized import packed_linear
from lflops.formulas.table import Cost, Shape, formula, per_element

formula(
    "torchao::da8w4_linear_cpu",
    "torchao::float8_linear_cpu",
    *(f"torchao::_linear_8bit_act_{bits}bit_weight" for bits in range(1, 9)),
)(packed_linear)


@formula("torchao::mx_fp8_bf16", "torchao::blockwise_scaled_mm")
def scaled_mm(a: Shape, b: Shape, *, out: Shape) -> Cost:
    """[n, k] x [k, m] of floats of eight bits in scaled blocks."""
    return Cost(prod(a) * out[-1], other_flops=prod(out))


@formula("torchao::rowwise_scaled_linear_sparse_cutlass_f8f8")
def half_sparse_linear(x: Shape, *, out: Shape, bias: Shape | None = None) -> Cost:
    """Two of every four weights are kept; the result is scaled by its rows and its columns."""
    return Cost(prod(x) * out[-1] // 2, other_flops=prod(out) * (2 + (bias is not None)))


@attention_formula("torchao::qscaled_dot_product")
def quantized_attention(
    query: Shape, key: Shape, value: Shape, *, is_causal: bool = False
) -> Scores:
    """[batch, heads, length, width], quantized."""
    return scaled_dot_product(query, key, value, is_causal=is_causal)


@formula("torchao::_scaled_embedding_bag")
def scaled_embedding_bag(weight: Shape, indices: Shape) -> Cost:
    """A scale and an addition an element of the rows gathered."""
    return Cost(other_flops=2 * prod(indices) * weight[-1])


formula(
    "torchao::da8w4_linear_prepack_cpu",
    "torchao::float8_linear_prepack_cpu",
    "torchao::to_sparse_semi_structured_cutlass_sm9x_f8",
)(per_element(0))

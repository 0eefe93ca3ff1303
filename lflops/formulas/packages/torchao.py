"""Formulas for operators of torchao, such as matmuls with quantized weights and activations.

Most of torchao's code calls operators of ATen instead, such as `_scaled_mm` and `_grouped_mm`.
"""

from math import prod

from lflops.formulas.attention.fused import Scores, attention_formula, scaled_dot_product
from lflops.formulas.quantized import packed_linear
from lflops.formulas.table import Cost, Shape, formula, per_element

formula("torchao::da8w4_linear_cpu", "torchao::float8_linear_cpu")(packed_linear)
for bits in range(1, 9):
    formula(f"torchao::_linear_8bit_act_{bits}bit_weight")(packed_linear)


@formula("torchao::mx_fp8_bf16", "torchao::blockwise_scaled_mm")
def scaled_mm(a: Shape, b: Shape, *, out: Shape) -> Cost:
    """Cost of a matmul [n, k] x [k, m] of 8-bit floats, with a scale for each block of elements."""
    return Cost(prod(a) * out[-1], other_flops=prod(out))


@formula("torchao::rowwise_scaled_linear_sparse_cutlass_f8f8")
def half_sparse_linear(x: Shape, *, out: Shape, bias: Shape | None = None) -> Cost:
    """Cost of a matmul in which only two of every four weights are kept and multiplied.

    The result is multiplied by a scale per row and a scale per column.
    """
    operations = 2 + (bias is not None)
    return Cost(prod(x) * out[-1] // 2, other_flops=operations * prod(out))


@attention_formula("torchao::qscaled_dot_product")
def quantized_attention(
    query: Shape, key: Shape, value: Shape, *, is_causal: bool = False
) -> Scores:
    """Count the attention scores for quantized tensors of shape [batch, heads, length, width]."""
    return scaled_dot_product(query, key, value, is_causal=is_causal)


@formula("torchao::_scaled_embedding_bag")
def scaled_embedding_bag(weight: Shape, indices: Shape) -> Cost:
    """Cost of an embedding bag with quantized rows.

    Each element of the rows that the indices select is multiplied by a scale and added.
    """
    return Cost(other_flops=2 * prod(indices) * weight[-1])


formula(
    "torchao::da8w4_linear_prepack_cpu",
    "torchao::float8_linear_prepack_cpu",
    "torchao::to_sparse_semi_structured_cutlass_sm9x_f8",
)(per_element(0))

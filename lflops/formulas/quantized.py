"""Formulas for operators with quantized or packed weights, and for half-sparse matmuls.

Formulas for packed weights use the shapes of the input and the result, because an operator does not
receive the shape of a packed weight.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, formula


@formula(
    "quantized::linear",
    "quantized::linear_relu",
    "quantized::linear_leaky_relu",
    "quantized::linear_tanh",
    "quantized::linear_dynamic",
    "quantized::linear_relu_dynamic",
    "quantized::linear_dynamic_fp16",
    "quantized::linear_relu_dynamic_fp16",
    "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
    "quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    "onednn::qlinear_pointwise",
    "onednn::linear_dynamic_fp16",
    "onednn::linear_relu_dynamic_fp16",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros",
    "_mixed_dtypes_linear",
    "_dyn_quant_matmul_4bit",
    "mkldnn_linear",
)
def packed_linear(x: Shape, *, out: Shape) -> int:
    """MACs of a linear layer with a packed weight: [..., k] x [k, m]."""
    return prod(x) * out[-1]


@formula("_sparse_semi_structured_linear")
def half_sparse_linear(x: Shape, weight: Shape, *, out: Shape) -> int:
    """MACs of [..., k] x [k, m], where only two of every four weights are kept and multiplied."""
    *batch, k = x
    return prod(batch) * out[-1] * (k // 2)


@formula("_sparse_semi_structured_mm")
def half_sparse_mm(weight: Shape, meta: Shape, x: Shape) -> int:
    """MACs of [n, k] x [k, m], where only half of the weights are kept and stored as [n, k / 2]."""
    return prod(weight) * x[-1]


@formula("_sparse_semi_structured_addmm")
def half_sparse_addmm(bias: Shape, weight: Shape, meta: Shape, x: Shape) -> Cost:
    """Cost of `half_sparse_mm` with a bias."""
    return Cost(half_sparse_mm(weight, meta, x), other_flops=weight[0] * x[-1])


@formula("_cslt_sparse_mm")
def packed_half_sparse_mm(weight: Shape, x: Shape, bias: Shape | None, *, out: Shape) -> Cost:
    """Cost of [n, k] x [k, m] with a bias, where only half of the weights are multiplied."""
    k = x[0]
    has_bias = bias is not None
    return Cost(prod(out) * k // 2, other_flops=prod(out) * has_bias)


@formula(
    "onednn::qconv_pointwise",
    "onednn::qconv1d_pointwise",
    "onednn::qconv2d_pointwise",
    "onednn::qconv3d_pointwise",
)
def packed_convolution(x: Shape, *, qw: Shape, out: Shape) -> int:
    """MACs of a convolution with a packed weight.

    The kernel is applied at each position of the output [batch, channels, *positions]. A packed
    weight has as many elements as the original weight, so its shape gives the MACs per position.
    """
    channels = out[1]
    positions = prod(out) // channels
    return positions * prod(qw)


@formula("quantized::embedding_bag_byte", "quantized::embedding_bag_4bit")
def quantized_embedding_bag(weight: object, indices: Shape, *, out: Shape) -> Cost:
    """Cost of a quantized embedding bag.

    The cost is one addition per element of the table rows that the indices select.
    """
    return Cost(other_flops=prod(indices) * out[-1])


@formula(
    "quantized::add_relu",
    "quantized::add_scalar",
    "quantized::add_scalar_relu",
    "quantized::mul_relu",
    "quantized::mul_scalar",
    "quantized::mul_scalar_relu",
    "quantized::batch_norm",
    "quantized::batch_norm_relu",
    "quantized::batch_norm1d",
    "quantized::batch_norm1d_relu",
    "quantized::batch_norm2d",
    "quantized::batch_norm2d_relu",
    "quantized::batch_norm3d",
    "quantized::batch_norm3d_relu",
    "quantized::layer_norm",
    "quantized::group_norm",
    "quantized::instance_norm",
    "quantized::softmax",
    "quantized::prelu",
    "quantized::linear_prepack",
    "quantized::conv1d_prepack",
    "quantized::conv2d_prepack",
    "quantized::conv3d_prepack",
    "quantized::conv_transpose1d_prepack",
    "quantized::conv_transpose2d_prepack",
    "quantized::conv_transpose3d_prepack",
    "quantized::embedding_bag_byte_prepack",
    "quantized::embedding_bag_4bit_prepack",
    "quantized::embedding_byte",
    "quantized::embedding_4bit",
    "onednn::qadd",
    "onednn::qadd_relu",
    "onednn::qmul",
    "onednn::qbatch_norm2d",
    "onednn::qlinear_prepack",
    "onednn::qconv_prepack",
)
def integer_result(x: object) -> Cost:
    """Return a cost of 0 operations, because the result has no floating-point numbers.

    The bytes that the operator moves are counted separately.
    """
    return Cost()

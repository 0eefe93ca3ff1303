"""Products with packed weights.

The packing hides the weight's shape, but not the input's and the result's.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, formula


@formula(
    """
    quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic quantized::linear_dynamic_fp16
    quantized::linear_relu_dynamic_fp16 quantized::linear_leaky_relu quantized::linear_tanh
    quantized::linear_with_input_q_dq_qweight_dq_output_fp32 quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32
    onednn::qlinear_pointwise onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16 _weight_int8pack_mm _weight_int4pack_mm
    _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros _mixed_dtypes_linear _dyn_quant_matmul_4bit mkldnn_linear
    """
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
    """[n, k / 2] of [n, k] x [k, m], and a bias."""
    return Cost(half_sparse_mm(weight, meta, x), other_flops=weight[0] * x[-1])


@formula("_cslt_sparse_mm")
def packed_half_sparse_mm(weight: Shape, x: Shape, bias: Shape | None, *, out: Shape) -> Cost:
    """[n, k] x [k, m] of which the packing hides half of k."""
    return Cost(prod(out) * x[0] // 2, other_flops=prod(out) if bias is not None else 0)


@formula(
    "onednn::qconv_pointwise",
    "onednn::qconv1d_pointwise",
    "onednn::qconv2d_pointwise",
    "onednn::qconv3d_pointwise",
)
def packed_convolution(x: Shape, *, qw: Shape, out: Shape) -> int:
    """A kernel's products at each position of the output, [batch, channels, *positions].

    The packing keeps the weight's size.
    """
    return prod(out) // out[1] * prod(qw)


@formula("quantized::embedding_bag_byte", "quantized::embedding_bag_4bit")
def quantized_embedding_bag(weight: object, indices: Shape, *, out: Shape) -> Cost:
    """One addition an element of the rows gathered."""
    return Cost(other_flops=prod(indices) * out[-1])


@formula(
    *(f"quantized::{kind}_{scalar}relu" for kind in ("add", "mul") for scalar in ("", "scalar_")),
    *(f"quantized::{kind}_scalar" for kind in ("add", "mul")),
    *(
        f"quantized::batch_norm{dimensions}{kind}"
        for dimensions in ("", "1d", "2d", "3d")
        for kind in ("", "_relu")
    ),
    *(
        f"quantized::{kind}"
        for kind in ("layer_norm", "group_norm", "instance_norm", "softmax", "prelu")
    ),
    *(f"onednn::{kind}" for kind in ("qadd", "qadd_relu", "qmul", "qbatch_norm2d")),
    *(
        f"quantized::{kind}_prepack"
        for kind in (
            "linear",
            "conv1d",
            "conv2d",
            "conv3d",
            "embedding_bag_byte",
            "embedding_bag_4bit",
        )
    ),
    *(f"quantized::conv_transpose{dimensions}d_prepack" for dimensions in (1, 2, 3)),
    *(f"quantized::{kind}" for kind in ("embedding_byte", "embedding_4bit")),
    "onednn::qlinear_prepack",
    "onednn::qconv_prepack",
)
def of_integers(x: object) -> Cost:
    """No floating result, and so no operation by the convention: bytes alone."""
    return Cost()

"""Formulas for bitsandbytes: 4-bit and 8-bit matmuls, quantization, and 8-bit optimizers."""

from math import prod

from lflops.formulas.table import Cost, Shape, formula, per_element

UPDATES = {
    "adam": 10,
    "lamb": 14,
    "lars": 8,
    "momentum": 3,
    "rmsprop": 7,
    "adagrad": 6,
    "lion": 7,
    "ademamix": 15,
}
"""Number of operations per element of an optimizer's update, keyed by the optimizer's name.

An optimizer without a fused kernel needs as many operations. Weight decay costs one more operation.
"""


def _scaled(product: int, result_size: int, bias: Shape | None) -> Cost:
    """Cost of a matmul whose result is multiplied by a scale per row and a scale per column.

    Args:
        product: The MACs of the matmul.
        result_size: The number of elements of the result.
        bias: The shape of the bias that is added; `None` without a bias.
    """
    operations = 2 + (bias is not None)
    return Cost(product, other_flops=operations * result_size)


@formula("bitsandbytes::int8_linear_matmul")
def int8_product(a: Shape, b: Shape) -> int:
    """MACs of an 8-bit matmul of [..., k] and the transpose of [n, k]."""
    return prod(a) * b[0]


@formula("bitsandbytes::int8_scaled_mm")
def int8_scaled_product(a: Shape, b: Shape, *, bias: Shape | None = None) -> Cost:
    """Cost of an 8-bit matmul whose result is multiplied by a scale per row and per column."""
    rows = prod(a[:-1])
    columns = b[0]
    return _scaled(int8_product(a, b), rows * columns, bias)


@formula("bitsandbytes::int8_mixed_scaled_mm")
def int8_mixed_product(
    a: Shape, ca: Shape, cb: Shape, *, outlier_cols: Shape | None = None, bias: Shape | None = None
) -> Cost:
    """Cost of `int8_scaled_mm`, plus a matmul of columns whose values are too large for 8 bits."""
    result_size = prod(ca[:-1]) * cb[0]
    inner = ca[-1]
    scaled = _scaled(result_size * inner, result_size, bias)
    if outlier_cols is None:
        return scaled
    outliers = prod(outlier_cols)
    if not outliers:
        return scaled
    return Cost(
        macs=scaled.macs + result_size * outliers,
        other_flops=scaled.other_flops + result_size,
    )


@formula("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit")
def four_bit_product(a: Shape, b: Shape, weight: Shape) -> int:
    """MACs of a matmul of [..., k] and the transpose of a 4-bit matrix [n, k].

    The matrix `b` is packed, so its shape is not [n, k]. The kernel receives the list [n, k] as an
    additional argument, `weight`.
    """
    return prod(a) * weight[0]


@formula("bitsandbytes::dequantize_4bit")
def dequantize_four_bits(a: Shape, *, shape: Shape) -> Cost:
    """Cost of dequantizing 4-bit numbers: each element is multiplied by a scale."""
    return Cost(other_flops=prod(shape))


# One multiplication by a scale per element.
formula("bitsandbytes::dequantize_blockwise", "bitsandbytes::int8_vectorwise_dequant")(
    per_element(1)
)
# Per element, the maximum of a block and a multiplication by a scale.
formula(
    "bitsandbytes::quantize_4bit",
    "bitsandbytes::quantize_blockwise",
    "bitsandbytes::int8_vectorwise_quant",
)(per_element(2))
# Per element, the maximum of a row, the maximum of a column, and a multiplication by each scale.
formula("bitsandbytes::int8_double_quant")(per_element(4))


@formula("bitsandbytes::int8_mm_dequant")
def dequantize_product(a: Shape, *, bias: Shape | None = None) -> Cost:
    """Cost of dequantizing the integer result of a matmul.

    Each element is multiplied by the scale of its row and by the scale of its column. A bias is
    added if there is one.
    """
    return _scaled(0, prod(a), bias)


@formula("bitsandbytes::optimizer_update_32bit")
def update(optimizer_name: str, g: Shape, *, weight_decay: float) -> Cost:
    """Cost of an optimizer's update of one parameter, whose gradient has the shape `g`."""
    operations = UPDATES[optimizer_name] + bool(weight_decay)
    return Cost(other_flops=operations * prod(g))


@formula("bitsandbytes::optimizer_update_8bit_blockwise")
def eight_bit_update(
    optimizer_name: str, g: Shape, *, state2: Shape | None, weight_decay: float
) -> Cost:
    """Cost of an optimizer's update of one parameter, with an 8-bit state.

    In addition to the operations of `update`, each state tensor is dequantized (1 operation per
    element) and quantized (2 operations per element).
    """
    states = 1 + (state2 is not None)
    operations = UPDATES[optimizer_name] + bool(weight_decay) + 3 * states
    return Cost(other_flops=operations * prod(g))

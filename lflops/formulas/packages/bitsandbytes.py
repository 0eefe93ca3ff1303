"""bitsandbytes: products with weights of 4 and 8 bits, what packs and unpacks them, and optimizers with states of 8 bits."""

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
"""Operations an element of one optimizer's update, as the same update costs operator by operator.

One more for a decay.
"""


@formula("bitsandbytes::int8_linear_matmul")
def int8_product(a: Shape, b: Shape) -> int:
    """[..., k] x [n, k]."""
    return prod(a) * b[0]


@formula("bitsandbytes::int8_scaled_mm")
def int8_scaled_product(a: Shape, b: Shape, *, bias: Shape | None = None) -> Cost:
    """`int8_linear_matmul`, scaled by its rows and its columns."""
    return Cost(int8_product(a, b), other_flops=prod(a[:-1]) * b[0] * (2 + (bias is not None)))


@formula("bitsandbytes::int8_mixed_scaled_mm")
def int8_mixed_product(
    a: Shape, ca: Shape, cb: Shape, *, outlier_cols: Shape | None = None, bias: Shape | None = None
) -> Cost:
    """`int8_scaled_mm`, and a product of the columns that are too large for 8 bits."""
    outliers = prod(outlier_cols) if outlier_cols is not None else 0
    rows, columns = prod(ca[:-1]), cb[0]
    return Cost(
        rows * columns * (ca[-1] + outliers),
        other_flops=rows * columns * (2 + (bias is not None) + bool(outliers)),
    )


@formula("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit")
def four_bit_product(a: Shape, b: Shape, weight: Shape) -> int:
    """[..., k] x [n, k], where packing hides the weight's shape."""
    return prod(a) * weight[0]


@formula("bitsandbytes::dequantize_4bit")
def unpack_four_bits(a: Shape, *, shape: Shape) -> Cost:
    """A scale an element."""
    return Cost(other_flops=prod(shape))


for operators, operations in {
    # a scale
    "dequantize_blockwise int8_vectorwise_dequant": 1,
    # the largest of a block, and a scale
    "quantize_4bit quantize_blockwise int8_vectorwise_quant": 2,
    # by rows, and by columns
    "int8_double_quant": 4,
}.items():
    formula(*(f"bitsandbytes::{name}" for name in operators.split()))(per_element(operations))


@formula("bitsandbytes::int8_mm_dequant")
def unpack_product(a: Shape, *, bias: Shape | None = None) -> Cost:
    """A scale by row, one by column."""
    return Cost(other_flops=prod(a) * (2 + (bias is not None)))


@formula("bitsandbytes::optimizer_update_32bit")
def update(optimizer_name: str, g: Shape, *, weight_decay: float) -> Cost:
    """As it costs operator by operator."""
    return Cost(other_flops=prod(g) * (UPDATES[optimizer_name] + bool(weight_decay)))


@formula("bitsandbytes::optimizer_update_8bit_blockwise")
def update_of_eight_bits(
    optimizer_name: str, g: Shape, *, state2: Shape | None, weight_decay: float
) -> Cost:
    """`optimizer_update_32bit`, and each state is unpacked (1) and packed (2)."""
    states = 1 + (state2 is not None)
    return Cost(other_flops=prod(g) * (UPDATES[optimizer_name] + bool(weight_decay) + 3 * states))

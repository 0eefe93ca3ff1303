"""Formulas for Transformer Engine's C++ functions, which are not torch operators.

Their FP8 tensors are not torch tensors, but objects whose method `size()` returns the shape.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from lflops.formulas.attention.fused import (
    Packing,
    Scores,
    Window,
    attention_backward_of_scores,
    attention_of_scores,
    kernel_scores,
)
from lflops.formulas.table import Cost, Shape, Values, adapted, function_formula, per_element

TEX = "transformer_engine_torch:"


def _sides(x: Shape, *, last_is_inner: bool) -> tuple[int, int]:
    """Return the lengths of the outer and the inner side of an operand of a matmul.

    The operand is treated as a matrix: its last dimension is one side, and all other dimensions are
    merged into the other side. The matmul sums over the inner side.
    """
    leading = prod(x[:-1])
    if last_is_inner:
        return leading, x[-1]
    return x[-1], leading


def _product(
    a: Shape, b: Shape, *, transposed_a: bool, transposed_b: bool, operations: int = 0
) -> Cost:
    """Cost of a matmul, plus `operations` for each element of its result.

    The shapes are in torch's order, but `transposed_a` and `transposed_b` are arguments for cuBLAS,
    which reads matrices column by column. So the matmul sums over the last dimension of `a` if
    `transposed_a` is true, and over the last dimension of `b` if `transposed_b` is false.
    """
    m, k = _sides(a, last_is_inner=transposed_a)
    n, _ = _sides(b, last_is_inner=not transposed_b)
    return Cost(m * n * k, other_flops=operations * m * n)


@function_formula(f"{TEX}generic_gemm")
def gemm(
    a: Shape,
    transa: bool,  # noqa: FBT001 - callers pass it by position
    b: Shape,
    transb: bool,  # noqa: FBT001
    d: object,
    quantizer: object,
    dtype: object,
    bias: Shape | None,
    bias_type: object,
    gelu: bool = False,  # noqa: FBT001, FBT002
) -> Cost:
    """Cost of a matmul whose operands may be transposed.

    The kernel may also add a bias or compute the gradient of the bias, and compute a GELU.
    """
    operations = (bias is not None) + bool(gelu)
    return _product(a, b, transposed_a=transa, transposed_b=transb, operations=operations)


@function_formula(f"{TEX}te_general_grouped_gemm")
def grouped_gemm(
    a: Sequence[Shape],
    transa: bool,  # noqa: FBT001
    b: Sequence[Shape],
    transb: bool,  # noqa: FBT001
) -> Cost:
    """Cost of several matmuls, one for each pair of matrices in `a` and `b`."""
    macs = 0
    for left, right in zip(a, b, strict=True):
        macs += _product(left, right, transposed_a=transa, transposed_b=transb).macs
    return Cost(macs)


@function_formula(f"{TEX}layernorm_fwd")
def layer_norm(x: Shape, weight: Shape, bias: Shape | None) -> Cost:
    """Cost of a layer norm: 5 operations per element, and one more each for weight and bias.

    This is the convention in `conventions.toml`.
    """
    operations = 6 + (bias is not None)
    return Cost(other_flops=operations * prod(x))


_PER_ELEMENT = {
    # Twice the forward pass with a bias.
    "layernorm_bwd": 14,
    "rmsnorm_fwd": 4,
    "rmsnorm_bwd": 8,
    "rmsnorm_bwd_add": 9,
    "gelu relu silu qgelu srelu dgelu drelu dsilu dqgelu dsrelu": 1,
    # The activation function of one half of the input is multiplied by the other half. This costs 2
    # operations per element of the result, and so 1 per element of the input.
    "swiglu geglu reglu qgeglu sreglu": 1,
}
for functions, operations in _PER_ELEMENT.items():
    for name in functions.split():
        function_formula(TEX + name)(per_element(operations))

# The gradients cost twice as much as forward: 2 operations per element of the input.
for name in ("dswiglu", "dgeglu", "dreglu", "dqgeglu", "dsreglu"):
    function_formula(TEX + name)(adapted(per_element(2), "grad"))


class _AttentionArguments:
    """The arguments of fused attention, grouped by their types.

    The order of the arguments differs between releases, but the order within each group is the
    same.

    Attributes:
        tensors: Shapes of the queries, keys, values, and other tensors.
        offsets: The positions at which the query sequences and the key sequences begin. They are
            `Values`, or a one-dimensional shape if the values are unknown.
        lengths: The integer arguments. The first two are the lengths of the longest query sequence
            and of the longest key sequence.
        window: Number of keys that a query sees before its position, and after it; -1 for all.
        mask: All other arguments, as one text in upper case. It includes the name of the mask.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.tensors: list[Shape] = []
        self.offsets: list[Values | Shape] = []
        self.lengths: list[int] = []
        self.window = (-1, -1)
        self.mask = ""
        windows = []
        for argument in given:
            if isinstance(argument, bool | float):
                continue
            if isinstance(argument, int):
                self.lengths.append(argument)
            elif isinstance(argument, Values):
                self.offsets.append(argument)
            elif not isinstance(argument, tuple | list):
                self.mask += f" {argument}".upper()
            elif len(argument) == 2:
                windows.append(argument)
            elif isinstance(argument, tuple) and len(argument) == 1:
                self.offsets.append(argument)
            elif isinstance(argument, tuple) and len(argument) > 2:
                self.tensors.append(argument)
        if windows:
            self.window = tuple(windows[0])


def _attention(given: Sequence[Any]) -> tuple[Scores, int, int]:
    """Return the number of scores, the width of queries and keys, and the width of values.

    `given` are the arguments of fused attention, in the order of the installed release.
    """
    arguments = _AttentionArguments(given)
    query, key, value = arguments.tensors[:3]
    query_offsets, key_offsets = arguments.offsets[:2]
    longest_query, longest_key = arguments.lengths[:2]
    before, after = arguments.window
    causal = "CAUSAL" in arguments.mask
    from_last = "BOTTOM_RIGHT" in arguments.mask or not causal
    window = Window.of(before, after, causal=causal, from_last=from_last)
    packing = Packing(query_offsets, key_offsets, longest_query, longest_key)
    scores = kernel_scores(_packed(query), _packed(key), packing, window)
    return scores, query[-1], value[-1]


def _packed(shape: Shape) -> Shape:
    """Convert a shape to [tokens, heads, width], with all dimensions before the heads merged."""
    return (prod(shape[:-2]), *shape[-2:])


@function_formula(f"{TEX}fused_attn_fwd", reads="*")
def fused_attention(*given: Any) -> Cost:
    """Cost of fused attention in forward.

    The layout of the tensors does not matter, because the offsets define the lengths of sequences.
    """
    return attention_of_scores(*_attention(given))


@function_formula(f"{TEX}fused_attn_bwd", reads="*")
def fused_attention_backward(*given: Any) -> Cost:
    """Cost of the gradients of fused attention."""
    return attention_backward_of_scores(*_attention(given))

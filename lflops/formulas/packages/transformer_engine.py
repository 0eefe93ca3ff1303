"""Transformer Engine: its functions in C++, which the dispatcher does not see.

FP8 tensors are objects that have a size.
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
# sides of a window; every tensor of queries has more dimensions, and every tensor of offsets fewer
PAIR = 2


def _product(a: Shape, b: Shape, *, transposed_a: bool, transposed_b: bool) -> tuple[int, int]:
    # cuBLAS reads matrices by columns, so that `transposed` keeps the last dimension inside.
    k, m = (a[-1], prod(a[:-1])) if transposed_a else (prod(a[:-1]), a[-1])
    n = b[-1] if transposed_b else prod(b[:-1])
    return m * n * k, m * n


@function_formula(f"{TEX}generic_gemm")
def gemm(
    a: Shape,
    transa: bool,  # noqa: FBT001 - as the function is called
    b: Shape,
    transb: bool,  # noqa: FBT001
    d: object,
    quantizer: object,
    dtype: object,
    bias: Shape | None,
    bias_type: object,
    gelu: bool = False,  # noqa: FBT001, FBT002
) -> Cost:
    """A product of any layout, with a bias or its gradient, and perhaps a GELU behind it."""
    macs, elements = _product(a, b, transposed_a=transa, transposed_b=transb)
    return Cost(macs, other_flops=elements * ((bias is not None) + bool(gelu)))


@function_formula(f"{TEX}te_general_grouped_gemm")
def grouped_gemm(a: Sequence[Shape], transa: bool, b: Sequence[Shape], transb: bool) -> Cost:  # noqa: FBT001
    """A product for each pair."""
    pairs = zip(a, b, strict=True)
    return Cost(
        sum(
            _product(one, other, transposed_a=transa, transposed_b=transb)[0]
            for one, other in pairs
        )
    )


@function_formula(f"{TEX}layernorm_fwd")
def layer_norm(x: Shape, weight: Shape, bias: Shape | None) -> Cost:
    """Layer normalisation, as the convention has it."""
    return Cost(other_flops=prod(x) * (6 + (bias is not None)))


for functions, operations in {
    # twice the forward, with a bias
    "layernorm_bwd": 14,
    "rmsnorm_fwd": 4,
    "rmsnorm_bwd": 8,
    "rmsnorm_bwd_add": 9,
    "gelu relu silu qgelu srelu dgelu drelu dsilu dqgelu dsrelu": 1,
    # an activation of one half, times the other
    "swiglu geglu reglu qgeglu sreglu": 1,
}.items():
    function_formula(*(TEX + name for name in functions.split()))(per_element(operations))


_GATED_BACKWARD = (f"{TEX}{name}" for name in ("dswiglu", "dgeglu", "dreglu", "dqgeglu", "dsreglu"))
# twice the forward
function_formula(*_GATED_BACKWARD)(adapted(per_element(2), "grad"))


def _attention(given: Sequence[Any]) -> tuple[Scores, int, int]:
    """Scores and widths: releases order the arguments differently, but not offsets, not queries, keys and values, and not lengths."""
    tuples = [each for each in given if isinstance(each, tuple)]
    offsets = [each for each in tuples if isinstance(each, Values) or len(each) == 1]
    query, key, value = [
        each for each in tuples if not isinstance(each, Values) and len(each) > PAIR
    ][:3]
    pairs = (
        each for each in given if isinstance(each, tuple | list) and not isinstance(each, Values)
    )
    before, after = next((each for each in pairs if len(each) == PAIR), (-1, -1))
    mask = " ".join(
        str(each) for each in given if not isinstance(each, tuple | list | int | float)
    ).upper()
    causal, last = "CAUSAL" in mask, "BOTTOM_RIGHT" in mask
    longest_query, longest_key = [
        each for each in given if isinstance(each, int) and not isinstance(each, bool)
    ][:2]
    window = Window.of(before, after, causal=causal, from_last=last or not causal)
    packing = Packing(offsets[0], offsets[1], longest_query, longest_key)
    return kernel_scores(_packed(query), _packed(key), packing, window), query[-1], value[-1]


def _packed(shape: Shape) -> Shape:
    """[tokens, heads, width]: all dimensions before the heads as one."""
    return (prod(shape[:-2]), *shape[-2:])


@function_formula(f"{TEX}fused_attn_fwd", reads="*")
def fused_attention(*given: Any) -> Cost:
    """Queries, keys and values in any layout, by the lengths that the offsets tell."""
    return attention_of_scores(*_attention(given))


@function_formula(f"{TEX}fused_attn_bwd", reads="*")
def fused_attention_backward(*given: Any) -> Cost:
    """The gradients of the above."""
    return attention_backward_of_scores(*_attention(given))

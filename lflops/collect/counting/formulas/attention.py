"""Fused attention, [batch, heads, length, width] unless said.

Counted is the full square of scores, as the field does; executed is what a causal mask leaves of it. A fused backward has kept no scores,
so it multiplies queries and keys a second time: that is recompute. The softmax follows the convention for softmax.
"""

from typing import Any

from lflops.collect.counting.formulas.table import Cost, Shape, formula

SOFTMAX, SOFTMAX_BACKWARD, SOFTMAX_FROM_SUM = 5, 4, 2
"""Operations a score: of softmax, of its gradient, and of the exponential with the sums already known."""


def attention(query: Shape, key: Shape, value: Shape, *, causal: bool) -> Cost:
    """Scores, then their weighted sums: Q x K and P x V."""
    scores, executed = _scores(query, key, causal=causal)
    return Cost(scores * (query[-1] + value[-1]), executed * (query[-1] + value[-1]), scores * SOFTMAX)


def attention_backward(query: Shape, key: Shape, value: Shape, *, causal: bool) -> Cost:
    """Two products for the gradients of V and P, two for those of Q and K; and Q x K once more."""
    scores, executed = _scores(query, key, causal=causal)
    products = 2 * (query[-1] + value[-1])
    again = Cost(scores * query[-1], executed * query[-1], scores * SOFTMAX_FROM_SUM)
    return Cost(scores * products, executed * products, scores * SOFTMAX_BACKWARD, again)


def _scores(query: Shape, key: Shape, *, causal: bool) -> tuple[int, int]:
    """How many scores there are, and how many of them a causal mask leaves: query i sees keys 0 to i."""
    heads = query[0] * query[1]
    rows, columns = query[-2], key[-2]
    seen = sum(min(row + 1, columns) for row in range(rows)) if causal else rows * columns
    return heads * rows * columns, heads * seen


@formula(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
def scaled_dot_product(query: Shape, key: Shape, value: Shape, *, is_causal: bool = False) -> Cost:
    """What `scaled_dot_product_attention` picks from."""
    return attention(query, key, value, causal=is_causal)


@formula(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def scaled_dot_product_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, is_causal: bool = False) -> Cost:
    """The gradients of the above."""
    return attention_backward(query, key, value, causal=is_causal)


def _heads_second(shape: Shape) -> Shape:
    """From [batch, length, heads, width], as the kernels themselves take it."""
    return (shape[0], shape[2], shape[1], shape[3])


def _is_dense(*shapes: Any) -> bool:
    return all(len(shape) == 4 for shape in shapes)


@formula("_flash_attention_forward")
def flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The kernel behind flash attention, on sequences of one length."""
    _refuse_packed(query, key, value)
    return attention(_heads_second(query), _heads_second(key), _heads_second(value), causal=is_causal)


@formula("_flash_attention_backward")
def flash_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The gradients of the above."""
    _refuse_packed(query, key, value)
    return attention_backward(_heads_second(query), _heads_second(key), _heads_second(value), causal=is_causal)


@formula("_efficient_attention_forward")
def efficient(query: Shape, key: Shape, value: Shape, *, custom_mask_type: int, cu_seqlens_q: Shape | None) -> Cost:
    """The kernel behind memory-efficient attention; its mask type 0 is none, the others are causal."""
    if cu_seqlens_q is not None:
        _refuse_packed()
    return attention(_heads_second(query), _heads_second(key), _heads_second(value), causal=bool(custom_mask_type))


@formula("_efficient_attention_backward")
def efficient_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, custom_mask_type: int, cu_seqlens_q: Shape | None) -> Cost:
    """The gradients of the above."""
    if cu_seqlens_q is not None:
        _refuse_packed()
    return attention_backward(_heads_second(query), _heads_second(key), _heads_second(value), causal=bool(custom_mask_type))


def _refuse_packed(*shapes: Shape) -> None:
    """Sequences of several lengths in one tensor: their shapes do not tell the lengths."""
    if not (shapes and _is_dense(*shapes)):
        msg = "packed sequences of several lengths"
        raise NotImplementedError(msg)

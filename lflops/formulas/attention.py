"""Fused attention, [batch, heads, length, width] unless said.

Counted is the full square of scores, as the field does; executed is what a causal mask leaves of it. A fused backward has kept no scores,
so it multiplies queries and keys a second time: that is recompute. The softmax follows the convention for softmax.
"""

from enum import IntEnum

from lflops.formulas.table import Cost, Shape, formula

SOFTMAX, SOFTMAX_BACKWARD, SOFTMAX_FROM_SUM = 5, 4, 2
"""Operations a score: of softmax, of its gradient, and of the exponential with the sums already known."""


class Mask(IntEnum):
    """Which keys a query sees, as the kernels number it: all; those up to its own place; those up to it with the ends of both aligned."""

    NONE = 0
    FROM_FIRST = 1
    FROM_LAST = 2


def attention(query: Shape, key: Shape, value: Shape, mask: Mask) -> Cost:
    """Scores, then their weighted sums: Q x K and P x V."""
    scores, executed = _scores(query, key, mask)
    return Cost(scores * (query[-1] + value[-1]), executed * (query[-1] + value[-1]), scores * SOFTMAX)


def attention_backward(query: Shape, key: Shape, value: Shape, mask: Mask) -> Cost:
    """Two products for the gradients of V and P, two for those of Q and K; and Q x K once more."""
    scores, executed = _scores(query, key, mask)
    products = 2 * (query[-1] + value[-1])
    again = Cost(scores * query[-1], executed * query[-1], scores * SOFTMAX_FROM_SUM)
    return Cost(scores * products, executed * products, scores * SOFTMAX_BACKWARD, again)


def _scores(query: Shape, key: Shape, mask: Mask) -> tuple[int, int]:
    """How many scores there are, and how many of them the mask leaves."""
    heads = query[0] * query[1]
    rows, columns = query[-2], key[-2]
    if mask is Mask.NONE:
        return heads * rows * columns, heads * rows * columns
    first = 1 + (columns - rows if mask is Mask.FROM_LAST else 0)
    seen = sum(min(max(first + row, 0), columns) for row in range(rows))
    return heads * rows * columns, heads * seen


@formula(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
def scaled_dot_product(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """What `scaled_dot_product_attention` picks from."""
    return attention(query, key, value, Mask.FROM_FIRST if is_causal else Mask.NONE)


@formula(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def scaled_dot_product_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The gradients of the above."""
    return attention_backward(query, key, value, Mask.FROM_FIRST if is_causal else Mask.NONE)


@formula("_scaled_dot_product_flash_attention")
def scaled_dot_product_flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """One more that it picks from; this one's causal mask aligns the ends."""
    return attention(query, key, value, Mask.FROM_LAST if is_causal else Mask.NONE)


@formula("_scaled_dot_product_flash_attention_backward")
def scaled_dot_product_flash_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The gradients of the above."""
    return attention_backward(query, key, value, Mask.FROM_LAST if is_causal else Mask.NONE)


@formula("_flash_attention_forward")
def flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The kernel behind flash attention, on sequences of one length."""
    return scaled_dot_product_flash(_heads_second(query), _heads_second(key), _heads_second(value), is_causal=is_causal)


@formula("_flash_attention_backward")
def flash_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Cost:
    """The gradients of the above."""
    return scaled_dot_product_flash_backward(grad, _heads_second(query), _heads_second(key), _heads_second(value), is_causal=is_causal)


@formula("_efficient_attention_forward")
def efficient(query: Shape, key: Shape, value: Shape, *, custom_mask_type: int, cu_seqlens_q: Shape | None) -> Cost:
    """The kernel behind memory-efficient attention."""
    query, key, value = (_heads_second(each, cu_seqlens_q) for each in (query, key, value))
    return attention(query, key, value, Mask(custom_mask_type))


@formula("_efficient_attention_backward")
def efficient_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *, custom_mask_type: int, cu_seqlens_q: Shape | None) -> Cost:
    """The gradients of the above."""
    query, key, value = (_heads_second(each, cu_seqlens_q) for each in (query, key, value))
    return attention_backward(query, key, value, Mask(custom_mask_type))


def _heads_second(shape: Shape, offsets: Shape | None = None) -> Shape:
    """From [batch, length, heads, width], as the kernels themselves take it.

    Raises:
        NotImplementedError: Sequences of several lengths are packed in one tensor; their shapes do not tell the lengths.
    """
    if offsets is not None or len(shape) != 4:
        raise NotImplementedError("packed sequences of several lengths")
    return (shape[0], shape[2], shape[1], shape[3])

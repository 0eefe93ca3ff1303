"""Fused attention of [batch, heads, length, width], and whole layers with it, which inference runs as one kernel.

Sequences of several lengths are in `packed.py`.

Counted is the full square of scores, as the field does; executed is what a causal mask leaves of it. A fused backward has kept no scores,
so it multiplies queries and keys a second time: that is recompute. The softmax follows the convention for softmax.
"""

import functools
from collections.abc import Callable
from enum import IntEnum
from math import prod
from typing import Any, TypeVar

from lflops.formulas.attention.scores import Scores, Window, dense
from lflops.formulas.table import Cost, Shape, adapted, formula

_ScoresOf = TypeVar("_ScoresOf", bound=Callable[..., Scores])

SOFTMAX, SOFTMAX_BACKWARD, SOFTMAX_FROM_SUM = 5, 4, 2
"""Operations a score: of softmax, of its gradient, and of the exponential with the sums already known."""


class Mask(IntEnum):
    """Which keys a query sees, as the kernels number it: all; those up to its own place; those up to it with the ends of both aligned."""

    NONE = 0
    FROM_FIRST = 1
    FROM_LAST = 2

    def window(self, before: int | None = None) -> Window:
        """The mask as a window, of perhaps so many keys before a query's place."""
        return Window.of(before, None, causal=self is not Mask.NONE, from_last=self is Mask.FROM_LAST)


def attention_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Q x K for each score, then P x V."""
    each = width + value_width
    return Cost(scores.all * each, scores.seen * each, scores.all * SOFTMAX, is_upper_bound=not scores.known)


def attention_backward_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Two products for the gradients of V and P, two for those of Q and K; and Q x K once more."""
    each = 2 * (width + value_width)
    again = Cost(scores.all * width, scores.seen * width, scores.all * SOFTMAX_FROM_SUM)
    return Cost(scores.all * each, scores.seen * each, scores.all * SOFTMAX_BACKWARD, again, is_upper_bound=not scores.known)


def attention_formula(
    *operators: str,
    backward: str = "",
    leading: str = "grad",
    writes_first: str = "",
    reads: str = "",
    forward_only: str = "",
    backward_only: str = "",
) -> Callable[[_ScoresOf], _ScoresOf]:
    """Enter the formulas of a fused attention and of its gradients, from a function that tells which scores it has.

    The function takes queries, keys and values first, whose last dimensions are their widths. `operators` and `reads` are as in `formula`,
    and `writes_first`, of forward. `backward` has the operators of the gradients, as words, which take `leading` first. They do not have
    the keywords `forward_only`, and only they have `backward_only`.
    """

    def enter(scores: _ScoresOf) -> _ScoresOf:
        @functools.wraps(scores)
        def forward(query: Shape, key: Shape, value: Shape, **given: Any) -> Cost:
            return attention_of_scores(scores(query, key, value, **given), query[-1], value[-1])

        @functools.wraps(scores)
        def gradients(query: Shape, key: Shape, value: Shape, **given: Any) -> Cost:
            return attention_backward_of_scores(scores(query, key, value, **given), query[-1], value[-1])

        formula(*operators, writes_first=writes_first, reads=reads)(adapted(forward, without=backward_only))
        of_both = " ".join(name for name in reads.split() if name not in forward_only.split())
        formula(*backward.split(), reads=of_both)(adapted(gradients, leading, without=forward_only))
        return scores

    return enter


@attention_formula(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
    backward="""
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward
    """,
)
def scaled_dot_product(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Scores:
    """The kernels that `scaled_dot_product_attention` picks from."""
    return dense(query, key, (Mask.FROM_FIRST if is_causal else Mask.NONE).window())


@attention_formula("_scaled_dot_product_flash_attention", backward="_scaled_dot_product_flash_attention_backward")
def scaled_dot_product_flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Scores:
    """One more that it picks from; this one's causal mask aligns the ends."""
    return dense(query, key, (Mask.FROM_LAST if is_causal else Mask.NONE).window())


@formula("_native_multi_head_attention")
def native_attention(query: Shape, key: Shape, value: Shape, embed_dim: int, num_head: int, qkv_weight: Shape) -> Cost:
    """Three projections, attention, and the projection out; a bias after each."""
    width = embed_dim
    queries, keys = prod(query[:-1]), prod(key[:-1])
    inner = attention_of_scores(dense(_by_head(query, num_head), _by_head(key, num_head)), query[-1] // num_head, value[-1] // num_head)
    macs = (2 * queries + 2 * keys) * width * width
    return Cost(macs + inner.macs, other_flops=inner.other_flops + (2 * queries + 2 * keys) * width)


@formula("_transformer_encoder_layer_fwd")
def encoder_layer(src: Shape, embed_dim: int, num_heads: int, *, ffn_weight_1: Shape, ffn_weight_2: Shape) -> Cost:
    """Attention, two normalisations, two additions, and a perceptron of two layers with an activation."""
    tokens, width = prod(src[:-1]), embed_dim
    inner = native_attention(src, src, src, embed_dim, num_heads, (3 * width, width))
    hidden = ffn_weight_1[0]
    normalisations, residuals, biases, activation = 2 * 7 * width, 2 * width, hidden + width, hidden
    return Cost(
        inner.macs + tokens * (prod(ffn_weight_1) + prod(ffn_weight_2)),
        other_flops=inner.other_flops + tokens * (normalisations + residuals + biases + activation),
    )


def _by_head(x: Shape, heads: int) -> Shape:
    batch, length, width = x
    return (batch, heads, length, width // heads)

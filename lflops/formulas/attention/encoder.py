"""Whole attention and encoder layers as one kernel, which inference takes where it can; [batch, length, width]."""

from math import prod

from lflops.formulas.attention.fused import Mask, attention
from lflops.formulas.table import Cost, Shape, formula


@formula("_native_multi_head_attention")
def native_attention(query: Shape, key: Shape, value: Shape, embed_dim: int, num_head: int, qkv_weight: Shape) -> Cost:
    """Three projections, attention, and the projection out; a bias after each."""
    width = embed_dim
    queries, keys = prod(query[:-1]), prod(key[:-1])
    inner = attention(_by_head(query, num_head), _by_head(key, num_head), _by_head(value, num_head), Mask.NONE)
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

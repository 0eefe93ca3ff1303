"""Cases of scaled dot-product attention, in every way to call it.

A score belongs to a query and a key of one head. All scores count as MACs, also masked ones.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.conformance.at_hand import FUSES_GROUPS, FUSES_WITHOUT_HEADS
from tests.conformance.making import Family, data, layer, leaf, of
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch = 2
heads = 6
groups = 3
queries = 5
keys = 7
width = 4
value_width = 8
scores = batch * heads * queries * keys
square = batch * heads * queries * queries
triangle = batch * heads * queries * (queries + 1) // 2

query = leaf(batch, heads, queries, width)
key = leaf(batch, heads, keys, width)
of_queries = (query, query, query)
sdpa = F.scaled_dot_product_attention
trained = Family("attention").trained
inference = Family("attention").inference


def by_products(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Compute attention with the backend that uses matmuls."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, **options)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with the textbook formula."""
    return torch.softmax(q @ k.mT / width**0.5, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with a mask tensor, from which the kernel cannot skip anything."""
    return sdpa(q, k, v, attn_mask=torch.ones(queries, keys, dtype=torch.bool).tril())


FUSED = (
    trained("sdpa", of(sdpa, query, key, key), attention(scores, width)),
    trained("sdpa by keyword", of(sdpa, query=query, key=key, value=key), attention(scores, width)),
    trained(
        "sdpa, causal",
        of(sdpa, *of_queries, is_causal=True),
        attention(square, width),
        executed=2 * triangle * width,
    ),
    trained("sdpa with a mask", of(masked, query, key, key), attention(scores, width)),
    trained(
        "sdpa of groups of heads",
        of(sdpa, query, *[leaf(batch, groups, keys, width)] * 2, enable_gqa=True),
        attention(scores, width, fused=FUSES_GROUPS),
    ),
    trained(
        "sdpa of data but for the queries",
        of(sdpa, query, *[data(batch, heads, keys, width)] * 2),
        attention(scores, width),
    ),
    trained(
        "sdpa in bfloat16",
        of(sdpa, *[leaf(batch, heads, queries, 8, dtype=torch.bfloat16)] * 3),
        attention(square, 8),
    ),
    inference(
        "sdpa without gradients",
        of(sdpa, *[data(batch, heads, queries, width)] * 3),
        attention(square, width),
    ),
)

IN_PRODUCTS = (
    trained(
        "sdpa with dropout, which this processor has no fused kernel for",
        of(sdpa, query, key, key, dropout_p=0.1),
        attention(scores, width, fused=False),
    ),
    trained(
        "sdpa with values of another width",
        of(sdpa, query, key, leaf(batch, heads, keys, value_width)),
        attention(scores, width, value_width, fused=False),
    ),
    trained(
        "sdpa with a mask that is trained",
        of(
            lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask),
            query,
            key,
            key,
            leaf(queries, keys),
        ),
        attention(scores, width, fused=False),
    ),
    trained(
        "sdpa of one head without its dimension",
        of(sdpa, leaf(batch, queries, width), *[leaf(batch, keys, width)] * 2),
        attention(batch * queries * keys, width, fused=FUSES_WITHOUT_HEADS),
    ),
    trained(
        "sdpa by matrix products",
        of(by_products, query, key, key),
        attention(scores, width, fused=False),
    ),
    trained(
        "sdpa by matrix products, causal",
        of(by_products, *of_queries, is_causal=True),
        attention(square, width, fused=False),
    ),
    trained(
        "attention by hand", of(by_hand, query, key, key), attention(scores, width, fused=False)
    ),
)


class Flexible(nn.Module):
    """Flex attention, with a causal mask on blocks or without a mask."""

    def __init__(self, *, block: int | None = None, **options: bool) -> None:
        super().__init__()
        self.block = block
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if self.block is not None:
            length = q.shape[-2]
            mask = create_block_mask(
                lambda _b, _h, i, j: i >= j,
                None,
                None,
                length,
                length,
                device="cpu",
                BLOCK_SIZE=self.block,
            )
        return flex_attention(q, k, v, block_mask=mask, **self.options)


long = 256
block = 64
rows = long // block
flexible = data(1, heads, long, width)
whole = heads * long * long
below = heads * block * block * rows * (rows + 1) // 2
FLEX = (
    inference("flex attention", layer(Flexible, *[flexible] * 3), Macs(2 * whole * width)),
    inference(
        "flex attention on blocks",
        layer(lambda: Flexible(block=block), *[flexible] * 3),
        Macs(2 * whole * width),
        executed=2 * below * width,
    ),
    inference(
        "flex attention of groups of heads",
        layer(
            lambda: Flexible(block=block, enable_gqa=True),
            flexible,
            *[data(1, groups, long, width)] * 2,
        ),
        Macs(2 * whole * width),
        executed=2 * below * width,
    ),
)

hidden = heads * width
tokens = batch * queries


class Attention(nn.Module):
    """An attention layer with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
        return self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class OfEinsums(nn.Module):
    """An attention layer that is written with einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, hidden, heads, width))
        self.out = nn.Parameter(torch.randn(heads, width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bld,tdhw->tbhlw", x, self.qkv)
        weights = torch.softmax(torch.einsum("bhqw,bhkw->bhqk", q, k), -1)
        return torch.einsum("bhqk,bhkw,hwd->bqd", weights, v, self.out)


projections = product(tokens, hidden, 3 * hidden) + product(tokens, hidden, hidden)
LAYERS = (
    trained(
        "an attention layer",
        layer(Attention, leaf(batch, queries, hidden)),
        projections + attention(square, width),
        executed=projections.forward + 2 * triangle * width,
    ),
    trained(
        "an attention layer of einsums",
        layer(OfEinsums, leaf(batch, queries, hidden)),
        projections + attention(square, width, fused=False),
    ),
)

CASES = (*FUSED, *IN_PRODUCTS, *FLEX, *LAYERS)

"""Fused attention: of [batch, heads, length, width], of packed sequences, and in whole layers, which inference runs as one kernel.

Counted is the full square of scores, as the field does; executed is what a causal mask leaves of
it. A fused backward has kept no scores, so it multiplies queries and keys a second time: that is
recompute. The softmax follows the convention for softmax.

Packed sequences, [tokens, heads, width], are a square each. Where they begin is in a tensor
(`cu_seqlens_q`), of which the formulas ask for the numbers. Where only its shape is known, they are
taken to be as unequal as the totals allow, which gives the largest sum of squares.
"""

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

from lflops.formulas.table import Cost, Shape, Values, adapted, formula

Known = Values | Shape | None
"""Of an argument that is a tensor of integers: its numbers; its shape where they are unknown;

`None` where it is not given.
"""


class Window(NamedTuple):
    """The keys that a query sees, by their distance from its own place among them."""

    # how many keys before its place; `None` for all of them
    before: int | None = None
    # the same after it
    after: int | None = None
    # whether the last query's place is at the last key; else the first query's is at the first key
    from_last: bool = False

    @classmethod
    def of(
        cls, before: int | None, after: int | None, *, causal: bool, from_last: bool
    ) -> "Window":
        """From a kernel's arguments, where a number below 0 stands for all."""
        before, after = (
            None if each is None or each < 0 else int(each) for each in (before, after)
        )
        return cls(before, 0 if causal else after, from_last)


ALL = Window()


class Sequences(NamedTuple):
    """The lengths of sequences."""

    # by sequence
    queries: Sequence[int]
    # by sequence
    keys: Sequence[int]
    # whether they are; else they are those of which nothing takes more
    known: bool = True


class Scores(NamedTuple):
    """Scores of all heads."""

    # of the full squares
    all: int
    # those that the window leaves
    seen: int
    # whether the lengths are known; else there are at most so many
    known: bool = True


class Packing(NamedTuple):
    """What kernels are given of sequences of several lengths."""

    queries: Known = (
        # where each sequence begins among the queries, and where the last one ends
        None
    )
    # the same among the keys
    keys: Known = None
    # at least the length of the longest sequence of queries
    longest_query: int | None = None
    # the same of keys
    longest_key: int | None = None
    # how many of its keys each sequence uses
    used_keys: Known = None
    pages: Shape | None = (
        # the shape of the table of pages, where keys are in pages: [sequences, pages]
        None
    )
    # how many of its queries each sequence has
    used_queries: Known = None


def sequences(query: Shape, key: Shape, packing: Packing) -> Sequences:
    """The lengths of the sequences in [tokens, heads, width], or in [batch, length, heads, width] where nothing is packed."""
    queries, known = _lengths(query, packing.queries, packing.longest_query)
    if isinstance(packing.used_queries, Values):
        queries = [min(pair) for pair in zip(queries, packing.used_queries, strict=True)]
    elif packing.used_queries is not None:
        known = False
    if packing.pages is not None:
        count, pages = packing.pages
        keys, keys_known = (
            [min(pages * key[1], packing.longest_key or pages * key[1])] * count,
            packing.used_keys is None,
        )
    else:
        keys, keys_known = _lengths(key, packing.keys, packing.longest_key)
    if isinstance(packing.used_keys, Values):
        paged = packing.pages is not None
        keys = (
            list(packing.used_keys)
            if paged
            else [min(pair) for pair in zip(keys, packing.used_keys, strict=True)]
        )
        keys_known = paged or keys_known
    elif packing.used_keys is not None:
        keys_known = False
    return Sequences(queries, keys, known and keys_known)


def scores_of(lengths: Sequences, heads: int, window: Window = ALL) -> Scores:
    """Scores of so many heads, each over all sequences.

    A `ValueError` where these are not as many of queries as of keys.
    """
    pairs = list(zip(lengths.queries, lengths.keys, strict=not (unknown := not lengths.known)))
    whole = sum(queries * keys for queries, keys in pairs)
    if window.before is None and window.after is None:
        return Scores(heads * whole, heads * whole, not unknown)
    return Scores(
        heads * whole, heads * sum(keys_seen(*pair, window) for pair in pairs), not unknown
    )


def dense(query: Shape, key: Shape, window: Window = ALL) -> Scores:
    """Scores of [batch, heads, length, width]."""
    return scores_of(Sequences([query[-2]] * query[0], [key[-2]] * query[0]), query[1], window)


def keys_seen(queries: int, keys: int, window: Window) -> int:
    """How many keys the queries of one sequence see, all together."""
    place = keys - queries if window.from_last else 0
    last = keys if window.after is None else place + window.after
    first = -queries if window.before is None else place - window.before
    return (
        max(_up_to(last, queries, keys) - _up_to(first - 1, queries, keys), 0)
        if first <= last
        else 0
    )


def _up_to(distance: int, queries: int, keys: int) -> int:
    """Pairs of query i and key j with j - i at most the distance.

    Query i has so many more keys as i is greater.
    """
    return _staircase(distance + queries, keys) - _staircase(distance, keys)


def _staircase(steps: int, top: int) -> int:
    """The sum 1 + 2 + ..., of so many steps, none higher than the top."""
    if steps <= 0:
        return 0
    rising = min(steps, top)
    return rising * (rising + 1) // 2 + (steps - rising) * top


def _lengths(shape: Shape, offsets: Known, longest: int | None) -> tuple[list[int], bool]:
    if offsets is None:
        return [shape[1]] * shape[0], True
    if isinstance(offsets, Values):
        lengths = [end - begin for begin, end in pairwise(offsets)]
        if any(length < 0 for length in lengths):
            raise ValueError(f"sequences begin before the last one ends: {tuple(offsets)[:8]}")
        return lengths, True
    tokens, longest = shape[0], min(longest or shape[0], shape[0])
    return [longest] * (tokens // longest if longest else 0) + [
        tokens % longest if longest else 0
    ], False


_ScoresOf = TypeVar("_ScoresOf", bound=Callable[..., Scores])

SOFTMAX, SOFTMAX_BACKWARD, SOFTMAX_FROM_SUM = 5, 4, 2
"""Operations a score: of softmax, of its gradient, and of the exponential with the sums already known."""


class Mask(IntEnum):
    """Which keys a query sees, as the kernels number it.

    All; those up to its own place; those up to it with the ends of both aligned.
    """

    NONE = 0
    FROM_FIRST = 1
    FROM_LAST = 2

    def window(self, before: int | None = None) -> Window:
        """The mask as a window, of perhaps so many keys before a query's place."""
        return Window.of(
            before, None, causal=self is not Mask.NONE, from_last=self is Mask.FROM_LAST
        )


def attention_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Q x K for each score, then P x V."""
    each = width + value_width
    return Cost(
        scores.all * each, scores.seen * each, scores.all * SOFTMAX, is_upper_bound=not scores.known
    )


def attention_backward_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Two products for the gradients of V and P, two for those of Q and K; and Q x K once more."""
    each = 2 * (width + value_width)
    again = Cost(scores.all * width, scores.seen * width, scores.all * SOFTMAX_FROM_SUM)
    return Cost(
        scores.all * each,
        scores.seen * each,
        scores.all * SOFTMAX_BACKWARD,
        again,
        is_upper_bound=not scores.known,
    )


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

    The function takes queries, keys and values first, whose last dimensions are their widths.
    `operators` and `reads` are as in `formula`, and `writes_first`, of forward. `backward` has the
    operators of the gradients, as words, which take `leading` first. They do not have the keywords
    `forward_only`, and only they have `backward_only`.
    """

    def enter(scores: _ScoresOf) -> _ScoresOf:
        @functools.wraps(scores)
        def forward(query: Shape, key: Shape, value: Shape, **given: Any) -> Cost:
            return attention_of_scores(scores(query, key, value, **given), query[-1], value[-1])

        @functools.wraps(scores)
        def gradients(query: Shape, key: Shape, value: Shape, **given: Any) -> Cost:
            return attention_backward_of_scores(
                scores(query, key, value, **given), query[-1], value[-1]
            )

        formula(*operators, writes_first=writes_first, reads=reads)(
            adapted(forward, without=backward_only)
        )
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


@attention_formula(
    "_scaled_dot_product_flash_attention", backward="_scaled_dot_product_flash_attention_backward"
)
def scaled_dot_product_flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Scores:
    """One more that it picks from; this one's causal mask aligns the ends."""
    return dense(query, key, (Mask.FROM_LAST if is_causal else Mask.NONE).window())


@formula("_native_multi_head_attention")
def native_attention(
    query: Shape, key: Shape, value: Shape, embed_dim: int, num_head: int, qkv_weight: Shape
) -> Cost:
    """Three projections, attention, and the projection out; a bias after each."""
    width = embed_dim
    queries, keys = prod(query[:-1]), prod(key[:-1])
    inner = attention_of_scores(
        dense(_by_head(query, num_head), _by_head(key, num_head)),
        query[-1] // num_head,
        value[-1] // num_head,
    )
    macs = (2 * queries + 2 * keys) * width * width
    return Cost(macs + inner.macs, other_flops=inner.other_flops + (2 * queries + 2 * keys) * width)


@formula("_transformer_encoder_layer_fwd")
def encoder_layer(
    src: Shape, embed_dim: int, num_heads: int, *, ffn_weight_1: Shape, ffn_weight_2: Shape
) -> Cost:
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


def kernel_scores(query: Shape, key: Shape, packing: Packing, window: Window) -> Scores:
    """The scores of each sequence."""
    return scores_of(sequences(query, key, packing), query[-2], window)


@attention_formula(
    "_flash_attention_forward",
    backward="_flash_attention_backward",
    writes_first="_flash_attention_forward_no_dropout_inplace",
    reads="cum_seq_q cum_seq_k seqused_k",
    forward_only="seqused_k block_table",
)
def flash(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cum_seq_q: Known,
    cum_seq_k: Known,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Known = None,
    block_table: Shape | None = None,
) -> Scores:
    """Flash attention, with windows, with keys that are used in part, and with keys in pages."""
    packing = Packing(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
    return kernel_scores(
        query,
        key,
        packing,
        Window.of(window_size_left, window_size_right, causal=is_causal, from_last=True),
    )


@attention_formula(
    "torch_attn::_varlen_attn",
    backward="torch_attn::_varlen_attn_backward",
    writes_first="torch_attn::_varlen_attn_out",
    reads="cu_seq_q cu_seq_k seqused_k",
    forward_only="seqused_k block_table",
)
def varlen(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seq_q: Known,
    cu_seq_k: Known,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    window_size: list[int] | None = None,
    seqused_k: Known = None,
    block_table: Shape | None = None,
) -> Scores:
    """`torch.nn.attention.varlen.varlen_attn`."""
    before, after = window_size or (-1, -1)
    packing = Packing(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    return kernel_scores(
        query, key, packing, Window.of(before, after, causal=is_causal, from_last=True)
    )


@attention_formula(
    "_efficient_attention_forward",
    backward="_efficient_attention_backward",
    reads="cu_seqlens_q cu_seqlens_k seqlen_k",
    forward_only="seqlen_k",
)
def efficient(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    custom_mask_type: int,
    seqlen_k: Known = None,
    window_size: int | None = None,
) -> Scores:
    """Memory-efficient attention.

    Packed sequences are [1, tokens, heads, width], and a window counts the query's own place.
    """
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlen_k)
    queries, keys = (query, key) if cu_seqlens_q is None else (query[1:], key[1:])
    return kernel_scores(
        queries,
        keys,
        packing,
        Mask(custom_mask_type).window(window_size - 1 if window_size else None),
    )


@attention_formula(
    "_cudnn_attention_forward", backward="_cudnn_attention_backward", reads="cum_seq_q cum_seq_k"
)
def cudnn(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cum_seq_q: Known,
    cum_seq_k: Known,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> Scores:
    """CuDNN's, of [batch, heads, length, width] or packed sequences."""
    window = (Mask.FROM_FIRST if is_causal else Mask.NONE).window()
    if cum_seq_q is None:
        return dense(query, key, window)
    return kernel_scores(query, key, Packing(cum_seq_q, cum_seq_k, max_q, max_k), window)

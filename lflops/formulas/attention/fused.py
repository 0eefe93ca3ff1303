"""Formulas for fused attention: dense, packed, and inside layers that run as one kernel.

A score is the dot product of one query and one key. As in most tools, the MACs of a sequence
include all its scores (queries × keys). The executed MACs include only the scores that a causal
mask or a window does not hide. A fused backward pass multiplies queries and keys again, because
forward does not keep the scores. This matmul counts as recomputation. The cost of the softmax
follows `conventions.toml`.

Packed sequences have the shape [tokens, heads, width]. A tensor such as `cu_seqlens_q` contains the
positions where sequences begin, and the formulas read its values. If the values are unknown, the
result is an upper bound: the lengths of the sequences are assumed to be as unequal as possible,
which gives the largest number of scores.
"""

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

from lflops.formulas.table import Cost, Formula, Shape, Values, adapted, formula

Known = Values | Shape | None
"""An optional integer tensor: its values, its shape if the values are unknown, or `None`."""

SOFTMAX = 5
"""Number of operations of a softmax, per attention score."""

SOFTMAX_BACKWARD = 4
"""Number of operations of the gradient of a softmax, per attention score."""

SOFTMAX_FROM_SUM = 2
"""Number of operations for computing a softmax again in backward, per attention score.

The number is smaller than in forward, because forward has kept the sums of exponentials.
"""


class Window(NamedTuple):
    """The range of keys that a query sees, relative to the position of the query.

    Attributes:
        before: The number of keys that the query sees before its position; `None` for all.
        after: The number of keys that the query sees after its position; `None` for all.
        from_last: Whether the last query and the last key have the same position. Otherwise, the
            first query and the first key have the same position.
    """

    before: int | None = None
    after: int | None = None
    from_last: bool = False

    @classmethod
    def of(
        cls, before: int | None, after: int | None, *, causal: bool, from_last: bool
    ) -> "Window":
        """Convert a kernel's arguments to a window.

        `before` and `after` are numbers of keys. A negative number or `None` means that the query
        sees all keys on that side. If `causal` is true, `after` is ignored, and the query sees no
        keys after its position.
        """
        if causal:
            after = 0
        return cls(_side(before), _side(after), from_last)


def _side(keys: int | None) -> int | None:
    if keys is None or keys < 0:
        return None
    return int(keys)


ALL = Window()


class Mask(IntEnum):
    """The kinds of masks in memory-efficient attention, with torch's numbers for them.

    Attributes:
        NONE: A query sees all keys.
        FROM_FIRST: A query sees the keys up to its position. The first query and the first key have
            the same position.
        FROM_LAST: A query sees the keys up to its position. The last query and the last key have
            the same position.
    """

    NONE = 0
    FROM_FIRST = 1
    FROM_LAST = 2

    def window(self, before: int | None = None) -> Window:
        """Convert the mask to a window. `before` limits the number of keys before a query."""
        causal = self is not Mask.NONE
        return Window.of(before, None, causal=causal, from_last=self is Mask.FROM_LAST)


class Sequences(NamedTuple):
    """The lengths of all sequences in a call of attention.

    Attributes:
        queries: The number of queries of each sequence.
        keys: The number of keys of each sequence.
        known: Whether the lengths are known. If not, `queries` and `keys` are the possible lengths
            with the highest cost.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    known: bool = True


class Scores(NamedTuple):
    """The number of attention scores of one call, summed over heads and sequences.

    A score is the dot product of one query and one key.

    Attributes:
        all: The number of all scores (queries × keys), from which the MACs are computed.
        seen: The number of scores that the mask or window does not hide, from which the executed
            MACs are computed.
        known: Whether the lengths of the sequences are known. If not, the numbers are upper bounds.
    """

    all: int
    seen: int
    known: bool = True


class Packing(NamedTuple):
    """A kernel's arguments that describe sequences of different lengths.

    Attributes:
        queries: Offsets at which the sequences begin in the packed queries, and the end of the last
            sequence; `None` if queries are not packed.
        keys: Offsets at which the sequences begin in the packed keys, and the end of the last
            sequence; `None` if keys are not packed.
        longest_query: An upper bound on the number of queries of the longest sequence.
        longest_key: An upper bound on the number of keys of the longest sequence.
        used_keys: The number of keys that each sequence uses; `None` if it uses all keys.
        pages: Shape of the page table, [sequences, pages]; `None` if keys are not stored in pages.
        used_queries: The number of queries that each sequence uses; `None` if it uses all queries.
    """

    queries: Known = None
    keys: Known = None
    longest_query: int | None = None
    longest_key: int | None = None
    used_keys: Known = None
    pages: Shape | None = None
    used_queries: Known = None


class _Lengths(NamedTuple):
    """The lengths of sequences: the real lengths if `known`, else those with the highest cost."""

    lengths: Sequence[int]
    known: bool = True


def sequences(query: Shape, key: Shape, packing: Packing) -> Sequences:
    """Compute the lengths of all sequences in a call from the shapes and offsets.

    Packed queries and keys have the shape [tokens, heads, width]. Otherwise, the shape is [batch,
    length, heads, width].
    """
    queries = _lengths(query, packing.queries, packing.longest_query)
    queries = _used(queries, packing.used_queries)
    if packing.pages is None:
        keys = _lengths(key, packing.keys, packing.longest_key)
        keys = _used(keys, packing.used_keys)
    else:
        keys = _paged_lengths(key, packing.pages, packing)
    return Sequences(queries.lengths, keys.lengths, queries.known and keys.known)


def _lengths(shape: Shape, offsets: Known, longest: int | None) -> _Lengths:
    if offsets is None:
        batch, length = shape[:2]
        return _Lengths([length] * batch)
    if isinstance(offsets, Values):
        lengths = [end - begin for begin, end in pairwise(offsets)]
        if any(length < 0 for length in lengths):
            raise ValueError(
                f"the offsets of the sequences must not decrease: {tuple(offsets)[:8]}"
            )
        return _Lengths(lengths)
    # The number of scores is largest if as many sequences as possible have the largest length.
    tokens = shape[0]
    longest = min(longest or tokens, tokens)
    if not longest:
        return _Lengths([0], known=False)
    full, rest = divmod(tokens, longest)
    return _Lengths([longest] * full + [rest], known=False)


def _used(present: _Lengths, used: Known) -> _Lengths:
    """Limit the length of each sequence to the number of queries or keys that the call uses."""
    if used is None:
        return present
    if not isinstance(used, Values):
        return _Lengths(present.lengths, known=False)
    pairs = zip(present.lengths, used, strict=True)
    return _Lengths([min(pair) for pair in pairs], present.known)


def _paged_lengths(key: Shape, pages: Shape, packing: Packing) -> _Lengths:
    """Return the number of keys of each sequence if keys are stored in pages.

    `key` is [pages, page size, heads, width].
    """
    if isinstance(packing.used_keys, Values):
        return _Lengths(packing.used_keys)
    count, pages_per_sequence = pages
    capacity = pages_per_sequence * key[1]
    longest = min(capacity, packing.longest_key or capacity)
    return _Lengths([longest] * count, known=packing.used_keys is None)


def scores_of(lengths: Sequences, heads: int, window: Window = ALL) -> Scores:
    """Count the attention scores of all heads and all sequences of a call.

    Raises:
        ValueError: The number of sequences differs between queries and keys.
    """
    # If the lengths are unknown, the assumed lengths of queries and keys may differ in number.
    pairs = list(zip(lengths.queries, lengths.keys, strict=lengths.known))
    whole = 0
    seen = 0
    for queries, keys in pairs:
        whole += queries * keys
        seen += keys_seen(queries, keys, window)
    return Scores(heads * whole, heads * seen, lengths.known)


def dense(query: Shape, key: Shape, window: Window = ALL) -> Scores:
    """Count the attention scores for dense tensors of shape [batch, heads, length, width]."""
    batch, heads = query[:2]
    lengths = Sequences([query[-2]] * batch, [key[-2]] * batch)
    return scores_of(lengths, heads, window)


def kernel_scores(query: Shape, key: Shape, packing: Packing, window: Window) -> Scores:
    """Count the attention scores for tensors with the heads in the second-to-last dimension."""
    return scores_of(sequences(query, key, packing), query[-2], window)


def keys_seen(queries: int, keys: int, window: Window) -> int:
    """Count the pairs of a query and a key in which the query sees the key.

    `queries` and `keys` are the lengths of one sequence.
    """
    position = keys - queries if window.from_last else 0
    last = keys
    if window.after is not None:
        last = position + window.after
    first = -queries
    if window.before is not None:
        first = position - window.before
    if first > last:
        return 0
    up_to_last = _pairs_up_to(last, queries, keys)
    before_first = _pairs_up_to(first - 1, queries, keys)
    return max(up_to_last - before_first, 0)


def _pairs_up_to(distance: int, queries: int, keys: int) -> int:
    """Count the pairs of query i and key j where j - i is at most `distance`.

    Each query has one more such key than the previous query, until a query has all keys.
    """
    return _staircase(distance + queries, keys) - _staircase(distance, keys)


def _staircase(steps: int, top: int) -> int:
    """Return the sum 1 + 2 + … of `steps` terms, where no term exceeds `top`."""
    if steps <= 0:
        return 0
    rising = min(steps, top)
    return rising * (rising + 1) // 2 + (steps - rising) * top


def attention_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Cost of the forward pass of attention.

    The forward pass computes Q x K, the softmax P of this product, and P x V. The `width` is the
    width of a query and of a key, and `value_width` is the width of a value.
    """
    macs_per_score = width + value_width
    return Cost(
        macs=scores.all * macs_per_score,
        executed_macs=scores.seen * macs_per_score,
        other_flops=scores.all * SOFTMAX,
        is_upper_bound=not scores.known,
    )


def attention_backward_of_scores(scores: Scores, width: int, value_width: int) -> Cost:
    """Cost of the backward pass of attention.

    The gradients of V, P, Q and K need one matmul each. P is the softmax of Q x K, which backward
    computes again. The widths are as in `attention_of_scores`.
    """
    macs_per_score = 2 * (width + value_width)
    recompute = Cost(
        macs=scores.all * width,
        executed_macs=scores.seen * width,
        other_flops=scores.all * SOFTMAX_FROM_SUM,
    )
    return Cost(
        macs=scores.all * macs_per_score,
        executed_macs=scores.seen * macs_per_score,
        other_flops=scores.all * SOFTMAX_BACKWARD,
        recompute=recompute,
        is_upper_bound=not scores.known,
    )


_ScoresOf = TypeVar("_ScoresOf", bound=Callable[..., Scores])


def attention_formula(
    *operators: str,
    backward: str = "",
    leading: str = "grad",
    writes_first: str = "",
    reads: str = "",
    forward_only: str = "",
    backward_only: str = "",
) -> Callable[[_ScoresOf], _ScoresOf]:
    """Register the formulas for operators of fused attention in forward and in backward.

    The decorated function counts the attention scores of a call. Its first arguments are the shapes
    of queries, keys and values, and the last dimension of each shape is the width. Several names in
    one string are separated by spaces.

    Args:
        operators: The forward operators, as in `formula`.
        backward: The backward operators, which compute the gradients.
        leading: Names of the arguments that a backward operator receives before the queries.
        writes_first: A forward operator whose first argument is the tensor to which it writes its
            result, as in `formula`.
        reads: Names of the tensor arguments whose values are read, as in `formula`.
        forward_only: Keyword arguments that backward does not have.
        backward_only: Keyword arguments that forward does not have.
    """
    both_read = [name for name in reads.split() if name not in forward_only.split()]

    def register(scores: _ScoresOf) -> _ScoresOf:
        forward = _cost_by_scores(scores, attention_of_scores)
        register_forward = formula(*operators, writes_first=writes_first, reads=reads)
        register_forward(adapted(forward, without=backward_only))
        gradients = _cost_by_scores(scores, attention_backward_of_scores)
        register_backward = formula(backward, reads=" ".join(both_read))
        register_backward(adapted(gradients, leading, without=forward_only))
        return scores

    return register


def _cost_by_scores(
    scores: Callable[..., Scores], cost_of: Callable[[Scores, int, int], Cost]
) -> Formula:
    @functools.wraps(scores)
    def cost(query: Shape, key: Shape, value: Shape, **given: Any) -> Cost:
        return cost_of(scores(query, key, value, **given), query[-1], value[-1])

    return cost


def _causal_window(*, from_last: bool, is_causal: bool) -> Window:
    """Return the window of a causal mask, or a window of all keys if there is no causal mask."""
    return Window.of(None, None, causal=is_causal, from_last=from_last)


@attention_formula(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
    backward="""
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward
    """,
)
def scaled_dot_product(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Scores:
    """Count the attention scores of dense attention in torch, except in the flash kernel for GPUs.

    Under a causal mask, the first query and the first key have the same position.
    """
    return dense(query, key, _causal_window(from_last=False, is_causal=is_causal))


@attention_formula(
    "_scaled_dot_product_flash_attention", backward="_scaled_dot_product_flash_attention_backward"
)
def scaled_dot_product_flash(query: Shape, key: Shape, value: Shape, *, is_causal: bool) -> Scores:
    """Count the attention scores of dense attention in torch's flash kernel for GPUs.

    Under a causal mask, the last query and the last key have the same position.
    """
    return dense(query, key, _causal_window(from_last=True, is_causal=is_causal))


@formula("_native_multi_head_attention")
def native_attention(
    query: Shape, key: Shape, value: Shape, embed_dim: int, num_head: int, qkv_weight: Shape
) -> Cost:
    """Cost of a whole multi-head attention layer.

    The layer projects the queries, the keys and the values, computes attention, and projects the
    output.
    """
    queries = prod(query[:-1])
    keys = prod(key[:-1])
    # Queries, keys, values and outputs are projected. There are as many outputs as queries, and as
    # many values as keys.
    projected = 2 * queries + 2 * keys
    scores = dense(_by_head(query, num_head), _by_head(key, num_head))
    attention = attention_of_scores(scores, query[-1] // num_head, value[-1] // num_head)
    return Cost(
        macs=attention.macs + projected * embed_dim**2,
        other_flops=attention.other_flops + projected * embed_dim,
    )


def _by_head(x: Shape, heads: int) -> Shape:
    batch, length, width = x
    return (batch, heads, length, width // heads)


@formula("_transformer_encoder_layer_fwd")
def encoder_layer(
    src: Shape, embed_dim: int, num_heads: int, *, ffn_weight_1: Shape, ffn_weight_2: Shape
) -> Cost:
    """Cost of a whole encoder layer.

    The layer consists of attention, a two-layer MLP, two normalisations and two residual additions.
    """
    tokens = prod(src[:-1])
    width = embed_dim
    hidden = ffn_weight_1[0]
    attention = native_attention(src, src, src, embed_dim, num_heads, (3 * width, width))

    normalisations = 2 * 7 * width
    residuals = 2 * width
    biases = hidden + width
    activation = hidden
    other_per_token = normalisations + residuals + biases + activation
    return Cost(
        macs=attention.macs + tokens * (prod(ffn_weight_1) + prod(ffn_weight_2)),
        other_flops=attention.other_flops + tokens * other_per_token,
    )


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
    """Count the attention scores of ATen's flash attention.

    A call can have a sliding window, use only some of the keys (`seqused_k`), or store the keys in
    pages (`block_table`).
    """
    packing = Packing(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
    window = Window.of(window_size_left, window_size_right, causal=is_causal, from_last=True)
    return kernel_scores(query, key, packing, window)


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
    """Count the attention scores of `torch.nn.attention.varlen.varlen_attn`."""
    before, after = window_size or (-1, -1)
    packing = Packing(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    window = Window.of(before, after, causal=is_causal, from_last=True)
    return kernel_scores(query, key, packing, window)


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
    """Count the attention scores of ATen's memory-efficient attention.

    Packed sequences have the shape [1, tokens, heads, width].
    """
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlen_k)
    if cu_seqlens_q is not None:
        query = query[1:]
        key = key[1:]
    return kernel_scores(query, key, packing, efficient_window(custom_mask_type, window_size))


def efficient_window(mask_type: int, window_size: int | None) -> Window:
    """Return the window for the arguments of memory-efficient attention.

    `mask_type` is one of the numbers in `Mask`. `window_size` is the number of keys that a query
    sees up to its position; `None` or 0 for all keys.
    """
    before = window_size - 1 if window_size else None
    return Mask(mask_type).window(before)


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
    """Count the attention scores of cuDNN's attention kernels.

    The shapes are [batch, heads, length, width], or [tokens, heads, width] for packed sequences.
    """
    window = _causal_window(from_last=False, is_causal=is_causal)
    if cum_seq_q is None:
        return dense(query, key, window)
    packing = Packing(cum_seq_q, cum_seq_k, max_q, max_k)
    return kernel_scores(query, key, packing, window)

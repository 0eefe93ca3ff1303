"""Formulas for flash-attn 2 and 3, with dense sequences, packed sequences and cached keys."""

from lflops.formulas.attention.fused import (
    Known,
    Packing,
    Scores,
    Window,
    attention_formula,
    attention_of_scores,
    kernel_scores,
)
from lflops.formulas.table import Cost, Shape, Values, function_formula


def _window(before: int, after: int, *, causal: bool) -> Window:
    return Window.of(before, after, causal=causal, from_last=True)


@attention_formula("flash_attn::_flash_attn_forward", backward="flash_attn::_flash_attn_backward")
def dense_sequences(
    q: Shape, k: Shape, v: Shape, *, causal: bool, window_size_left: int, window_size_right: int
) -> Scores:
    """Count the attention scores of flash-attn 2 for sequences of the same length."""
    window = _window(window_size_left, window_size_right, causal=causal)
    return kernel_scores(q, k, Packing(), window)


@attention_formula(
    "flash_attn::_flash_attn_varlen_forward",
    backward="flash_attn::_flash_attn_varlen_backward",
    reads="cu_seqlens_q cu_seqlens_k seqused_k",
    forward_only="block_table seqused_k",
)
def packed_sequences(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    block_table: Shape | None = None,
    seqused_k: Known = None,
) -> Scores:
    """Count the attention scores of flash-attn 2 for packed sequences."""
    packing = Packing(
        queries=cu_seqlens_q,
        keys=cu_seqlens_k,
        longest_query=max_seqlen_q,
        longest_key=max_seqlen_k,
        used_keys=seqused_k,
        pages=block_table,
    )
    window = _window(window_size_left, window_size_right, causal=causal)
    return kernel_scores(q, k, packing, window)


@function_formula("flash_attn_2_cuda:fwd_kvcache", reads="cache_seqlens")
def with_cache(
    q: Shape,
    k_cache: Shape,
    v_cache: Shape,
    k: Shape | None,
    v: Shape | None,
    cache_seqlens: Known,
    rotary_cos: Shape | None,
    rotary_sin: Shape | None,
    cache_batch_idx: Shape | None,
    cache_leftpad: Shape | None,
    block_table: Shape | None,
    alibi_slopes: Shape | None,
    out: Shape | None,
    softmax_scale: float | None,
    causal: bool,  # noqa: FBT001 - callers pass it by position
    window_size_left: int,
    window_size_right: int,
) -> Cost:
    """Cost of attention in flash-attn 2, where queries see the keys in a cache and new keys."""
    new_keys = 0 if k is None else k[1]
    packing = Packing(used_keys=_plus(cache_seqlens, new_keys), pages=block_table)
    window = _window(window_size_left, window_size_right, causal=causal)
    scores = kernel_scores(q, k_cache, packing, window)
    return attention_of_scores(scores, q[-1], v_cache[-1])


def _plus(used_keys: Known, new_keys: int) -> Known:
    if not isinstance(used_keys, Values):
        return used_keys
    return Values(used + new_keys for used in used_keys)


@attention_formula(
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
    backward="flash_attn_3::bwd flash_attn_3::_flash_attn_backward",
    reads="cu_seqlens_q cu_seqlens_k seqused_q seqused_k",
    forward_only="k_new seqused_q seqused_k page_table causal",
)
def version_3(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    k_new: Shape | None = None,
    cu_seqlens_q: Known = None,
    cu_seqlens_k: Known = None,
    seqused_q: Known = None,
    seqused_k: Known = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Shape | None = None,
    is_causal: bool = False,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> Scores:
    """Count the attention scores of flash-attn 3, whose operators support all kinds of sequences.

    The sequences can be dense or packed, and keys can be cached or stored in pages. The argument
    for a causal mask is `causal` in one forward operator, and `is_causal` in all other operators.
    """
    new_keys = 0
    if k_new is not None and len(k_new) == 4:
        new_keys = k_new[1]
    packing = Packing(
        queries=cu_seqlens_q,
        keys=cu_seqlens_k,
        longest_query=max_seqlen_q,
        longest_key=max_seqlen_k,
        used_keys=_plus(seqused_k, new_keys),
        pages=page_table,
        used_queries=seqused_q,
    )
    window = _window(window_size_left, window_size_right, causal=is_causal or causal)
    return kernel_scores(q, k, packing, window)

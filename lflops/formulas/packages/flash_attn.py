"""flash-attn 2 and 3: sequences of one length, packed ones, and queries against a cache of keys."""

from lflops.formulas.attention.packed import kernel_attention, kernel_attention_backward
from lflops.formulas.attention.scores import Known, Packing, Window
from lflops.formulas.table import Cost, Shape, Values, formula, function_formula


def _window(before: int, after: int, *, causal: bool) -> Window:
    return Window.of(before, after, causal=causal, from_last=True)


@formula("flash_attn::_flash_attn_forward")
def forward(q: Shape, k: Shape, v: Shape, *, causal: bool, window_size_left: int, window_size_right: int) -> Cost:
    """Sequences of one length."""
    return kernel_attention(q, k, v, Packing(), _window(window_size_left, window_size_right, causal=causal))


@formula("flash_attn::_flash_attn_backward")
def backward(grad: Shape, q: Shape, k: Shape, v: Shape, *, causal: bool, window_size_left: int, window_size_right: int) -> Cost:
    """The gradients of the above."""
    return kernel_attention_backward(q, k, v, Packing(), _window(window_size_left, window_size_right, causal=causal))


@formula("flash_attn::_flash_attn_varlen_forward", reads="cu_seqlens_q cu_seqlens_k seqused_k")
def varlen_forward(
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
) -> Cost:
    """Packed sequences."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table)
    return kernel_attention(q, k, v, packing, _window(window_size_left, window_size_right, causal=causal))


@formula("flash_attn::_flash_attn_varlen_backward", reads="cu_seqlens_q cu_seqlens_k")
def varlen_backward(
    grad: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> Cost:
    """The gradients of the above."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernel_attention_backward(q, k, v, packing, _window(window_size_left, window_size_right, causal=causal))


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
    causal: bool,  # noqa: FBT001 - as the function is called
    window_size_left: int,
    window_size_right: int,
) -> Cost:
    """New queries against what the cache holds, and the keys that come with them."""
    new = 0 if k is None else k[1]
    used = Values(each + new for each in cache_seqlens) if isinstance(cache_seqlens, Values) else cache_seqlens
    packing = Packing(used_keys=used, pages=block_table)
    return kernel_attention(q, k_cache, v_cache, packing, _window(window_size_left, window_size_right, causal=causal))


@formula("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward", reads="cu_seqlens_q cu_seqlens_k seqused_q seqused_k")
def forward_3(
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
) -> Cost:
    """All that the third version does: one length, packed, cached, in pages. The mask is `causal` where Python calls it."""
    new = k_new[1] if k_new is not None and len(k_new) == 4 else 0
    used = Values(each + new for each in seqused_k) if isinstance(seqused_k, Values) else seqused_k
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, used, page_table, seqused_q)
    return kernel_attention(q, k, v, packing, _window(window_size_left, window_size_right, causal=is_causal or causal))


@formula("flash_attn_3::bwd", "flash_attn_3::_flash_attn_backward", reads="cu_seqlens_q cu_seqlens_k")
def backward_3(
    grad: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    cu_seqlens_q: Known = None,
    cu_seqlens_k: Known = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> Cost:
    """The gradients of the above."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernel_attention_backward(q, k, v, packing, _window(window_size_left, window_size_right, causal=is_causal))

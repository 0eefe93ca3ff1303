"""Attention as its kernels take it: [batch, length, heads, width], or packed sequences of several lengths, [tokens, heads, width].

Each packed sequence is a separate square. Where they begin is in a tensor (`cu_seqlens`), of which the formulas ask for the numbers.
"""

from lflops.formulas.attention.fused import Mask, attention, attention_backward, attention_backward_of_scores, attention_of_scores
from lflops.formulas.attention.scores import Known, Packing, Scores, Window, scores_of, sequences
from lflops.formulas.table import Cost, Shape, formula

__all__ = ["kernel_attention", "kernel_attention_backward"]


def kernel_attention(query: Shape, key: Shape, value: Shape, packing: Packing, window: Window) -> Cost:
    """Q x K and P x V of each sequence."""
    return attention_of_scores(_scores(query, key, packing, window), query[-1], value[-1])


def kernel_attention_backward(query: Shape, key: Shape, value: Shape, packing: Packing, window: Window) -> Cost:
    """The gradients of the above, with the scores once more."""
    return attention_backward_of_scores(_scores(query, key, packing, window), query[-1], value[-1])


def _scores(query: Shape, key: Shape, packing: Packing, window: Window) -> Scores:
    return scores_of(sequences(query, key, packing), query[-2], window)


@formula("_flash_attention_forward", writes_first="_flash_attention_forward_no_dropout_inplace", reads="cum_seq_q cum_seq_k seqused_k")
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
) -> Cost:
    """Flash attention, with windows, with keys that are used in part, and with keys in pages."""
    packing = Packing(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
    window = Window.of(window_size_left, window_size_right, causal=is_causal, from_last=True)
    return kernel_attention(query, key, value, packing, window)


@formula("_flash_attention_backward", reads="cum_seq_q cum_seq_k")
def flash_backward(
    grad: Shape,
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
) -> Cost:
    """The gradients of the above."""
    window = Window.of(window_size_left, window_size_right, causal=is_causal, from_last=True)
    return kernel_attention_backward(query, key, value, Packing(cum_seq_q, cum_seq_k, max_q, max_k), window)


def _of_pair(window: tuple[int, int] | list[int] | None, *, is_causal: bool) -> Window:
    before, after = window or (-1, -1)
    return Window.of(before, after, causal=is_causal, from_last=True)


@formula("torch_attn::_varlen_attn", writes_first="torch_attn::_varlen_attn_out", reads="cu_seq_q cu_seq_k seqused_k")
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
) -> Cost:
    """`torch.nn.attention.varlen.varlen_attn`."""
    packing = Packing(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    return kernel_attention(query, key, value, packing, _of_pair(window_size, is_causal=is_causal))


@formula("torch_attn::_varlen_attn_backward", reads="cu_seq_q cu_seq_k")
def varlen_backward(
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seq_q: Known,
    cu_seq_k: Known,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size: list[int] | None = None,
) -> Cost:
    """The gradients of the above."""
    window = _of_pair(window_size, is_causal=is_causal)
    return kernel_attention_backward(query, key, value, Packing(cu_seq_q, cu_seq_k, max_q, max_k), window)


@formula("_efficient_attention_forward", reads="cu_seqlens_q cu_seqlens_k seqlen_k")
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
) -> Cost:
    """Memory-efficient attention; packed sequences are [1, tokens, heads, width], and a window counts the query's own place."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlen_k)
    window = Mask(custom_mask_type).window(window_size - 1 if window_size else None)
    return kernel_attention(*_without_batch(cu_seqlens_q, query, key, value), packing, window)


@formula("_efficient_attention_backward", reads="cu_seqlens_q cu_seqlens_k")
def efficient_backward(
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    custom_mask_type: int,
    window_size: int | None = None,
) -> Cost:
    """The gradients of the above."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = Mask(custom_mask_type).window(window_size - 1 if window_size else None)
    return kernel_attention_backward(*_without_batch(cu_seqlens_q, query, key, value), packing, window)


def _without_batch(offsets: Known, *shapes: Shape) -> tuple[Shape, Shape, Shape]:
    query, key, value = shapes if offsets is None else (shape[1:] for shape in shapes)
    return query, key, value


@formula("_cudnn_attention_forward", reads="cum_seq_q cum_seq_k")
def cudnn(
    query: Shape, key: Shape, value: Shape, *, cum_seq_q: Known, cum_seq_k: Known, max_q: int, max_k: int, is_causal: bool = False
) -> Cost:
    """CuDNN's, of [batch, heads, length, width] or packed sequences."""
    mask = Mask.FROM_FIRST if is_causal else Mask.NONE
    if cum_seq_q is None:
        return attention(query, key, value, mask)
    return kernel_attention(query, key, value, Packing(cum_seq_q, cum_seq_k, max_q, max_k), mask.window())


@formula("_cudnn_attention_backward", reads="cum_seq_q cum_seq_k")
def cudnn_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *, cum_seq_q: Known, cum_seq_k: Known, max_q: int, max_k: int, is_causal: bool
) -> Cost:
    """The gradients of the above."""
    mask = Mask.FROM_FIRST if is_causal else Mask.NONE
    if cum_seq_q is None:
        return attention_backward(query, key, value, mask)
    return kernel_attention_backward(query, key, value, Packing(cum_seq_q, cum_seq_k, max_q, max_k), mask.window())

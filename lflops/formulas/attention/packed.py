"""Attention as its kernels take it: [batch, length, heads, width], or packed sequences of several lengths, [tokens, heads, width].

Each packed sequence is a separate square. Where they begin is in a tensor (`cu_seqlens`), of which the formulas ask for the numbers.
"""

from lflops.formulas.attention.fused import Mask, attention_formula
from lflops.formulas.attention.scores import Known, Packing, Scores, Window, dense, scores_of, sequences
from lflops.formulas.table import Shape


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
    return kernel_scores(query, key, packing, Window.of(window_size_left, window_size_right, causal=is_causal, from_last=True))


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
    return kernel_scores(query, key, packing, Window.of(before, after, causal=is_causal, from_last=True))


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
    """Memory-efficient attention; packed sequences are [1, tokens, heads, width], and a window counts the query's own place."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlen_k)
    queries, keys = (query, key) if cu_seqlens_q is None else (query[1:], key[1:])
    return kernel_scores(queries, keys, packing, Mask(custom_mask_type).window(window_size - 1 if window_size else None))


@attention_formula("_cudnn_attention_forward", backward="_cudnn_attention_backward", reads="cum_seq_q cum_seq_k")
def cudnn(
    query: Shape, key: Shape, value: Shape, *, cum_seq_q: Known, cum_seq_k: Known, max_q: int, max_k: int, is_causal: bool = False
) -> Scores:
    """CuDNN's, of [batch, heads, length, width] or packed sequences."""
    window = (Mask.FROM_FIRST if is_causal else Mask.NONE).window()
    if cum_seq_q is None:
        return dense(query, key, window)
    return kernel_scores(query, key, Packing(cum_seq_q, cum_seq_k, max_q, max_k), window)

"""Formulas for xformers: flash attention, CUTLASS kernels, and AMD's composable kernels (CK).

The Triton kernels of xformers have no formula, so they are listed as unsupported. Newer releases
call ATen's memory-efficient attention instead of the CUTLASS kernels. Queries, keys and values have
the shape [batch, length, heads, width] or, if heads are divided into groups, [batch, length,
groups, heads, width].
"""

from math import prod

from lflops.formulas.attention.fused import (
    Known,
    Packing,
    Scores,
    Window,
    attention_formula,
    efficient_window,
    kernel_scores,
)
from lflops.formulas.table import Shape


def _dense(shape: Shape) -> Shape:
    """Convert a shape to [batch, length, heads, width], with groups and heads merged."""
    batch, length, *heads, width = shape
    return (batch, length, prod(heads), width)


def _packed(shape: Shape) -> Shape:
    """Convert the shape of packed sequences to [tokens, heads, width].

    The batch dimension, which has the length 1, is removed. Groups and heads are merged.
    """
    if len(shape) > 3:
        shape = shape[1:]
    tokens, *heads, width = shape
    return (tokens, prod(heads), width)


@attention_formula(
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
    backward="xformers_flash::flash_bwd",
    leading="grads_share_storage grad",
    reads="cu_seqlens_q cu_seqlens_k seqused_k",
    forward_only="seqused_k block_tables block_table",
)
def flash(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    seqused_k: Known = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    block_tables: Shape | None = None,
    block_table: Shape | None = None,
) -> Scores:
    """Count the attention scores of flash attention 2 and 3 in xformers."""
    pages = block_tables or block_table
    is_packed = cu_seqlens_q is not None and pages is None
    by_head = _packed if is_packed else _dense
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, pages)
    window = Window.of(window_left, window_right, causal=is_causal, from_last=True)
    return kernel_scores(by_head(query), by_head(key), packing, window)


@attention_formula(
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
    backward="""
        xformers::efficient_attention_backward_cutlass
        xformers::efficient_attention_backward_ck
    """,
    reads="seqstart_q seqstart_k seqlen_k",
    forward_only="seqlen_k",
    backward_only="max_seqlen_k",
)
def efficient(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    seqstart_q: Known,
    seqstart_k: Known,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None = None,
    custom_mask_type: int,
    seqlen_k: Known = None,
    window_size: int | None = None,
) -> Scores:
    """Count the attention scores of memory-efficient attention in xformers."""
    by_head = _dense if seqstart_q is None else _packed
    packing = Packing(seqstart_q, seqstart_k, max_seqlen_q, max_seqlen_k, seqlen_k)
    window = efficient_window(custom_mask_type, window_size)
    return kernel_scores(by_head(query), by_head(key), packing, window)

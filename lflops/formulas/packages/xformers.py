"""xformers: flash attention under its own names, CUTLASS, AMD's composable kernels.

Its Triton kinds are launches that the ledger lists.

Newer releases call ATen's memory-efficient attention for CUTLASS. A batch of heads may be in
groups: [batch, length, groups, heads, width].
"""

from math import prod

from lflops.formulas.attention.fused import (
    Known,
    Mask,
    Packing,
    Scores,
    Window,
    attention_formula,
    kernel_scores,
)
from lflops.formulas.table import Shape


def _heads(shape: Shape, *, packed: bool) -> Shape:
    """One dimension of heads, and no batch before packed sequences."""
    length = shape[1:] if packed and len(shape) > 3 else shape
    leading = 1 if packed else 2
    return (*length[:leading], prod(length[leading:-1]), length[-1])


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
    """Flash attention 2 and 3."""
    packed = cu_seqlens_q is not None
    pages = block_tables or block_table
    q, k = (_heads(each, packed=packed and pages is None) for each in (query, key))
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, pages)
    return kernel_scores(
        q, k, packing, Window.of(window_left, window_right, causal=is_causal, from_last=True)
    )


CUTLASS, CK = (f"xformers::efficient_attention_{{}}_{kind}" for kind in ("cutlass", "ck"))


@attention_formula(
    CUTLASS.format("forward"),
    CK.format("forward"),
    backward=f"{CUTLASS} {CK}".format("backward", "backward"),
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
    """Memory-efficient attention."""
    q, k = (_heads(each, packed=seqstart_q is not None) for each in (query, key))
    window = Mask(custom_mask_type).window(window_size - 1 if window_size else None)
    return kernel_scores(
        q, k, Packing(seqstart_q, seqstart_k, max_seqlen_q, max_seqlen_k, seqlen_k), window
    )

"""xformers: flash attention under its own names, CUTLASS, AMD's composable kernels; its Triton kinds are launches that the ledger lists.

Newer releases call ATen's memory-efficient attention for CUTLASS. A batch of heads may be in groups: [batch, length, groups, heads, width].
"""

from math import prod

from lflops.formulas.attention.fused import Mask
from lflops.formulas.attention.packed import kernel_attention, kernel_attention_backward
from lflops.formulas.attention.scores import Known, Packing, Window
from lflops.formulas.table import Cost, Shape, formula


def _heads(shape: Shape, *, packed: bool) -> Shape:
    """One dimension of heads, and no batch before packed sequences."""
    length = shape[1:] if packed and len(shape) > 3 else shape
    leading = 1 if packed else 2
    return (*length[:leading], prod(length[leading:-1]), length[-1])


@formula("xformers_flash::flash_fwd", "xformers_flash3::flash_fwd", reads="cu_seqlens_q cu_seqlens_k seqused_k")
def flash_forward(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    seqused_k: Known,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    block_tables: Shape | None = None,
    block_table: Shape | None = None,
) -> Cost:
    """Flash attention 2 and 3."""
    packed = cu_seqlens_q is not None
    pages = block_tables or block_table
    q, k, v = (_heads(each, packed=packed and pages is None) for each in (query, key, value))
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, pages)
    return kernel_attention(q, k, v, packing, Window.of(window_left, window_right, causal=is_causal, from_last=True))


@formula("xformers_flash::flash_bwd", reads="cu_seqlens_q cu_seqlens_k")
def flash_backward(
    grads_share_storage: bool,  # noqa: FBT001 - as the operator has it
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    cu_seqlens_q: Known,
    cu_seqlens_k: Known,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
) -> Cost:
    """The gradients of the above."""
    q, k, v = (_heads(each, packed=cu_seqlens_q is not None) for each in (query, key, value))
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernel_attention_backward(q, k, v, packing, Window.of(window_left, window_right, causal=is_causal, from_last=True))


CUTLASS, CK = (f"xformers::efficient_attention_{{}}_{kind}" for kind in ("cutlass", "ck"))


@formula(CUTLASS.format("forward"), CK.format("forward"), reads="seqstart_q seqstart_k seqlen_k")
def efficient_forward(
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    seqstart_q: Known,
    seqstart_k: Known,
    max_seqlen_q: int | None,
    custom_mask_type: int,
    seqlen_k: Known = None,
    window_size: int | None = None,
) -> Cost:
    """Memory-efficient attention."""
    q, k, v = (_heads(each, packed=seqstart_q is not None) for each in (query, key, value))
    window = Mask(custom_mask_type).window(window_size - 1 if window_size else None)
    return kernel_attention(q, k, v, Packing(seqstart_q, seqstart_k, max_seqlen_q, None, seqlen_k), window)


@formula("xformers::efficient_attention_backward_cutlass", "xformers::efficient_attention_backward_ck", reads="seqstart_q seqstart_k")
def efficient_backward(
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    *,
    seqstart_q: Known,
    seqstart_k: Known,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    custom_mask_type: int,
    window_size: int | None = None,
) -> Cost:
    """The gradients of the above."""
    q, k, v = (_heads(each, packed=seqstart_q is not None) for each in (query, key, value))
    window = Mask(custom_mask_type).window(window_size - 1 if window_size else None)
    return kernel_attention_backward(q, k, v, Packing(seqstart_q, seqstart_k, max_seqlen_q, max_seqlen_k), window)

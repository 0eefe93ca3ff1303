"""Test cases, with costs calculated by hand, for operators of other packages.

The packages are FlashAttention, xFormers, causal-conv1d, bitsandbytes, torchao and FBGEMM.
"""

from typing import Any

from lflops.formulas.table import Cost, Values
from tests.support.formula_cases import Case, case
from tests.support.package_stand_ins import registered
from tests.support.packed_formula_cases import (
    HEADS,
    backward as gradients,
    bound,
    causal,
    crossed,
    forward,
    grad,
    in_pages,
    key,
    lower_right,
    offsets,
    offsets_of_keys,
    packed,
    packed_grad,
    packed_keys,
    packed_values,
    query,
    shape,
    square,
    squares,
    upper_left,
    value,
    values_of_keys,
    windowed,
)

OPERATORS = registered()

open_window: dict[str, Any] = {"window_size_left": -1, "window_size_right": -1}
same = (packed, packed, packed_values)
lengths: dict[str, Any] = {
    "cu_seqlens_q": offsets,
    "cu_seqlens_k": offsets,
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
}
unknown = lengths | {"cu_seqlens_q": shape, "cu_seqlens_k": shape}
to_keys = lengths | {"cu_seqlens_k": offsets_of_keys, "max_seqlen_k": 5}
paged: dict[str, Any] = {
    "cu_seqlens_q": Values((0, 1, 3)),
    "max_seqlen_q": 2,
    "max_seqlen_k": 4,
    "seqused_k": Values((3, 4)),
}
of_pages = forward(HEADS * (3 + 2 * 4), HEADS * (3 + 3 + 4))


def dense(operator: str, before: tuple[Any, ...], answer: Any, **window: Any) -> list[Case]:
    """Return cases for sequences of one length, without and with a causal mask.

    Args:
        operator: The operator.
        before: The operator's arguments before Q, K and V.
        answer: `forward` or `gradients`.
        **window: Arguments for an open window.
    """
    mask = "causal"
    for name in ("3::bwd", "3::fwd", "_3::_flash_attn_backward"):
        if name in operator:
            mask = "is_causal"
    return [
        case(operator, *before, query, key, value, **{mask: False}, **window, expected=answer()),
        case(
            operator,
            *before,
            query,
            key,
            value,
            **{mask: True},
            **window,
            expected=answer(seen=lower_right),
        ),
    ]


def of_lengths(
    operator: str, before: tuple[Any, ...], answer: Any, mask: str = "causal", **window: Any
) -> list[Case]:
    """Return cases for packed sequences.

    In this order, they are: no mask, a causal mask, a causal window of two keys, cross-attention,
    and unknown lengths.

    Args:
        operator: The operator.
        before: The operator's arguments before Q, K and V.
        answer: `forward` or `gradients`.
        mask: Name of the argument for a causal mask.
        **window: Arguments for an open window.
    """
    return [
        case(
            operator, *before, *same, **lengths, **{mask: False}, **window, expected=answer(squares)
        ),
        case(
            operator,
            *before,
            *same,
            **lengths,
            **{mask: True},
            **window,
            expected=answer(squares, causal),
        ),
        case(
            operator,
            *before,
            *same,
            **lengths,
            **{mask: True},
            **window | {"window_size_left": 1},
            expected=answer(squares, windowed),
        ),
        case(
            operator,
            *before,
            packed,
            packed_keys,
            values_of_keys,
            **to_keys,
            **{mask: False},
            **window,
            expected=answer(crossed),
        ),
        case(
            operator,
            *before,
            *same,
            **unknown,
            **{mask: False},
            **window,
            expected=answer(bound, known=False),
        ),
    ]


def flash_3_forward(operator: str, mask: str) -> list[Case]:
    """Return cases for a forward operator of FlashAttention 3, whose causal argument is `mask`."""
    return [
        *dense(operator, (), forward),
        *of_lengths(operator, (), forward, mask, **open_window),
        case(operator, *in_pages, **paged, page_table=(2, 2), **{mask: True}, expected=of_pages),
        # The sequences use 3 and 4 of 8 keys, and each has one new key. So 4 and 5 keys are used.
        case(
            operator,
            query,
            key,
            value,
            k_new=(2, 1, HEADS, 16),
            seqused_k=Values((3, 4)),
            expected=forward(HEADS * 5 * (4 + 5)),
        ),
        # The sequences use 2, 0 and 1 of their queries.
        case(
            operator,
            *same,
            **lengths,
            seqused_q=Values((2, 0, 1)),
            expected=forward(HEADS * (2 * 3 + 1 * 4)),
        ),
    ]


def flash_3_backward(operator: str) -> list[Case]:
    """Return cases for a backward operator of FlashAttention 3."""
    return [
        *dense(operator, (grad,), gradients),
        *of_lengths(operator, (packed_grad,), gradients, "is_causal", **open_window),
    ]


FLASH = [
    *dense("flash_attn::_flash_attn_forward", (), forward, **open_window),
    *dense("flash_attn::_flash_attn_backward", (grad,), gradients, **open_window),
    *of_lengths("flash_attn::_flash_attn_varlen_forward", (), forward, **open_window),
    *of_lengths(
        "flash_attn::_flash_attn_varlen_backward", (packed_grad,), gradients, **open_window
    ),
    case(
        "flash_attn::_flash_attn_varlen_forward",
        *in_pages,
        **paged,
        cu_seqlens_k=Values((0, 3, 7)),
        block_table=(2, 2),
        causal=True,
        expected=of_pages,
    ),
    *flash_3_forward("flash_attn_3::fwd", "is_causal"),
    *flash_3_forward("flash_attn_3::_flash_attn_forward", "causal"),
    *flash_3_backward("flash_attn_3::bwd"),
    *flash_3_backward("flash_attn_3::_flash_attn_backward"),
]

of_xformers: dict[str, Any] = {
    "seqused_k": None,
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
    "window_left": -1,
    "window_right": -1,
}
none: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None}
both: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
batched = [(1, *each) for each in same]
starts: dict[str, Any] = {"seqstart_q": offsets, "seqstart_k": offsets, "max_seqlen_q": 4}
no_starts: dict[str, Any] = {"seqstart_q": None, "seqstart_k": None, "max_seqlen_q": None}
flash_2_and_3 = "xformers_flash::flash_fwd xformers_flash3::flash_fwd"
efficient = "xformers::efficient_attention_forward_cutlass xformers::efficient_attention_forward_ck"
efficient_back = (
    "xformers::efficient_attention_backward_cutlass xformers::efficient_attention_backward_ck"
)
# The heads are in 3 groups of one head.
in_groups = [(*each[:2], 3, 1, each[-1]) for each in (query, key, value)]

XFORMERS = [
    case(
        flash_2_and_3,
        query,
        key,
        value,
        **none,
        **of_xformers,
        is_causal=True,
        expected=forward(seen=lower_right),
    ),
    case(flash_2_and_3, *in_groups, **none, **of_xformers, is_causal=False, expected=forward()),
    case(
        flash_2_and_3,
        *same,
        **both,
        **of_xformers,
        is_causal=True,
        expected=forward(squares, causal),
    ),
    case(
        "xformers_flash::flash_bwd",
        False,
        packed_grad,
        *same,
        **both,
        **{name: each for name, each in of_xformers.items() if name != "seqused_k"},
        is_causal=True,
        expected=gradients(squares, causal),
    ),
    *(
        case(
            efficient,
            query,
            key,
            value,
            **no_starts,
            custom_mask_type=mask,
            expected=forward(seen=seen),
        )
        for mask, seen in ((0, square), (1, upper_left), (2, lower_right))
    ),
    case(efficient, *batched, **starts, custom_mask_type=1, expected=forward(squares, causal)),
    case(
        efficient,
        *batched,
        **starts,
        custom_mask_type=1,
        window_size=2,
        expected=forward(squares, windowed),
    ),
    case(
        efficient_back,
        grad,
        query,
        key,
        value,
        **no_starts | {"max_seqlen_q": 5},
        max_seqlen_k=8,
        custom_mask_type=2,
        expected=gradients(seen=lower_right),
    ),
    case(
        efficient_back,
        packed_grad,
        *batched,
        **starts,
        max_seqlen_k=4,
        custom_mask_type=1,
        expected=gradients(squares, causal),
    ),
]

# A short convolution: batch, channels, length, and width of the kernel.
B = 2
C = 5
L = 7
W = 4
wave = (B, C, L)
taps = (C, W)
elements = B * C * L

CONVOLUTIONS = [
    case(
        "DaoAILab::_causal_conv1d_fwd_cpp",
        wave,
        taps,
        None,
        silu_activation=False,
        expected=elements * W,
    ),
    case(
        "DaoAILab::_causal_conv1d_fwd_cpp",
        wave,
        taps,
        (C,),
        silu_activation=True,
        expected=Cost(elements * W, other_flops=2 * elements),
    ),
    case(
        "DaoAILab::_causal_conv1d_bwd_cpp",
        wave,
        taps,
        None,
        silu_activation=False,
        expected=2 * elements * W,
    ),
    case(
        "DaoAILab::_causal_conv1d_bwd_cpp",
        wave,
        taps,
        (C,),
        silu_activation=True,
        expected=Cost(2 * elements * W, other_flops=2 * elements, recompute=Cost(elements * W)),
    ),
    case(
        "DaoAILab::_causal_conv1d_update_cpp",
        (B, C),
        (B, C, W),
        taps,
        (C,),
        silu_activation=False,
        expected=Cost(B * C * W, other_flops=B * C),
    ),
]

N = 3
K = 8
M = 6
a = (N, K)
b = (M, K)

BITSANDBYTES = [
    case("bitsandbytes::int8_linear_matmul", a, b, expected=N * K * M),
    case("bitsandbytes::int8_scaled_mm", a, b, expected=Cost(N * K * M, other_flops=2 * N * M)),
    case(
        "bitsandbytes::int8_scaled_mm",
        a,
        b,
        bias=(M,),
        expected=Cost(N * K * M, other_flops=3 * N * M),
    ),
    case(
        "bitsandbytes::int8_mixed_scaled_mm",
        a,
        a,
        b,
        expected=Cost(N * K * M, other_flops=2 * N * M),
    ),
    # Two columns are too large for eight bits. Their product is also computed in floats, and added.
    case(
        "bitsandbytes::int8_mixed_scaled_mm",
        a,
        a,
        b,
        outlier_cols=(2,),
        bias=(M,),
        expected=Cost(N * (K + 2) * M, other_flops=4 * N * M),
    ),
    case(
        "bitsandbytes::gemm_4bit bitsandbytes::gemv_4bit",
        a,
        (M * K // 2, 1),
        [M, K],
        expected=N * K * M,
    ),
    case(
        "bitsandbytes::dequantize_4bit",
        (M * K // 2, 1),
        shape=[M, K],
        expected=Cost(other_flops=M * K),
    ),
    case(
        "bitsandbytes::dequantize_blockwise bitsandbytes::int8_vectorwise_dequant",
        a,
        expected=Cost(other_flops=N * K),
    ),
    case(
        "bitsandbytes::quantize_4bit bitsandbytes::quantize_blockwise"
        " bitsandbytes::int8_vectorwise_quant",
        a,
        expected=Cost(other_flops=2 * N * K),
    ),
    case("bitsandbytes::int8_double_quant", a, expected=Cost(other_flops=4 * N * K)),
    case("bitsandbytes::int8_mm_dequant", a, expected=Cost(other_flops=2 * N * K)),
    case("bitsandbytes::int8_mm_dequant", a, bias=(K,), expected=Cost(other_flops=3 * N * K)),
    case(
        "bitsandbytes::optimizer_update_32bit",
        "adam",
        a,
        weight_decay=0.0,
        expected=Cost(other_flops=10 * N * K),
    ),
    case(
        "bitsandbytes::optimizer_update_32bit",
        "lion",
        a,
        weight_decay=0.1,
        expected=Cost(other_flops=8 * N * K),
    ),
    case(
        "bitsandbytes::optimizer_update_8bit_blockwise",
        "adam",
        a,
        state2=a,
        weight_decay=0.1,
        expected=Cost(other_flops=(11 + 6) * N * K),
    ),
    case(
        "bitsandbytes::optimizer_update_8bit_blockwise",
        "lion",
        a,
        state2=None,
        weight_decay=0.0,
        expected=Cost(other_flops=(7 + 3) * N * K),
    ),
]

bits = " ".join(f"torchao::_linear_8bit_act_{each}bit_weight" for each in range(1, 9))
# Queries, keys and values, as [batch, heads, length, width].
q = (2, 3, 5, 16)
k = (2, 3, 8, 16)
v = (2, 3, 8, 24)

TORCHAO = [
    case(
        f"torchao::da8w4_linear_cpu torchao::float8_linear_cpu {bits}",
        (2, N, K),
        out=(2, N, M),
        expected=2 * N * K * M,
    ),
    case(
        "torchao::mx_fp8_bf16 torchao::blockwise_scaled_mm",
        (N, K),
        (K, M),
        out=(N, M),
        expected=Cost(N * K * M, other_flops=N * M),
    ),
    case(
        "torchao::rowwise_scaled_linear_sparse_cutlass_f8f8",
        a,
        out=(N, M),
        expected=Cost(N * K * M // 2, other_flops=2 * N * M),
    ),
    case(
        "torchao::rowwise_scaled_linear_sparse_cutlass_f8f8",
        a,
        out=(N, M),
        bias=(M,),
        expected=Cost(N * K * M // 2, other_flops=3 * N * M),
    ),
    case("torchao::qscaled_dot_product", q, k, v, expected=forward()),
    case(
        "torchao::qscaled_dot_product", q, k, v, is_causal=True, expected=forward(seen=upper_left)
    ),
    case("torchao::_scaled_embedding_bag", (100, 8), (12,), expected=Cost(other_flops=2 * 12 * 8)),
    case(
        "torchao::da8w4_linear_prepack_cpu torchao::float8_linear_prepack_cpu"
        " torchao::to_sparse_semi_structured_cutlass_sm9x_f8",
        b,
        expected=Cost(),
    ),
]

# Sequences of 3, 0 and 4 rows. A kernel skips the rows of a sequence after the first `max_L` rows.
rows = (7, K)
# These operators only move data.
moved = (
    "fbgemm::jagged_to_padded_dense fbgemm::jagged_to_padded_dense_forward"
    " fbgemm::jagged_to_padded_dense_backward fbgemm::dense_to_jagged"
    " fbgemm::dense_to_jagged_forward fbgemm::jagged_index_select_2d_forward"
    " fbgemm::jagged_slice_forward fbgemm::stacked_jagged_2d_to_dense_forward"
    " fbgemm::bounds_check_indices"
)
with_dense = "fbgemm::jagged_dense_bmm fbgemm::jagged_dense_bmm_forward"
with_jagged = "fbgemm::jagged_jagged_bmm fbgemm::jagged_jagged_bmm_forward"

# 12 rows of two embedding tables, which have up to 8 columns. If the tables have 16 columns
# together, each has 8. If they have 12, it is unknown which rows have 8 columns, so the cost is an
# upper bound. A row costs one operation per column, and two if it is weighted.
tables: dict[str, Any] = {"indices": (12,), "max_D": 8}
embedding_cases = []
for operator, operations in (
    ("fbgemm::dense_embedding_codegen_lookup_function", 1),
    ("fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper", 1),
    ("fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper", 2),
):
    for total in (16, 12):
        embedding_cases.append(
            case(
                operator,
                **tables,
                D_offsets=(3,),
                total_D=total,
                expected=Cost(other_flops=operations * 12 * 8, is_upper_bound=total != 2 * 8),
            )
        )

FBGEMM = [
    case(with_dense, rows, x_offsets=offsets, y=(3, K, M), max_L=4, expected=7 * K * M),
    case(with_dense, rows, x_offsets=offsets, y=(3, K, M), max_L=2, expected=4 * K * M),
    case(
        with_dense,
        rows,
        x_offsets=shape,
        y=(3, K, M),
        max_L=2,
        expected=Cost(7 * K * M, is_upper_bound=True),
    ),
    case(with_jagged, rows, (7, M), x_offsets=offsets, max_L=4, expected=7 * K * M),
    case(
        with_jagged,
        rows,
        (7, M),
        x_offsets=shape,
        max_L=4,
        expected=Cost(7 * K * M, is_upper_bound=True),
    ),
    case(
        "fbgemm::batched_dense_vec_jagged_2d_mul fbgemm::batched_dense_vec_jagged_2d_mul_forward",
        (6, 4),
        (7, 16),
        expected=7 * 16,
    ),
    case(
        "fbgemm::batched_dense_vec_jagged_2d_mul_backward",
        (6, 8),
        (6, 4),
        (7, 16),
        expected=2 * 7 * 16,
    ),
    case(
        "fbgemm::jagged_softmax fbgemm::jagged_softmax_forward",
        rows,
        expected=Cost(other_flops=5 * 7 * K),
    ),
    case("fbgemm::jagged_softmax_backward", rows, expected=Cost(other_flops=4 * 7 * K)),
    case(
        "fbgemm::jagged_dense_elementwise_add_jagged_output fbgemm::jagged_dense_elementwise_mul"
        " fbgemm::jagged_dense_elementwise_mul_forward",
        rows,
        expected=Cost(other_flops=7 * K),
    ),
    case(
        "fbgemm::jagged_dense_elementwise_mul_backward", rows, expected=Cost(other_flops=2 * 7 * K)
    ),
    case(
        "fbgemm::jagged_dense_elementwise_add",
        rows,
        y=(3, 4, K),
        expected=Cost(other_flops=3 * 4 * K),
    ),
    case(moved, rows, expected=Cost()),
    *embedding_cases,
]

CASES = [*FLASH, *XFORMERS, *CONVOLUTIONS, *BITSANDBYTES, *TORCHAO, *FBGEMM]

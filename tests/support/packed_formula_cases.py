"""Test cases, with costs calculated by hand, for attention kernels.

All sequences have the same length, or they are packed. The lengths of packed sequences may be
unknown.
"""

import contextlib
from typing import Any

from lflops.formulas.table import Cost, Values
from tests.support.formula_cases import Case, case

with contextlib.suppress(ImportError):
    # The import registers the operators of `torch_attn`. Older versions of torch do not have them.
    import torch.nn.attention.varlen  # noqa: F401

BATCH = 2
HEADS = 3
# The number of queries and of keys: the score matrix is ROWS x COLUMNS.
ROWS = 5
COLUMNS = 8
# The width of queries and keys, and of values.
WIDE = 16
VALUE = 24

query = (BATCH, ROWS, HEADS, WIDE)
key = (BATCH, COLUMNS, HEADS, WIDE)
value = (BATCH, COLUMNS, HEADS, VALUE)
grad = (BATCH, ROWS, HEADS, VALUE)

square = BATCH * HEADS * ROWS * COLUMNS
"""Number of scores without a mask."""
upper_left = BATCH * HEADS * (1 + 2 + 3 + 4 + 5)
"""Number of scores under a causal mask that begins at the upper left.

Query 0 sees only key 0, query 1 sees keys 0 and 1, and so on.
"""
lower_right = BATCH * HEADS * (4 + 5 + 6 + 7 + 8)
"""Number of scores under a causal mask that ends at the lower right.

The last query sees all 8 keys, the one before it sees 7, and so on.
"""


def forward(of_all: int = square, seen: int | None = None, *, known: bool = True) -> Cost:
    """Return the cost of attention: two matmuls, and 5 operations of the softmax per score.

    Args:
        of_all: Number of scores without a mask.
        seen: Number of scores that the kernel computes under a mask; by default all.
        known: Whether the lengths of the sequences are known. If not, the cost is an upper bound.
    """
    seen = of_all if seen is None else seen
    return Cost(
        of_all * (WIDE + VALUE), seen * (WIDE + VALUE), 5 * of_all, is_upper_bound=not known
    )


def backward(of_all: int = square, seen: int | None = None, *, known: bool = True) -> Cost:
    """Return the cost of the gradient of attention. The arguments are those of `forward`.

    There is one matmul for each of the gradients of V, P, Q and K. The scores are recomputed with
    one more matmul. Their exponentials need only two operations per score, because forward has kept
    the sums of the softmax.
    """
    seen = of_all if seen is None else seen
    again = Cost(of_all * WIDE, seen * WIDE, 2 * of_all)
    return Cost(
        of_all * 2 * (WIDE + VALUE),
        seen * 2 * (WIDE + VALUE),
        4 * of_all,
        again,
        is_upper_bound=not known,
    )


# Three packed sequences of 3, 0 and 4 tokens.
packed = (7, HEADS, WIDE)
packed_values = (7, HEADS, VALUE)
packed_grad = (7, HEADS, VALUE)
offsets = Values((0, 3, 3, 7))

# For cross-attention, 2, 5 and 4 keys for the queries of these sequences.
packed_keys = (11, HEADS, WIDE)
values_of_keys = (11, HEADS, VALUE)
offsets_of_keys = Values((0, 2, 7, 11))

squares = HEADS * (3 * 3 + 4 * 4)
"""Number of scores without a mask."""
causal = HEADS * (1 + 2 + 3 + 1 + 2 + 3 + 4)
"""Number of scores under a causal mask."""
windowed = HEADS * (1 + 2 + 2 + 1 + 2 + 2 + 2)
"""Number of scores in a window in which each query sees its own key and the previous one."""
crossed = HEADS * (3 * 2 + 4 * 4)
"""Number of scores of cross-attention."""
bound = HEADS * (4 * 4 + 3 * 3)
"""Largest possible number of scores if the lengths are unknown.

No sequence has more than 4 of the 7 tokens. So the largest number belongs to sequences of 4 and 3.
"""
shape = (4,)
"""Shape of the offsets, which a formula receives if their values are unknown."""


def flash_cases(operator: str, before: tuple[Any, ...], answer: Any, **more: Any) -> list[Case]:
    """Return cases for a flash attention operator of torch.

    Args:
        operator: The operator.
        before: The operator's arguments before Q, K and V.
        answer: `forward` or `backward`.
        **more: Further arguments for all cases.
    """
    dense: dict[str, Any] = {
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": ROWS,
        "max_k": COLUMNS,
    } | more
    one: dict[str, Any] = {
        "cum_seq_q": offsets,
        "cum_seq_k": offsets,
        "max_q": 4,
        "max_k": 4,
    } | more
    same = (*before, packed, packed, packed_values)
    unknown = one | {"cum_seq_q": shape, "cum_seq_k": shape}
    return [
        case(operator, *before, query, key, value, **dense, is_causal=False, expected=answer()),
        case(
            operator,
            *before,
            query,
            key,
            value,
            **dense,
            is_causal=True,
            expected=answer(seen=lower_right),
        ),
        case(operator, *same, **one, is_causal=False, expected=answer(squares)),
        case(operator, *same, **one, is_causal=True, expected=answer(squares, causal)),
        case(
            operator,
            *same,
            **one,
            is_causal=True,
            window_size_left=1,
            expected=answer(squares, windowed),
        ),
        case(
            operator,
            *same,
            **one,
            is_causal=False,
            window_size_left=1,
            window_size_right=0,
            expected=answer(squares, windowed),
        ),
        case(
            operator,
            *before,
            packed,
            packed_keys,
            values_of_keys,
            **one | {"cum_seq_k": offsets_of_keys, "max_k": 5},
            is_causal=False,
            expected=answer(crossed),
        ),
        case(operator, *same, **unknown, is_causal=False, expected=answer(bound, known=False)),
        case(
            operator, *same, **unknown, is_causal=True, expected=answer(bound, causal, known=False)
        ),
    ]


# Two sequences with 1 and 2 queries. Their keys are in 6 pages of 2 tokens; each sequence has up to
# 2 pages, so at most 4 keys. They use 3 and 4 keys.
pages: dict[str, Any] = {
    "cum_seq_q": Values((0, 1, 3)),
    "cum_seq_k": None,
    "max_q": 2,
    "max_k": 4,
    "block_table": (2, 2),
    "is_causal": True,
}
in_pages = ((3, HEADS, WIDE), (6, 2, HEADS, WIDE), (6, 2, HEADS, VALUE))
used: dict[str, Any] = {
    "cum_seq_q": offsets,
    "cum_seq_k": offsets,
    "max_q": 4,
    "max_k": 4,
    "is_causal": False,
}


def paged_cases(operator: str, before: tuple[Any, ...]) -> list[Case]:
    """Return cases with keys in pages, for a known and an unknown number of used keys.

    The last query of a sequence sees all used keys, and the query before it sees one key less.
    """
    return [
        case(
            operator,
            *before,
            *in_pages,
            **pages,
            seqused_k=Values((3, 4)),
            expected=forward(HEADS * (3 + 2 * 4), HEADS * (3 + 3 + 4)),
        ),
        case(
            operator,
            *before,
            *in_pages,
            **pages,
            seqused_k=(2,),
            expected=forward(HEADS * (4 + 2 * 4), HEADS * (4 + 3 + 4), known=False),
        ),
    ]


CASES = [
    *flash_cases("_flash_attention_forward", (), forward),
    *flash_cases("_flash_attention_forward_no_dropout_inplace", (query,), forward),
    *flash_cases("_flash_attention_backward", (grad,), backward),
    *paged_cases("_flash_attention_forward", ()),
    *paged_cases("_flash_attention_forward_no_dropout_inplace", (query,)),
    # The sequences use 1, 0 and 2 of their keys. Then these numbers are unknown.
    case(
        "_flash_attention_forward",
        packed,
        packed,
        packed_values,
        **used,
        seqused_k=Values((1, 0, 2)),
        expected=forward(HEADS * (3 * 1 + 4 * 2)),
    ),
    case(
        "_flash_attention_forward",
        packed,
        packed,
        packed_values,
        **used,
        seqused_k=shape,
        expected=forward(squares, known=False),
    ),
]


def varlen_cases(operator: str, before: tuple[Any, ...], answer: Any) -> list[Case]:
    """Return cases for an operator of torch's `varlen_attn`, with the arguments that it passes.

    The arguments of this function are those of `flash_cases`.
    """
    one: dict[str, Any] = {"cu_seq_q": offsets, "cu_seq_k": offsets, "max_q": 4, "max_k": 4}
    same = (*before, packed, packed, packed_values)
    return [
        case(operator, *same, **one, is_causal=False, expected=answer(squares)),
        case(
            operator,
            *same,
            **one,
            is_causal=True,
            window_size=[-1, 0],
            expected=answer(squares, causal),
        ),
        case(
            operator,
            *same,
            **one,
            is_causal=False,
            window_size=[1, 0],
            expected=answer(squares, windowed),
        ),
        case(
            operator,
            *same,
            **one | {"cu_seq_q": shape, "cu_seq_k": shape},
            is_causal=False,
            expected=answer(bound, known=False),
        ),
    ]


CASES += [
    *varlen_cases("torch_attn::_varlen_attn", (), forward),
    *varlen_cases("torch_attn::_varlen_attn_out", (packed_grad,), forward),
    *varlen_cases("torch_attn::_varlen_attn_backward", (packed_grad,), backward),
]


def efficient_cases(operator: str, before: tuple[Any, ...], answer: Any) -> list[Case]:
    """Return cases for a memory-efficient attention operator of torch.

    Packed sequences have an additional first dimension, a batch of 1. The arguments of this
    function are those of `flash_cases`.
    """
    none: dict[str, Any] = dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    )
    one: dict[str, Any] = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    same = (*before, (1, *packed), (1, *packed), (1, *packed_values))
    unknown = one | {"cu_seqlens_q": shape, "cu_seqlens_k": shape}
    of_one_length = [
        case(
            operator,
            *before,
            query,
            key,
            value,
            **none,
            custom_mask_type=mask,
            expected=answer(seen=seen),
        )
        for mask, seen in ((0, square), (1, upper_left), (2, lower_right))
    ]
    return [
        *of_one_length,
        case(operator, *same, **one, custom_mask_type=0, expected=answer(squares)),
        case(operator, *same, **one, custom_mask_type=1, expected=answer(squares, causal)),
        case(
            operator,
            *same,
            **one,
            custom_mask_type=1,
            window_size=2,
            expected=answer(squares, windowed),
        ),
        case(operator, *same, **unknown, custom_mask_type=0, expected=answer(bound, known=False)),
    ]


def cudnn_cases(operator: str, before: tuple[Any, ...], answer: Any) -> list[Case]:
    """Return cases for a cuDNN attention operator of torch.

    Its tensors are [batch, heads, length, width], or packed. The arguments of this function are
    those of `flash_cases`.
    """
    q = (BATCH, HEADS, ROWS, WIDE)
    k = (BATCH, HEADS, COLUMNS, WIDE)
    v = (BATCH, HEADS, COLUMNS, VALUE)
    dense: dict[str, Any] = {"cum_seq_q": None, "cum_seq_k": None, "max_q": ROWS, "max_k": COLUMNS}
    one: dict[str, Any] = {"cum_seq_q": offsets, "cum_seq_k": offsets, "max_q": 4, "max_k": 4}
    same = (*before, packed, packed, packed_values)
    unknown = one | {"cum_seq_q": shape, "cum_seq_k": shape}
    return [
        case(operator, *before, q, k, v, **dense, is_causal=False, expected=answer()),
        case(operator, *before, q, k, v, **dense, is_causal=True, expected=answer(seen=upper_left)),
        case(operator, *same, **one, is_causal=False, expected=answer(squares)),
        case(operator, *same, **one, is_causal=True, expected=answer(squares, causal)),
        case(
            operator, *same, **unknown, is_causal=True, expected=answer(bound, causal, known=False)
        ),
    ]


CASES += [
    *efficient_cases("_efficient_attention_forward", (), forward),
    *efficient_cases("_efficient_attention_backward", (grad,), backward),
    # The sequences use 1, 0 and 2 of their keys.
    case(
        "_efficient_attention_forward",
        (1, *packed),
        (1, *packed),
        (1, *packed_values),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=4,
        max_seqlen_k=4,
        custom_mask_type=0,
        seqlen_k=Values((1, 0, 2)),
        expected=forward(HEADS * (3 * 1 + 4 * 2)),
    ),
    *cudnn_cases("_cudnn_attention_forward", (), forward),
    *cudnn_cases("_cudnn_attention_backward", (grad,), backward),
]

"""Answers calculated by hand for attention kernels.

The sequences have one length, or they are packed and their lengths may be unknown.
"""

import contextlib
from typing import Any

from lflops.formulas.table import Cost, Values
from tests.support.formula_cases import Case, case

with contextlib.suppress(ImportError):  # which enters its operators
    import torch.nn.attention.varlen  # noqa: F401

BATCH, ROWS, COLUMNS, HEADS, WIDE, VALUE = 2, 5, 8, 3, 16, 24

query, key, value = (
    (BATCH, ROWS, HEADS, WIDE),
    (BATCH, COLUMNS, HEADS, WIDE),
    (BATCH, COLUMNS, HEADS, VALUE),
)
grad = (BATCH, ROWS, HEADS, VALUE)
square = BATCH * HEADS * ROWS * COLUMNS
first = BATCH * HEADS * (1 + 2 + 3 + 4 + 5)
"""Scores that query 0 sees of key 0, query 1 of keys 0 and 1, and so on."""
last = BATCH * HEADS * (4 + 5 + 6 + 7 + 8)
"""The same where the last query is beside the last key."""


def forward(of_all: int = square, seen: int | None = None, *, known: bool = True) -> Cost:
    """Q x K and P x V, a softmax a score."""
    seen = of_all if seen is None else seen
    return Cost(
        of_all * (WIDE + VALUE), seen * (WIDE + VALUE), 5 * of_all, is_upper_bound=not known
    )


def backward(of_all: int = square, seen: int | None = None, *, known: bool = True) -> Cost:
    """V, P, Q and K have a gradient each.

    The scores are computed once more, and their exponentials from the sums that were kept.
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


# Three sequences of 3, 0 and 4 tokens; and of 2, 5 and 4 keys for the same queries.
packed, packed_keys = (7, HEADS, WIDE), (11, HEADS, WIDE)
packed_values, packed_grad, values_of_keys = (
    (7, HEADS, VALUE),
    (7, HEADS, VALUE),
    (11, HEADS, VALUE),
)
offsets, offsets_of_keys = Values((0, 3, 3, 7)), Values((0, 2, 7, 11))
squares = HEADS * (3 * 3 + 4 * 4)
causal = HEADS * (1 + 2 + 3 + 1 + 2 + 3 + 4)
windowed = HEADS * (1 + 2 + 2 + 1 + 2 + 2 + 2)
"""Each query sees itself and the one before."""
crossed = HEADS * (3 * 2 + 4 * 4)
bound = HEADS * (4 * 4 + 3 * 3)
"""7 tokens of which no sequence has more than 4: at most one of 4 and one of 3."""
shape = (4,)
"""Of offsets that are not known."""


def flash_cases(operator: str, before: tuple[Any, ...], answer: Any, **more: Any) -> list[Case]:
    """Of an operator whose first arguments stand before Q, K and V."""
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
    same, unknown = (
        (*before, packed, packed, packed_values),
        one | {"cum_seq_q": shape, "cum_seq_k": shape},
    )
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
            expected=answer(seen=last),
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


# Keys in 6 pages of 2 tokens: sequences of 1 and 2 queries use 3 and 4 of the up to 2 pages that
# each has.
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

CASES = [
    *flash_cases("_flash_attention_forward", (), forward),
    *flash_cases("_flash_attention_forward_no_dropout_inplace", (query,), forward),
    *flash_cases("_flash_attention_backward", (grad,), backward),
    *(
        case(operator, *before, *in_pages, **pages, seqused_k=known, expected=answer)
        for operator, before in (
            ("_flash_attention_forward", ()),
            ("_flash_attention_forward_no_dropout_inplace", (query,)),
        )
        for known, answer in (
            # The last query sees all that is used, the one before it one less.
            (Values((3, 4)), forward(HEADS * (3 + 2 * 4), HEADS * (3 + 3 + 4))),
            ((2,), forward(HEADS * (4 + 2 * 4), HEADS * (4 + 3 + 4), known=False)),
        )
    ),
    *(
        case(
            "_flash_attention_forward",
            packed,
            packed,
            packed_values,
            **used,
            seqused_k=known,
            expected=answer,
        )
        for known, answer in (
            (Values((1, 0, 2)), forward(HEADS * (3 * 1 + 4 * 2))),
            (shape, forward(squares, known=False)),
        )
    ),
]


def varlen_cases(operator: str, before: tuple[Any, ...], answer: Any) -> list[Case]:
    """As torch's own `varlen_attn` calls it."""
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
    """Packed sequences have a batch of one before them."""
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
    return [
        *(
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
            for mask, seen in ((0, square), (1, first), (2, last))
        ),
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
    """[batch, heads, length, width], or packed."""
    q, k, v = (
        (BATCH, HEADS, ROWS, WIDE),
        (BATCH, HEADS, COLUMNS, WIDE),
        (BATCH, HEADS, COLUMNS, VALUE),
    )
    dense: dict[str, Any] = {"cum_seq_q": None, "cum_seq_k": None, "max_q": ROWS, "max_k": COLUMNS}
    one: dict[str, Any] = {"cum_seq_q": offsets, "cum_seq_k": offsets, "max_q": 4, "max_k": 4}
    same, unknown = (
        (*before, packed, packed, packed_values),
        one | {"cum_seq_q": shape, "cum_seq_k": shape},
    )
    return [
        case(operator, *before, q, k, v, **dense, is_causal=False, expected=answer()),
        case(operator, *before, q, k, v, **dense, is_causal=True, expected=answer(seen=first)),
        case(operator, *same, **one, is_causal=False, expected=answer(squares)),
        case(operator, *same, **one, is_causal=True, expected=answer(squares, causal)),
        case(
            operator, *same, **unknown, is_causal=True, expected=answer(bound, causal, known=False)
        ),
    ]


CASES += [
    *efficient_cases("_efficient_attention_forward", (), forward),
    *efficient_cases("_efficient_attention_backward", (grad,), backward),
    # Sequences use 1 and 2 of their keys.
    case(
        "_efficient_attention_forward",
        *((1, *each) for each in (packed, packed, packed_values)),
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

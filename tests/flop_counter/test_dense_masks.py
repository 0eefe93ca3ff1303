"""Test packed sequences that a dense attention mask separates.

All scores are counted, and a note contains the share of scores within a sequence.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lflops
from lflops.flop_counter import attention_masks
from lflops.profile.notes import Note, sentence
from tests.conformance.packed import CASES
from tests.support.count_function import Function

HEADS, WIDTH = 3, 8
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def notes(mask: Tensor, *, batch: int = 1) -> list[Note]:
    """Return the notes of an attention call with this mask."""
    queries = torch.randn(batch, HEADS, mask.shape[-2], WIDTH)
    keys = torch.randn(batch, HEADS, mask.shape[-1], WIDTH)
    profile = lflops.count(
        Function(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m)),
        (queries, keys, mask),
    )
    assert batch * HEADS * 2 * mask.shape[-2] * mask.shape[-1] * WIDTH == profile.total(
        metric="executed_macs"
    )
    return list(profile.notes)


def scores(mask: Tensor, *, batch: int = 1) -> tuple[Any, ...] | None:
    """Return the computed scores of one head, and those within a sequence.

    The result is `None` if there is no note.
    """
    found = notes(mask, batch=batch)
    for note in found:
        assert "dense_mask" == note.code
        assert KERNEL == note.subject
        assert 1 == note.values["calls"]
    if not found:
        return None
    values: Any = found[0].values
    return values["computed"] // HEADS, values["within"] // HEADS


def same(*lengths: int) -> Tensor:
    """Return a mask that connects the tokens of the same sequence."""
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    return sequence[:, None] == sequence[None, :]


def test_sequences_that_a_mask_separates_are_squares() -> None:
    """Sequences of 3, 5 and 2 tokens have 9 + 25 + 4 of 100 scores.

    This holds for a causal mask, for a float mask, and for each sample of a batch.
    """
    assert (100, 38) == scores(same(3, 5, 2)) == scores(same(3, 5, 2).tril())
    assert (100, 38) == scores(
        torch.zeros(10, 10).masked_fill(~same(3, 5, 2), torch.finfo(torch.float32).min)
    )
    assert (200, 38 + 50) == scores(torch.stack([same(3, 5, 2), same(5, 5)])[:, None], batch=2)
    assert (200, 2 * 38) == scores(same(3, 5, 2).expand(2, 1, -1, -1), batch=2)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(10, 10, dtype=torch.bool).tril(),
        torch.ones(10, 10, dtype=torch.bool).tril().triu(-2),
        torch.ones(10, 10, dtype=torch.bool) & (torch.arange(10) < 7),
        torch.ones(4, 10, dtype=torch.bool),
        torch.zeros(10, 10),
    ],
    ids=["causal", "window", "padding", "to other tokens", "bias"],
)
def test_a_mask_that_separates_nothing_has_no_note(mask: Tensor) -> None:
    """There is no note if each token sees the next one, or if all tokens see the same tokens."""
    assert scores(mask) is None


def test_a_mask_that_is_too_large_or_not_there_has_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is large or fake has no note.

    A large mask would take long to read, and a fake mask has no values.
    """
    monkeypatch.setattr(attention_masks, "MOST_READ", 99)
    assert scores(same(3, 5, 2)) is None
    x = torch.randn(1, HEADS, 10, WIDTH)
    model = Function(lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask > 0))
    assert () == lflops.estimate(model, (x, same(3, 5, 2).float())).notes


def test_an_error_while_a_mask_is_read_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading a mask fails, for example without memory, the count continues without the note."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(attention_masks, "_separated", fails)
    assert scores(same(3, 5, 2)) is None


def test_transformers_packs_by_a_dense_mask_for_sdpa() -> None:
    """For a model of transformers with a dense mask, the note contains calls and scores.

    The positions restart after 3 and 8 tokens, in 6 heads of each of two layers.
    """
    (case,) = (case for case in CASES if case.name == "Llama, packed, by a dense mask")
    model, args, kwargs = case.build()
    (note,) = lflops.count(model, args, kwargs, backward=True).notes
    assert {"calls": 2, "computed": 2 * 6 * 100, "within": 2 * 6 * 38} == note.values
    assert (
        f"2 calls of {KERNEL} separate packed sequences with a dense mask: only 38.0 % of the attention scores are within a sequence, but all scores are computed; "
        "varlen_attn or flex attention would skip the other scores"
    ) == sentence(note)

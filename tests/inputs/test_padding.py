"""Test that the padding share of a batch is found from its mask, or from the ends of its rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.inputs.batch import BatchReader
from lflops.inputs.padding import padding_of


def share(batch: Any, token_ids: tuple[str, ...] = ()) -> float | None:
    """Return the padding share of a batch. The tensors named in `token_ids` hold tokens."""
    padding = padding_of(BatchReader().read(batch))
    return None if padding is None else padding.share(token_ids)


def tokens(*lengths: int, to: int = 32, pad: int = 0) -> Tensor:
    """Return one row for each length: the tokens 1, 2, ..., then `pad` up to the width `to`."""
    rows = torch.full((len(lengths), to), pad)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.arange(1, length + 1)
    return rows


HALF = (tokens(8, 16, 32, 8) > 0).long()
"""A mask of 4 rows with 8, 16, 32 and 8 tokens in 32 positions, so half of them are padding."""


def ids(pad: int = 0) -> Tensor:
    """Return random tokens where `HALF` is 1, and `pad` elsewhere."""
    return torch.where(HALF == 1, torch.randint(1, 100, HALF.shape), pad)


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": HALF},
        {"attention_mask": HALF.bool()},
        {"attention_mask": HALF.float()},
        # In transformers, 1 marks the tokens to keep. In torch's transformer, true marks padding.
        {"attention_mask": HALF == 0},
        {"src_key_padding_mask": HALF == 0},
        {"padding_mask": HALF},
        # Padding on the left.
        {"attention_mask": HALF.flip(1)},
    ],
)
def test_a_padding_mask_says_it_in_either_polarity(masks: dict[str, Tensor]) -> None:
    """All masked ids are the id of the padding token, so the mask is recognized as padding."""
    input_ids = ids()
    pads_on_the_left = "attention_mask" in masks and torch.equal(
        masks["attention_mask"], HALF.flip(1)
    )
    if pads_on_the_left:
        input_ids = input_ids.flip(1)
    assert 0.5 == share({"input_ids": input_ids, **masks})


def test_a_mask_of_features_agrees_with_their_zeros() -> None:
    """The mask counts if the masked frames of sound, or its masked raw samples, are zero."""
    features = torch.rand(4, 32, 5) + 1
    assert 0.5 == share({"x": features * HALF[..., None], "padding_mask": HALF == 0})
    assert 0.5 == share(
        {"input_values": (features * HALF[..., None])[..., 0], "attention_mask": HALF}
    )


def test_a_mask_that_agrees_with_nothing_says_nothing() -> None:
    """If the masked ids differ from each other, the mask selects something other than padding.

    Without token ids, features that do not end with zeros show that there is no padding.
    """
    masks = {"attention_mask": HALF, "padding_mask": HALF}
    assert None is share({"x": torch.randint(1, 100, (4, 32)), **masks})
    assert 0 == share({"x": torch.rand(4, 32, 5) + 1, **masks})
    assert None is share(masks)


def half_masked() -> Tensor:
    """Return a mask that selects the second half of 64 positions in 8 rows."""
    mask = torch.zeros(8, 64, dtype=torch.long)
    mask[:, 32:] = 1
    return mask


def first_masked() -> Tensor:
    """Return a mask that selects the first of 64 positions, such as a class token."""
    mask = torch.zeros(8, 64, dtype=torch.long)
    mask[:, 0] = 1
    return mask


OTHER_MASKS = {
    "completion_mask": half_masked,
    "assistant_masks": half_masked,
    "loss_mask": half_masked,
    "special_tokens_mask": first_masked,
    "global_attention_mask": first_masked,
}
"""Masks that select tokens for the loss or for attention."""


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_are_no_padding(name: str) -> None:
    """Such a mask does not show padding, even if all ids that it selects are the same."""
    full = {"input_ids": torch.randint(1, 103, (8, 64)), "attention_mask": torch.ones(8, 64)}
    assert 0 == share(full | {name: OTHER_MASKS[name]()})
    constant = torch.where(OTHER_MASKS[name]() == 1, 7, torch.randint(8, 103, (8, 64)))
    assert 0 == share(full | {"input_ids": constant, name: OTHER_MASKS[name]()})


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_beside_other_masks_padding_is_found(name: str) -> None:
    """Half of the 128 positions are padded, whatever the other mask selects."""
    other = OTHER_MASKS[name]()[:4, :32]
    assert 0.5 == share({"input_ids": ids(), "attention_mask": HALF, name: other})


def test_two_masks_add_up() -> None:
    """64 of 128 and 0 of 64 positions are padding: a third in total, not the larger share."""
    batch = {
        "anchor_input_ids": ids(),
        "anchor_attention_mask": HALF,
        "positive_input_ids": torch.randint(1, 100, (4, 16)),
        "positive_attention_mask": torch.ones(4, 16),
    }
    assert 64 / 192 == share(batch)


def test_rows_of_tokens_that_end_alike_say_it() -> None:
    """Without a mask, the repeated id at the end of the rows is padding, whichever id it is.

    This needs tensors that hold tokens. Other integers may also end with equal values, such as
    the black margins of images.
    """
    for pad in (0, 50_256, -100):
        batch = (tokens(8, 16, 32, 8, pad=pad), torch.arange(4))
        assert 0.5 == share(batch, ("0",))
        assert None is share(batch)
        assert 0.5 == share({"input_ids": batch[0]})


def test_features_of_zero_say_it() -> None:
    """Two recordings of 8 and 24 frames are padded with zeros to 32 frames each."""
    frames = torch.rand(2, 32, 5) + 1
    frames[0, 8:] = 0
    frames[1, 24:] = 0
    assert 0.5 == share([frames])


def test_a_black_margin_around_images_is_no_padding() -> None:
    """The last 16 rows and columns of each image are black, as in images of digits."""
    images = torch.zeros(8, 32, 32)
    images[:, :16, :16] = 1
    assert None is share((images, torch.arange(8)))


@pytest.mark.parametrize(
    "batch",
    [
        {"token_type_ids": torch.ones(4, 32, dtype=torch.long)},
        {"segments": (tokens(8, 16, 32, 8) > 0).long()},
        torch.rand(4, 3, 32, 32),
        torch.rand(4, 32),
        torch.zeros(4, 3, 8),
        torch.arange(4),
        None,
        "text",
        torch.rand(4, 32).to_sparse(),
    ],
)
def test_other_batches_say_nothing(batch: Any) -> None:
    """Segment marks, images, features without positions and unreadable batches have no share."""
    assert None is share(batch)


def test_full_rows_have_none() -> None:
    """Rows of different tokens have no padding, but two equal tokens at an end count as padding."""
    assert 0 == share(torch.arange(128).view(4, 32), ("0",))
    ids = torch.arange(128).view(4, 32)
    ids[0, -2] = ids[0, -1]
    assert 2 / 128 == share(ids, ("0",))


@pytest.mark.parametrize(
    ("lengths", "said"), [((8, 16, 32, 8), [{"share": 0.5}]), ((32, 30, 32, 32), [])]
)
def test_a_training_says_it_in_a_note(
    lengths: tuple[int, ...], said: list[dict[str, float]], tmp_path: Path
) -> None:
    """Half of a batch is worth a note, but 2 of 128 positions are not."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lflops.Schedule(wait=2, warmup=1, active=1, repeat=1)
    asked: dict[str, Any] = {
        "schedule": schedule,
        "dirpath": tmp_path,
        "hardware": None,
        "trace": False,
        "ledger": False,
    }
    with lflops.monitor(model, optimizer, log=lambda _: None, on_error="raise", **asked) as monitor:
        for _ in range(6):
            ids = tokens(*lengths)
            with monitor.step(ids):
                model(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    (profile,) = monitor.profiles
    assert said == [note.values for note in profile.notes if note.code == "padding"]

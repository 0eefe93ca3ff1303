"""How much of a batch is padding: by its mask, or by what its rows end with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.inputs.batch import BatchReader
from lflops.inputs.padding import padding_of


def share(batch: Any, token_ids: tuple[str, ...] = ()) -> float | None:
    """Of a batch as a loop gets it; an embedding looks up these tensors."""
    padding = padding_of(BatchReader().read(batch))
    return None if padding is None else padding.share(token_ids)


def tokens(*lengths: int, to: int = 32, pad: int = 0) -> Tensor:
    """Rows of so many different tokens, filled up."""
    rows = torch.full((len(lengths), to), pad)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.arange(1, length + 1)
    return rows


HALF = (tokens(8, 16, 32, 8) > 0).long()
"""Of 4 rows of 32 positions 8, 16, 32 and 8 are there: half of them is padding."""


def ids(pad: int = 0) -> Tensor:
    """Random tokens where there are some."""
    return torch.where(HALF == 1, torch.randint(1, 100, HALF.shape), pad)


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": HALF},
        {"attention_mask": HALF.bool()},
        {"attention_mask": HALF.float()},
        # Transformers keeps what is 1, torch's transformer masks what is true.
        {"attention_mask": HALF == 0},
        {"src_key_padding_mask": HALF == 0},
        {"padding_mask": HALF},
        # padding on the left
        {"attention_mask": HALF.flip(1)},
    ],
)
def test_a_padding_mask_says_it_in_either_polarity(masks: dict[str, Tensor]) -> None:
    """The ids under the mask are all that of the padding token."""
    input_ids = ids()
    if masks.get("attention_mask", HALF)[0, 0] == 0 and "src_key_padding_mask" not in masks:
        first_is_padded = torch.equal(masks["attention_mask"], HALF.flip(1))
        input_ids = input_ids.flip(1) if first_is_padded else input_ids
    assert 0.5 == share({"input_ids": input_ids, **masks})


def test_a_mask_of_features_agrees_with_their_zeros() -> None:
    """Sound of 8, 16, 32 and 8 of 32 frames, and its raw samples."""
    features = torch.rand(4, 32, 5) + 1
    assert 0.5 == share({"x": features * HALF[..., None], "padding_mask": HALF == 0})
    assert 0.5 == share(
        {"input_values": (features * HALF[..., None])[..., 0], "attention_mask": HALF}
    )


def test_a_mask_that_agrees_with_nothing_says_nothing() -> None:
    """What it masks is no padding token: the mask selects something else.

    Features that end with other values than zeros are not padded.
    """
    masks = {"attention_mask": HALF, "padding_mask": HALF}
    assert None is share({"x": torch.randint(1, 100, (4, 32)), **masks})
    assert 0 == share({"x": torch.rand(4, 32, 5) + 1, **masks})
    assert None is share(masks)


def half_masked() -> Tensor:
    """The second half of 64 positions in 8 rows."""
    mask = torch.zeros(8, 64, dtype=torch.long)
    mask[:, 32:] = 1
    return mask


def first_masked() -> Tensor:
    """The first of 64 positions, as that of a class token."""
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
    """Nothing is padded, though the last half of the rows has one id and the mask."""
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
    """64 of 128 positions and none of 64: a third, and not the larger share."""
    batch = {
        "anchor_input_ids": ids(),
        "anchor_attention_mask": HALF,
        "positive_input_ids": torch.randint(1, 100, (4, 16)),
        "positive_attention_mask": torch.ones(4, 16),
    }
    assert 64 / 192 == share(batch)


def test_rows_of_tokens_that_end_alike_say_it() -> None:
    """The same half; by another token for the padding as well, and beside labels whose padding is -100.

    Integers that are no tokens may end alike: the black ends of images in integers do.
    """
    for pad in (0, 50_256, -100):
        batch = (tokens(8, 16, 32, 8, pad=pad), torch.arange(4))
        assert 0.5 == share(batch, ("0",))
        assert None is share(batch)
        assert 0.5 == share({"input_ids": batch[0]})


def test_features_of_zero_say_it() -> None:
    """Sound of 8 and 24 frames of 32, with 5 features."""
    frames = torch.rand(2, 32, 5) + 1
    frames[0, 8:], frames[1, 24:] = 0, 0
    assert 0.5 == share([frames])


def test_a_black_margin_around_images_is_no_padding() -> None:
    """Images of 32 rows and 32 columns, whose last 16 are black, as digits have them."""
    images = torch.zeros(8, 32, 32)
    images[:, :16, :16] = 1
    assert None is share((images, torch.arange(8)))


@pytest.mark.parametrize("batch", [
    {"token_type_ids": torch.ones(4, 32, dtype=torch.long)}, {"segments": (tokens(8, 16, 32, 8) > 0).long()},
    torch.rand(4, 3, 32, 32), torch.rand(4, 32), torch.zeros(4, 3, 8), torch.arange(4), None, "text", torch.rand(4, 32).to_sparse(),
])  # fmt: skip
def test_other_batches_say_nothing(batch: Any) -> None:
    """Marks of segments, images, features without positions, and what can't be read."""
    assert None is share(batch)


def test_full_rows_have_none() -> None:
    """Two equal tokens at an end are two of 128."""
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
    """Where 2 of 128 positions are padding, there is no note."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    optimizer, schedule = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        lflops.Schedule(wait=2, warmup=1, active=1, repeat=1),
    )
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

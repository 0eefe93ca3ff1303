"""How much of a batch is padding: by its mask, or by what its rows end with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.inputs.batch import BatchReader, padded_share


def share(batch: Any) -> float | None:
    """Of a batch as a loop gets it."""
    return padded_share(BatchReader().read(batch))


def tokens(*lengths: int, to: int = 32, pad: int = 0) -> Tensor:
    """Rows of so many different tokens, filled up."""
    rows = torch.full((len(lengths), to), pad)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.arange(1, length + 1)
    return rows


def test_a_mask_says_it() -> None:
    """Of 4 rows of 32 positions 8, 16, 32 and 8 are there: half of them is padding."""
    mask = (tokens(8, 16, 32, 8) > 0).long()
    assert 0.5 == share({"input_ids": torch.randint(1, 100, (4, 32)), "attention_mask": mask})
    assert 0.5 == share({"src_key_padding_mask": mask == 0})


def test_rows_of_tokens_that_end_alike_say_it() -> None:
    """The same half; by another token for the padding as well, and beside labels whose padding is -100."""
    for pad in (0, 50_256, -100):
        assert 0.5 == share((tokens(8, 16, 32, 8, pad=pad), torch.arange(4)))


def test_features_of_zero_say_it() -> None:
    """Sound of 8 and 24 frames of 32, with 5 features."""
    frames = torch.rand(2, 32, 5) + 1
    frames[0, 8:], frames[1, 24:] = 0, 0
    assert 0.5 == share([frames])


@pytest.mark.parametrize("batch", [
    {"token_type_ids": torch.ones(4, 32, dtype=torch.long)}, {"segments": (tokens(8, 16, 32, 8) > 0).long()},
    torch.rand(4, 3, 32, 32), torch.rand(4, 32), torch.zeros(4, 3, 8), torch.arange(4), None, "text", torch.rand(4, 32).to_sparse(),
])  # fmt: skip
def test_other_batches_say_nothing(batch: Any) -> None:
    """Marks of segments, images, features without positions, and what can't be read."""
    assert None is share(batch)


def test_full_rows_have_none() -> None:
    """Two equal tokens at an end are two of 128."""
    assert 0 == share(torch.arange(128).view(4, 32))
    ids = torch.arange(128).view(4, 32)
    ids[0, -2] = ids[0, -1]
    assert 2 / 128 == share(ids)


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

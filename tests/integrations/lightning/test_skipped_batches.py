"""Test training runs in which `training_step` returns `None`, so that Lightning skips the batch."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lflops
from lflops import FlopsMonitor, Schedule
from lflops.monitoring.window import window
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, QUIET

pytestmark = LIGHTNINGS_WARNINGS

BATCH = 4
WIDTH = 8
MACS = BATCH * WIDTH * WIDTH
BATCHES = 40
SCHEDULE = Schedule(wait=1, warmup=1, active=2, repeat=1)
SKIPPED = range(1, 8)
"""The batches that the training run skips: the batch that the window counts, and its neighbors."""


class Skips(LightningModule):
    """A model of one matmul, which skips the batches with the given numbers."""

    def __init__(self, skipped: Container[int]) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)
        self.skipped = skipped

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        return self.product(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def forward_macs(skipped: Container[int], folder: Path) -> int:
    """Return the forward MACs of the run's window."""
    monitor = FlopsMonitor(schedule=SCHEDULE, hardware=None, dirpath=folder, on_error="raise")
    trainer = Trainer(callbacks=[monitor], max_epochs=1, default_root_dir=folder, **QUIET)
    data = [torch.ones(WIDTH) for _ in range(BATCH * BATCHES)]
    trainer.fit(Skips(skipped), DataLoader(data, batch_size=BATCH))
    (file,) = folder.glob("*.profile.json")
    return lflops.load(file).modules["product"].forward.macs


def test_skipped_batches_are_passed_over(tmp_path: Path) -> None:
    """If the loop skips the batch that the window counts, a later step is counted."""
    assert MACS == forward_macs(SKIPPED, tmp_path)


def test_without_further_counts_the_window_would_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no further step may be counted, the model seems to run no matmul."""
    monkeypatch.setattr(window, "MOST_EXTRA_COUNTS", 0)
    assert 0 == forward_macs(SKIPPED, tmp_path)

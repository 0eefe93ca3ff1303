"""Small training runs with Lightning, without any output that a test does not need."""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.trace import annotate_in_background
from tests.support.profile_checks import spent

LIGHTNINGS_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "The '.*_dataloader' does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "You defined a `validation_step` but have no `val_dataloader`",
        "Checkpoint directory .* exists and is not empty",
        "`training_step` returned `None`",
        "You are using the `dataloader_iter` step flavor",
        "Found `dataloader_iter` argument",
    )
]
"""What Lightning itself warns of in trainings as small as these."""

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
    "devices": 1,
}
annotate_in_background.LONGEST = 600.0
ROWS, WIDTH, CLASSES = 4, 8, 3
"""A batch, and what a `Classifier` makes of it."""


def away() -> None:
    """Look at nothing. No lambda, so that a process can be given what looks so."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and their classes, the same in every run."""

    def __init__(self, batches: int, *, look: Callable[[], object] = away) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batches * ROWS, WIDTH, generator=generator)
        self.y = torch.randint(CLASSES, (batches * ROWS,), generator=generator)
        self.look = look

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not index % ROWS:
            self.look()
        return self.x[index], self.y[index]


def loader(batches: int, *, look: Callable[[], object] = away) -> DataLoader[Any]:
    """So many batches; the function is called once in the fetch of each."""
    return DataLoader(Rows(batches, look=look), batch_size=ROWS)


class Classifier(LightningModule):
    """Two layers with dropout between them, and a loss that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Validated(Classifier):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(2)


def fit(
    module: LightningModule, *callbacks: Any, batches: int = 30, data: Any = None, **options: Any
) -> Trainer:
    """Train for an epoch.

    Files go where no one looks for them. The breakdown of every profile has to add up.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            callbacks=list(callbacks),
            **{"max_epochs": 1, "logger": False, "default_root_dir": directory, **QUIET, **options},
        )
        trainer.fit(module, loader(batches) if data is None else data)
    for callback in callbacks:
        for profile in getattr(callback, "profiles", ()):
            spent(profile)
    return trainer


def watching(**options: Any) -> FlopsMonitor:
    """A monitor whose own errors are raised.

    It traces, writes pages, logs modules, and keeps a ledger, where that is asked for.
    """
    return FlopsMonitor(
        **{
            "on_error": "raise",
            "trace": False,
            "html": False,
            "module_scalars": 0,
            "ledger": False,
            **options,
        }
    )


def steps(monitor: FlopsMonitor, window: int = 0) -> Iterator[Any]:
    """The steps of a window that were not counted, without those in which things were cold."""
    return (
        step
        for step in monitor.profiles[window].steps
        if step.kind == "unprofiled" and "warmup" not in step.marks
    )

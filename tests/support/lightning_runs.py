"""Small training runs with Lightning, without progress bar, checkpoints and other output."""

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
"""Marks that ignore warnings which Lightning raises in training runs as small as these."""

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
    "devices": 1,
}
# On a busy machine, a trace may take longer to be annotated than the end of a run normally waits.
annotate_in_background.LONGEST = 600.0

# The shape of a batch is [ROWS, WIDTH]. A `Classifier` returns [ROWS, CLASSES].
ROWS = 4
WIDTH = 8
CLASSES = 3


def away() -> None:
    """Do nothing. This is a function, because a lambda cannot be sent to another process."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and their classes, the same in every run.

    `look` is called once for each batch, when the first of its rows is fetched.
    """

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
    """Return a loader of so many batches. `look` is called once while each batch is fetched."""
    return DataLoader(Rows(batches, look=look), batch_size=ROWS)


class Classifier(LightningModule):
    """Two linear layers with ReLU and dropout between them, and a loss that is not a module."""

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
    """Train for one epoch, and check that the step breakdown of each profile adds up to 100 %.

    Files are written to a temporary folder, unless the options of the Trainer name another one.
    """
    with tempfile.TemporaryDirectory() as directory:
        defaults: dict[str, Any] = {"max_epochs": 1, "logger": False, "default_root_dir": directory}
        trainer = Trainer(callbacks=list(callbacks), **(defaults | QUIET | options))
        trainer.fit(module, loader(batches) if data is None else data)
    for callback in callbacks:
        for profile in getattr(callback, "profiles", ()):
            spent(profile)
    return trainer


def watching(**options: Any) -> FlopsMonitor:
    """Return a monitor that raises the errors of lflops.

    Traces, pages, scalars of modules and the ledger are off, unless an option turns them on.
    """
    defaults: dict[str, Any] = {
        "on_error": "raise",
        "trace": False,
        "html": False,
        "module_scalars": 0,
        "ledger": False,
    }
    return FlopsMonitor(**(defaults | options))


def steps(monitor: FlopsMonitor, window: int = 0) -> Iterator[Any]:
    """Yield the unprofiled steps of a window, without warmup steps."""
    for step in monitor.profiles[window].steps:
        if step.kind == "unprofiled" and "warmup" not in step.marks:
            yield step

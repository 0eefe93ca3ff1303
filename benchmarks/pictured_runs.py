"""Train a small transformer with a known fault, for the pictures of the documentation.

python benchmarks/pictured_runs.py slow-rank|before|after FOLDER

In `slow-rank`, rank 1 of two sleeps in one of its layers. `after` is `before` with a layer that
runs one of its projections four times.
"""

import argparse
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lflops import FlopsMonitor

WIDTH = 128
HEADS = 4
LAYERS = 4
VOCABULARY = 2000
SLEEP = 0.03
KINDS = ("slow-rank", "before", "after")


class Layer(nn.Module):
    """A transformer layer, which may repeat one of its projections or sleep."""

    def __init__(self, *, repeats: int = 1, sleeps: bool = False) -> None:
        """Build the layer."""
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.repeats = repeats
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then apply the feed-forward layers."""
        if self.sleeps:
            time.sleep(SLEEP)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        for _ in range(self.repeats):
            hidden = self.up(x)
        return x + self.down(F.gelu(hidden))


class Model(LightningModule):
    """A language model of a few layers, with the fault of a kind of run."""

    def __init__(self, kind: str) -> None:
        """Build the model."""
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        repeats = 4 if kind == "after" else 1
        layers = [Layer() for _ in range(LAYERS - 1)]
        self.layers = nn.Sequential(*layers, Layer(repeats=repeats))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def on_fit_start(self) -> None:
        """Plant the delay on rank 1."""
        self.layers[2].sleeps = self.kind == "slow-rank" and self.global_rank == 1

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        """Predict the next token."""
        (ids,) = batch
        logits = self.head(self.layers(self.embed(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Train for 60 steps in the given folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = 2 if given.kind == "slow-rank" else 1
    trainer = Trainer(
        max_steps=60,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[FlopsMonitor(dirpath=given.folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = TensorDataset(torch.randint(VOCABULARY, (480 * ranks, 65)))
    trainer.fit(Model(given.kind), DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()

"""Is a slow rank found, with its module, and is its cost right? One rank of a DDP training sleeps in one module's forward in each step."""

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from results import record
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lflops
from lflops.lightning.monitor import FlopsMonitor
from lflops.schedule import Schedule

WIDTH, ROWS, LAYERS, SLOW_LAYER, STEPS = 128, 32, 6, 3, 40
CASES = [(ranks, seconds) for ranks in (2, 3) for seconds in (2e-3, 5e-3, 20e-3)]


class Layer(nn.Module):
    """A product, and a nap."""

    def __init__(self) -> None:
        """Wake."""
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        until = time.perf_counter() + self.delay
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)
        return torch.relu(self.product(x))


class Delayed(LightningModule):
    """Several layers, of which one is slow on the last rank."""

    def __init__(self, seconds: float) -> None:
        """Say by how much."""
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.seconds = seconds

    def on_fit_start(self) -> None:
        if self.trainer.global_rank == self.trainer.world_size - 1:
            self.layers[SLOW_LAYER].delay = self.seconds

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def found(ranks: int, seconds: float) -> str:
    """A line of the table."""
    torch.set_num_threads(1)
    rows: Any = torch.randn(STEPS * ROWS * ranks, WIDTH)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            max_epochs=1,
            callbacks=[FlopsMonitor(Schedule(wait=5, warmup=1, active=10), trace=False, dirpath=directory)],
            accelerator="cpu",
            strategy="ddp_fork",
            devices=ranks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=directory,
        )
        trainer.fit(Delayed(seconds), DataLoader(rows, batch_size=ROWS))
        (path,) = Path(directory).glob("*.profile.json")
        profile = lflops.load(path)
    worst = next(row for row in lflops.imbalance(profile).rows if row.waiting != "unknown")
    lost = worst.seconds_lost
    named = f"rank {worst.slow_rank} | {worst.module} {worst.phase} | {worst.slowest_steps} of {worst.steps}"
    return f"| {ranks} | {1e3 * seconds:.0f} ms | {named} | {1e3 * lost:.2f} ms | {lost / seconds - 1:+.1%} |"


def main() -> None:
    """Measure, and write the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    lines = [
        f"A DDP training over gloo of {LAYERS} layers, all processes on this machine; in each step the last rank sleeps in",
        f"`layers.{SLOW_LAYER}` forward. The row that costs most of those in which nobody waits for others:",
        "",
        "| ranks | planted | slow rank | module | in steps | cost a step | off by |",
        "|--:|--:|--:|---|--:|--:|--:|",
        *(found(*case) for case in CASES),
    ]
    record("ranks.py", "A slow rank", lines)


if __name__ == "__main__":
    main()

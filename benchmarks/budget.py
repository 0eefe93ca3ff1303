"""Whether a step's budget blames what is to blame.

The same training plain, and with something planted, whose size is known.

Waits are slept. The pointwise work is real: multiplications of 16 MiB, and the bandwidth is what
one of these was found to reach.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from results import keep_freed_memory, record
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lflops.analysis.utilization import utilization
from lflops.hardware.chips import Hardware
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.schedule import Schedule

DATA, IDLE, TIMES = 0.040, 0.030, 6
"""Seconds slept, and how many multiplications."""

NUMBERS = 4 * 2**20
WITHIN = 0.10


class Rows(Dataset[Tensor]):
    """Rows that take their time to come."""

    def __init__(self, seconds: float) -> None:
        """Keep it."""
        self.seconds = seconds

    def __len__(self) -> int:
        """More than enough."""
        return 1000

    def __getitem__(self, _: int) -> Tensor:
        """Sleep."""
        time.sleep(self.seconds)
        return torch.ones(64, 256)


class Pointwise(nn.Module):
    """Multiplies the same numbers again and again, beside what passes through."""

    def __init__(self, times: int) -> None:
        """Keep the memory."""
        super().__init__()
        self.times = times
        self.numbers = [torch.ones(NUMBERS), torch.ones(NUMBERS)]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        with torch.no_grad():
            for _ in range(self.times):
                torch.mul(self.numbers[0], 1.5, out=self.numbers[1])
        return x


class Training(LightningModule):
    """Two layers, and what is planted between them."""

    def __init__(self, times: int, idle: float) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), Pointwise(times), nn.Linear(256, 256))
        self.idle = idle

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """A loss."""
        return self.layers(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep the device waiting."""
        time.sleep(self.idle)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.001)


def spent(
    chip: Hardware, steps: int, *, data: float = 0.0, idle: float = 0.0, times: int = 0
) -> dict[str, float]:
    """Seconds of each part of the budget, and an error where these are not the step."""
    monitor = FlopsMonitor(
        Schedule(wait=steps, warmup=1, active=3), hardware=chip, trace=False, on_error="raise"
    )
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    options: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": steps + 6,
        "accelerator": "cpu",
        "devices": 1,
        **quiet,
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(callbacks=[monitor], default_root_dir=directory, **options)
        trainer.fit(Training(times, idle), DataLoader(Rows(data), batch_size=None))
    budget = utilization(monitor.profiles[0]).budget
    if budget is None or abs(sum(budget.parts.values()) - 1) > 1e-3:
        raise SystemExit(f"a budget that does not add up to the step: {budget}")
    return {part: share * budget.seconds for part, share in budget.parts.items()}


def seconds_of_one(trials: int = 40) -> float:
    """The median of a multiplication."""
    once = Pointwise(1)
    taken = []
    for _ in range(trials):
        start = time.perf_counter()
        once(torch.ones(1))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Plant, compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--note", default="", help="what the reader of the numbers has to know")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    once = seconds_of_one()
    chip = Hardware("this machine", {"fp32": 100e9}, 2 * 4 * NUMBERS / once)
    plain = spent(chip, options.steps)
    lines = [
        "| planted | part | by | it grew by | no other changed by more than |",
        "|---|---|--:|--:|--:|",
    ]
    for title, part, planted, amount in (
        ("data wait", "data", {"data": DATA}, DATA),
        ("idle host", "other", {"idle": IDLE}, IDLE),
        ("pointwise work", "memory_bound", {"times": TIMES}, TIMES * once),
    ):
        told = spent(chip, options.steps, **planted)
        grown = {name: told.get(name, 0.0) - plain.get(name, 0.0) for name in told | plain}
        right = abs(grown[part] - amount) <= WITHIN * amount
        shown = f"{grown[part] * 1e3:.2f} ms" if right else f"**{grown[part] * 1e3:.2f} ms**"
        others = max(abs(grown[name]) for name in grown if name != part)
        lines.append(
            f"| {title} | {part} | {amount * 1e3:.2f} ms | {shown} | {others * 1e3:.2f} ms |"
        )
    said = f"Within {WITHIN:.0%} is wanted; every budget added up to its step. Medians of about {options.steps} steps. {options.note}"
    record("budget.py", "Whether the budget blames what is to blame", [*lines, "", said.strip()])


if __name__ == "__main__":
    main()

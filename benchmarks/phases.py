"""Whether the phases of a training step are told right.

A training whose data, model and optimizer sleep for known times.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from results import record
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lflops.analysis.step_times import step_times
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.schedule import Schedule

DATA, TRANSFER, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER = (
    0.040,
    0.007,
    0.020,
    0.003,
    0.030,
    0.005,
    0.010,
)
"""Seconds slept."""


class Slow(torch.optim.SGD):
    """Sleeps behind its closure."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        """Learn little."""
        super().__init__(parameters, lr=0.001)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sleep, and step."""
        result = None if closure is None else closure()
        time.sleep(OPTIMIZER)
        super().step()
        return result


class Rows(Dataset[Tensor]):
    """Rows that take their time to come."""

    def __len__(self) -> int:
        """More than enough."""
        return 1000

    def __getitem__(self, _: int) -> Tensor:
        """Sleep."""
        time.sleep(DATA)
        return torch.ones(8)


class Sleeper(LightningModule):
    """Sleeps wherever a step can."""

    def __init__(self, *, by_hand: bool = False) -> None:
        """Build one layer for each optimizer."""
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.automatic_optimization = not by_hand

    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        """Sleep as a copy to a device would."""
        time.sleep(TRANSFER)
        return batch

    def loss(self, batch: Tensor) -> Tensor:
        """Forward and the loss."""
        time.sleep(FORWARD)
        for layer in self.layers:
            batch = layer(batch)
        time.sleep(LOSS)
        return batch.square().mean()

    def training_step(self, batch: Tensor, _: int) -> Tensor | None:
        """One loss, or one for each optimizer."""
        if self.automatic_optimization:
            return self.loss(batch)
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Go backward, and sleep."""
        loss.backward()
        time.sleep(BACKWARD)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Sleep."""
        time.sleep(CLIP)

    def configure_optimizers(self) -> Any:
        """One optimizer, or one for each layer."""
        return (
            Slow(self.parameters())
            if self.automatic_optimization
            else [Slow(layer.parameters()) for layer in self.layers]
        )


ONCE = {
    "data": DATA,
    "transfer": TRANSFER,
    "forward": FORWARD + LOSS,
    "backward": BACKWARD,
    "clip": CLIP,
    "optimizer": OPTIMIZER,
}
TWICE = {name: 2 * seconds for name, seconds in ONCE.items()}
CASES: dict[str, tuple[bool, dict[str, Any], dict[str, float]]] = {
    "automatic": (False, {}, ONCE),
    "accumulate_grad_batches=2": (
        False,
        {"accumulate_grad_batches": 2},
        TWICE | {"clip": CLIP, "optimizer": OPTIMIZER},
    ),
    "16-mixed": (False, {"plugins": MixedPrecision("16-mixed", "cpu")}, ONCE),
    "manual, two optimizers": (
        True,
        {},
        {name: TWICE[name] for name in TWICE if name != "clip"}
        | {"data": DATA, "transfer": TRANSFER},
    ),
}


def measured(options: dict[str, Any], *, by_hand: bool, steps: int) -> dict[str, float]:
    """The median of each phase."""
    monitor = FlopsMonitor(Schedule(wait=steps, warmup=1, active=1), trace=False, on_error="raise")
    batches = (steps + 2) * options.get("accumulate_grad_batches", 1)
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    options = {
        "max_epochs": 1,
        "limit_train_batches": batches,
        "accelerator": "cpu",
        "devices": 1,
        **quiet,
        **options,
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(callbacks=[monitor], default_root_dir=directory, **options)
        trainer.fit(Sleeper(by_hand=by_hand), DataLoader(Rows(), batch_size=None))
    return {name: spread.median for name, spread in step_times(monitor.profiles[0]).spreads.items()}


def main() -> None:
    """Sleep, compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = ["| training | phase | slept | told | within 5 % + 1 ms |", "|---|---|--:|--:|---|"]
    for title, (by_hand, options, truth) in CASES.items():
        told = measured(options, by_hand=by_hand, steps=steps)
        for name, seconds in truth.items():
            right = abs(told[name] - seconds) <= 0.05 * seconds + 1e-3
            lines.append(
                f"| {title} | {name} | {seconds * 1e3:.0f} ms | {told[name] * 1e3:.2f} ms | {'yes' if right else '**no**'} |"
            )
        lines.append(f"| {title} | other | – | {told['other'] * 1e3:.2f} ms | |")
    record(
        "phases.py", "Where a step's time goes", [*lines, "", f"Medians of about {steps} steps."]
    )


if __name__ == "__main__":
    main()

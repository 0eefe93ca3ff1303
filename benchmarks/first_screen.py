"""Does the first screen name what was planted, with its cost, and do all drawings of it agree?

Trainings with one cause each, or with none.

The cost is checked against the same training without the cause: its mean step, in the same process.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from results import record
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from lflops import FlopsMonitor, Schedule
from lflops.analysis.analysis import analyze
from lflops.profile.profile import Profile
from lflops.report.report import report_of
from tests.support.report_claims import disagreements, wrong_sums

WIDTH, ROWS, BLOCKS, STEPS = 256, 256, 6, 28
SCHEDULE = Schedule(wait=10, warmup=1, active=6)
EXPECTED = {
    "item": "itself, outside its layers",
    "images": "itself, outside its layers",
    "tiny": "blocks.2 runs",
    "fp64": "multiplies in float64",
    "threads": "threads on",
    "data": "waiting for data",
    "data, every third step": "waiting for data",
}
"""What the first cause has to say."""

OTHERS = ("nothing", "GAN", "compiled", "accumulation", "clipping")


class Block(nn.Module):
    """A norm and two products; with 400 tiny operators, or in float64, where that is planted."""

    def __init__(self, *, tiny: bool, wide: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.tiny, self.wide = tiny, wide
        if wide:
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = x.double() if self.wide else x
        for _ in range(400 if self.tiny else 0):
            y = y * 1.0
        y = self.down(torch.relu(self.up(self.norm(y))))
        return x + y.to(x.dtype)


class Net(LightningModule):
    """Six blocks, with a cause in the third one or in `training_step`."""

    def __init__(self, cause: str) -> None:
        super().__init__()
        self.cause = cause
        self.blocks = nn.ModuleList(
            Block(tiny=cause == "tiny" and n == 2, wide=cause == "fp64" and n == 2)
            for n in range(BLOCKS)
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        if self.cause == "item":
            sum(value.item() for value in x.detach().flatten()[:6000])
        if self.cause == "images":
            with tempfile.TemporaryFile() as file:
                torch.save([x.detach().repeat(1, 8) for _ in range(8)], file)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Gan(LightningModule):
    """A generator and a discriminator that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        made = self.generator(batch[0])
        loss = self.discriminator(made if index % 2 else made.detach()).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-3),
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
        ]


class Slow(Dataset[tuple[Tensor]]):
    """Works on some samples: all of them, or those of every third batch."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.sample = torch.randn(WIDTH)

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if index % ROWS == 0 and (index // ROWS) % self.every == 0:
            for _ in range(60):
                torch.randn(400, 400) @ torch.randn(400, 400)
        return (self.sample,)


def trained(cause: str) -> Profile:
    """The profile of the window."""
    torch.set_num_threads(8 if cause == "threads" else 2)
    data: Any = TensorDataset(torch.randn(ROWS * STEPS, WIDTH))
    if cause.startswith("data"):
        data = Slow(3 if "third" in cause else 1)
    model: Any = Gan() if cause == "GAN" else Net(cause)
    monitor = FlopsMonitor(SCHEDULE, trace=False)
    if cause == "compiled":
        model = torch.compile(model)
    more: dict[str, Any] = {"accumulate_grad_batches": 2} if cause == "accumulation" else {}
    if cause == "clipping":
        more = {"gradient_clip_val": 1.0}
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1, callbacks=[monitor], default_root_dir=folder, **quiet, **more
        )
        trainer.fit(model, DataLoader(data, batch_size=ROWS))
    return monitor.profiles[0]


def told(profiles: dict[str, Profile]) -> Iterator[str]:
    """A row for each training."""
    base = analyze(profiles["nothing"]).step_times.mean or 0.0
    for cause, profile in profiles.items():
        analysis = analyze(profile)
        why = report_of(analysis).verdict.why
        first = why[0] if why else "–"
        costs = (analysis.step_times.mean or 0.0) - base
        named = "" if cause not in EXPECTED else "yes" if EXPECTED[cause] in first else "no"
        measured = f"{1e3 * costs:.1f} ms" if cause in EXPECTED else ""
        wrong = len(disagreements(profile)) + len(wrong_sums(profile))
        yield f"| {cause} | {named} | {first} | {measured} | {wrong} |"


def main() -> None:
    """Train each, and write the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    profiles = {cause: trained(cause) for cause in (*OTHERS, *EXPECTED)}
    lines = [
        "Trainings with one planted cause, and some with none: the first cause that the verdict names. *Longer* is the mean step beyond",
        "that of the training with nothing planted. *Wrong* counts facts on which two drawings differ, and wholes that their parts do not",
        "add up to.",
        "",
        "| planted | named first | the first cause | longer | wrong |",
        "|---|---|---|---|---|",
        *told(profiles),
    ]
    record("first_screen.py", "The first screen", lines)


if __name__ == "__main__":
    main()

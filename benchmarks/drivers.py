"""Train the same model in five loops, and compare the reports of lflops.

The model, the batch and the optimizer are the same in Lightning, in a custom loop, in the Trainer
of transformers, with Accelerate and with Fabric. Counts must be equal. The model is wide, so the
work of the loops themselves does not matter, and times must be equal as well.
"""

import argparse
import contextlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import Profiler
from results import record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lflops
from lflops import FlopsMonitor, Profile, Schedule
from lflops.analysis.analysis import Analysis, analyze
from lflops.integrations.huggingface import FlopsCallback

CLASSES = 16


class Size(NamedTuple):
    """The size of a training run.

    Attributes:
        width: Width of the model.
        rows: Number of rows in a batch.
        steps: Number of steps in the run.
    """

    width: int
    rows: int
    steps: int


WIDE = Size(1024, 512, 24)
Loop = Callable[[Schedule | None, Size], Profile | None]
PHASES = ("data", "forward", "backward", "optimizer", "other")
PHASE_COLUMNS = " | ".join(PHASES)
CLOCKS: list[Callable[[], float]] = [time.perf_counter]
"""Clocks. The last of them is read at the beginning of each forward pass."""
FORWARDS: list[float] = []
"""The readings of the clock in one run."""


class Model(LightningModule):
    """An MLP with four linear layers, which Lightning and transformers can train."""

    def __init__(self, width: int) -> None:
        """Create the model with the same weights each time."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)],
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch."""
        FORWARDS.append(CLOCKS[-1]())
        return {"loss": F.cross_entropy(self.layers(x), labels)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning gives it
        """Return the loss, as Lightning expects it."""
        return self(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the same optimizer as in the other loops."""
        return optimizer_of(self)


class Rows(Dataset[dict[str, Tensor]]):
    """Random samples.

    Args:
        size: The number of samples and their width.
    """

    def __init__(self, size: Size) -> None:
        """Create all samples."""
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(size.steps * size.rows, size.width, generator=generator)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample."""
        return {"x": self._x[index], "labels": torch.tensor(index % CLASSES)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Create AdamW, with the arguments that transformers uses."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def in_lightning(
    schedule: Schedule | None,
    size: Size,
    others: Sequence[Callback] = (),
    profiler: Profiler | None = None,
) -> Profile | None:
    """Train in Lightning, with a monitor if there is a schedule.

    Other callbacks and a profiler are optional.
    """
    callbacks = list(others)
    monitor = None
    if schedule is not None:
        monitor = FlopsMonitor(schedule, trace=False, html=False, on_error="raise")
        callbacks.append(monitor)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=size.steps,
            accelerator="cpu",
            logger=CSVLogger(folder),
            log_every_n_steps=50,
            default_root_dir=folder,
            callbacks=callbacks,
            profiler=profiler,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Model(size.width), DataLoader(Rows(size), batch_size=size.rows))
    return None if monitor is None else monitor.profiles[-1]


def in_transformers(schedule: Schedule | None, size: Size) -> Profile | None:
    """Train with transformers, with a callback if there is a schedule."""
    callback = (
        None
        if schedule is None
        else FlopsCallback(
            schedule=schedule, trace=False, html=False, on_error="raise", log=lambda _: None
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=size.rows,
            max_steps=size.steps,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10_000,
            disable_tqdm=True,
            remove_unused_columns=False,
            max_grad_norm=0,
        )
        model = Model(size.width)
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Rows(size),
            callbacks=[] if callback is None else [callback],
            optimizers=(optimizer_of(model), None),  # type: ignore[arg-type, unused-ignore]
        )
        with (
            open("/dev/null", "w", encoding="utf-8") as nothing,  # noqa: PTH123
            contextlib.redirect_stdout(nothing),
        ):
            trainer.train()
    return None if callback is None else callback.profiles[-1]


def _loop(make: Callable[[int], tuple[Any, Any, Any]]) -> Loop:
    def run(schedule: Schedule | None, size: Size) -> Profile | None:
        engine, model, optimizer = make(size.width)
        loader = DataLoader(Rows(size), batch_size=size.rows)

        def one(batch: dict[str, Tensor]) -> None:
            loss = model(**batch)["loss"]
            loss.backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        if schedule is None:
            for batch in loader:
                one(batch)
            return None
        settings = {
            "schedule": schedule,
            "trace": False,
            "html": False,
            "on_error": "raise",
            "log": lambda _: None,
        }
        with lflops.monitor(model, optimizer, engine=engine, **settings) as monitor:
            for batch in monitor.data(loader):
                with monitor.step(batch):
                    one(batch)
        return monitor.profiles[-1]

    return run


def _plain(width: int) -> tuple[Any, Any, Any]:
    model = Model(width)
    return None, model, optimizer_of(model)


def _fabric(width: int) -> tuple[Any, Any, Any]:
    fabric, model = Fabric(accelerator="cpu", devices=1), Model(width)
    return (fabric, *fabric.setup(model, optimizer_of(model)))


def _accelerate(width: int) -> tuple[Any, Any, Any]:
    accelerator, model = Accelerator(cpu=True), Model(width)
    return (accelerator, *accelerator.prepare(model, optimizer_of(model)))


LOOPS: dict[str, Loop] = {
    "Lightning": in_lightning,
    "your own loop": _loop(_plain),
    "transformers": in_transformers,
    "Accelerate": _loop(_accelerate),
    "Fabric": _loop(_fabric),
}


def agreement(rounds: int) -> Iterator[str]:
    """Yield a table row for each loop.

    It contains the monitor's report of the wide run, as medians over the rounds, and compares it
    with the mean of all loops.
    """
    found: dict[str, list[Analysis]] = {name: [] for name in LOOPS}
    ratios: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        for name, run in LOOPS.items():
            FORWARDS.clear()
            profile = run(Schedule(wait=WIDE.steps // 2, warmup=1, active=3, repeat=1), WIDE)
            if profile is None:
                raise AssertionError(name)
            found[name].append(analyze(profile))
            clocked = median(
                after - before for before, after in pairwise(FORWARDS[2 : WIDE.steps // 2])
            )
            ratios[name].append(found[name][-1].step_times.seconds.median / clocked - 1)
    steps = {
        name: median(each.step_times.seconds.median for each in all_of)
        for name, all_of in found.items()
    }
    rates = {
        name: median(each.step_times.samples_per_second for each in all_of)
        for name, all_of in found.items()
    }
    flops = {
        name: median(each.utilization.flops_per_second for each in all_of)
        for name, all_of in found.items()
    }
    for name, all_of in found.items():
        root = all_of[0].profile.modules[""]
        columns = [
            f"{root.forward.macs + root.backward.macs:,}",
            f"{steps[name] * 1e3:.2f} ms",
            f"{median(ratios[name]):+.2%}",
        ]
        columns += [
            f"{each[name] / mean(each.values()) - 1:+.1%}" for each in (steps, rates, flops)
        ]
        phases = {
            phase: median(each.step_times.phases[phase].median for each in all_of)
            for phase in all_of[0].step_times.phases
        }
        columns += [f"{phases[phase] * 1e3:.2f}" if phase in phases else "–" for phase in PHASES]
        yield f"| {name} | {' | '.join(columns)} |"


def main() -> None:
    """Measure all loops, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        f"One model, batch and optimizer, one thread; medians of {asked.rounds} rounds of all loops in turn.",
        f"Width {WIDE.width}, {WIDE.rows} rows; further percentages are differences from the mean of the five loops, phases are in ms:",
        "",
        f"| loop | MACs, forward and backward | step | off the time between forwards | step | samples/s | MFU | {PHASE_COLUMNS} |",
        f"|---|{'--:|' * (6 + len(PHASES))}",
        *agreement(asked.rounds),
    ]
    record("drivers.py", "Five loops around one training run", [*lines, "", "Not run on CUDA."])


if __name__ == "__main__":
    main()

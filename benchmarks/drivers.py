"""The same training in five loops: what each is said to take, and what watching its clean steps costs.

One model, one batch and one optimizer, in Lightning, in a loop of one's own, in a Trainer of transformers, with Accelerate and with Fabric.
Counts have to be equal. Times differ by what the loops themselves do between batches.
"""

import argparse
import contextlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from results import record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lflops
from lflops import FlopsMonitor, Profile, Schedule
from lflops.analyze.analysis import analyze
from lflops.huggingface import FlopsCallback

WIDTH, CLASSES, ROWS = 512, 16, 64
Loop = Callable[[Schedule | None, int], Profile | None]


class Model(LightningModule):
    """A perceptron of four products, that Lightning and transformers can train as well."""

    def __init__(self) -> None:
        """Make the same weights each time."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)], nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        return {"loss": F.cross_entropy(self.layers(x), labels)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning gives it
        """As Lightning calls it."""
        return self(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same as everywhere."""
        return optimizer_of(self)


class Rows(Dataset[dict[str, Tensor]]):
    """Samples at random.

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        """Make them."""
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(number, WIDTH, generator=generator)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One of them."""
        return {"x": self._x[index], "labels": torch.tensor(index % CLASSES)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, as transformers would make it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def in_lightning(schedule: Schedule | None, steps: int) -> Profile | None:
    """With the callback."""
    monitor = None if schedule is None else FlopsMonitor(schedule, trace=False, html=False, on_error="raise")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            default_root_dir=folder,
            callbacks=[] if monitor is None else [monitor],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Model(), DataLoader(Rows(steps * ROWS), batch_size=ROWS))
    return None if monitor is None else monitor.profiles[-1]


def in_transformers(schedule: Schedule | None, steps: int) -> Profile | None:
    """With its callback."""
    callback = None if schedule is None else FlopsCallback(schedule=schedule, trace=False, html=False, on_error="raise", log=lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            max_steps=steps,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10_000,
            disable_tqdm=True,
            remove_unused_columns=False,
            max_grad_norm=0,
        )
        model = Model()
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Rows(steps * ROWS),
            callbacks=[] if callback is None else [callback],
            optimizers=(optimizer_of(model), None),  # type: ignore[arg-type, unused-ignore]
        )
        with open("/dev/null", "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):  # noqa: PTH123
            trainer.train()
    return None if callback is None else callback.profiles[-1]


def _loop(make: Callable[[], tuple[Any, Any, Any]]) -> Loop:
    def run(schedule: Schedule | None, steps: int) -> Profile | None:
        engine, model, optimizer = make()
        loader = DataLoader(Rows(steps * ROWS), batch_size=ROWS)

        def one(batch: dict[str, Tensor]) -> None:
            loss = model(**batch)["loss"]
            loss.backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        if schedule is None:
            for batch in loader:
                one(batch)
            return None
        settings = {"schedule": schedule, "trace": False, "html": False, "on_error": "raise", "log": lambda _: None}
        with lflops.monitor(model, optimizer, engine=engine, **settings) as monitor:
            for batch in monitor.data(loader):
                with monitor.step(batch):
                    one(batch)
        return monitor.profiles[-1]

    return run


def _plain() -> tuple[Any, Any, Any]:
    model = Model()
    return None, model, optimizer_of(model)


def _fabric() -> tuple[Any, Any, Any]:
    fabric, model = Fabric(accelerator="cpu", devices=1), Model()
    return (fabric, *fabric.setup(model, optimizer_of(model)))


def _accelerate() -> tuple[Any, Any, Any]:
    accelerator, model = Accelerator(cpu=True), Model()
    return (accelerator, *accelerator.prepare(model, optimizer_of(model)))


LOOPS: dict[str, Loop] = {
    "Lightning": in_lightning,
    "a loop of one's own": _loop(_plain),
    "transformers": in_transformers,
    "Accelerate": _loop(_accelerate),
    "Fabric": _loop(_fabric),
}


def rows(steps: int, rounds: int) -> Iterator[str]:
    """A line of the table for each loop."""
    profiled = Schedule(wait=steps // 2, warmup=1, active=3, repeat=1)
    idle = Schedule(wait=100_000)
    for name, run in LOOPS.items():
        profile = run(profiled, steps)
        if profile is None:
            raise AssertionError(name)
        found = analyze(profile)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * rounds):
            watched = bool(number % 2)
            start = time.perf_counter()
            run(idle if watched else None, steps)
            seconds[watched].append((time.perf_counter() - start) / steps)
        cost = median(after - before for before, after in zip(seconds[False], seconds[True], strict=True))
        root, times = profile.modules[""], found.step_times
        phases = {key: spread.median * 1e3 for key, spread in times.phases.items()}
        step = None if times.seconds is None else times.seconds.median * 1e3
        known = " | ".join(f"{phases[key]:.2f}" if key in phases else "–" for key in ("data", "forward", "backward", "optimizer", "other"))
        yield f"| {name} | {root.forward.macs + root.backward.macs:,} | {step:.2f} | {known} | {cost * 1e6:+.0f} µs |"


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        f"{asked.steps} steps of the same model, batch and optimizer, one thread. Times in ms: medians of the clean steps of one window.",
        f"Last column: a training with the monitor waiting, less one without it, over {asked.rounds} pairs, for each step.",
        "",
        "| loop | MACs, forward and backward | step | data | forward | backward | optimizer | other | a clean step's cost |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *rows(asked.steps, asked.rounds),
    ]
    record("drivers.py", "Five loops around one training", [*lines, "", "Not run on CUDA."])


if __name__ == "__main__":
    main()

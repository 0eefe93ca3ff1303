"""Raise KeyboardInterrupt at every line of lflops that runs during training.

After each interrupt, nothing of lflops may remain, and the same exception must reach the user.

python benchmarks/interrupts.py [--only plain|lightning|ranks] [--every N [--from I]] [--minutes M]

For several ranks, only lines are tested that the other two modes do not run, because each test
needs a separate process. `--every` and `--from` select a part of the lines: `--every 40 --from 0`,
`--every 40 --from 1` and so on select different lines, which are spread over the whole package.
"""

import argparse
import contextlib
import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import lflops
from lflops.trace import annotate_in_background
from tests.support.interrupts import NOT_REACHED, Outcome, interrupt_each, lines_in_a_child, look
from tests.support.process_state import Facts

SCHEDULE = lflops.Schedule(wait=2, warmup=1, active=1, repeat=1)
STEPS = 9
EXPECTED = {
    "plain": {"KeyboardInterrupt"},
    "lightning": {"SystemExit", "KeyboardInterrupt"},
    "ranks": {"KeyboardInterrupt"},
}
"""The exceptions that may reach the user. Lightning turns an interrupt into an exit."""

watched: dict[str, Any] = {}
"""The user's objects in the last training run."""


class Log:
    """A custom logger."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Ignore the metrics."""


def settings(folder: str) -> dict[str, Any]:
    """Return the settings of all monitors in this file."""
    return {
        "schedule": SCHEDULE,
        "dirpath": folder,
        "hardware": None,
        "module_scalars": 2,
        "html": False,
    }


def plain_without_trace() -> None:
    """Run a custom loop without a trace, which is faster."""
    plain(trace=False)


def plain(**more: Any) -> None:
    """Run a custom loop with a validation."""
    folder = tempfile.mkdtemp()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.update(model=model, optimizer=optimizer)
    try:
        with lflops.monitor(
            model,
            optimizer,
            logger=Log(),
            log_every=2,
            log=_say_nothing,
            steps=STEPS,
            **settings(folder),
            **more,
        ) as monitor:
            _train(monitor, model, optimizer)
            with monitor.stage("validate"), torch.no_grad():
                model(torch.ones(2, 4))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Module(lightning.LightningModule):
    """A module that logs and validates."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, _batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, _batch_idx: int) -> None:
        self.log("validation", self.model(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def in_lightning() -> None:
    """Run a Trainer with a logger."""
    folder = tempfile.mkdtemp()
    module = Module()
    from lightning.pytorch.loggers import CSVLogger

    try:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            logger=CSVLogger(folder),
            log_every_n_steps=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            val_check_interval=6,
            callbacks=[lflops.FlopsMonitor(**settings(folder), stages=("train", "validate"))],
        )
        watched.update(model=module, trainer=trainer)
        data = torch.utils.data.DataLoader(torch.ones(2 * STEPS, 4), batch_size=2)
        trainer.fit(module, data, torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def on_ranks() -> None:
    """Run rank 0 of two DDP ranks.

    Rank 1 is a child process, which is killed at the end.
    """
    folder, hook = tempfile.mkdtemp(), sys.excepthook
    other = os.fork()
    rank = int(other == 0)
    if rank:
        sys.settrace(None)
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched.update(model=model, optimizer=optimizer)
        options = settings(folder) | {"trace": False, "gather_timeout": 5.0}
        with lflops.monitor(model, optimizer, log=_say_nothing, steps=STEPS, **options) as monitor:
            _train(monitor, model, optimizer)
    finally:
        if rank:
            os._exit(0)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        distributed.destroy_process_group()
        # torch has replaced the hook when the process group was created.
        sys.excepthook = hook
        shutil.rmtree(folder, ignore_errors=True)


def _train(monitor: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in monitor.data([torch.ones(2, 4)] * STEPS):
        with monitor.step(batch):
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _say_nothing(_message: str) -> None:
    pass


def left_on_objects() -> Facts:
    """Return hooks and wrapped attributes of lflops that remain on the user's objects."""
    owners = [watched.get("model"), watched.get("optimizer")]
    trainer = watched.get("trainer")
    if trainer is not None:
        owners += [trainer, trainer.strategy, trainer.profiler, trainer.fit_loop.epoch_loop]
    watched.clear()
    facts: Facts = {}
    for owner in filter(None, owners):
        for name, value in vars(owner).items():
            if (
                "hooks" in name
                and isinstance(value, dict)
                and any("lflops" in repr(type(each)) + repr(each) for each in value.values())
            ):
                facts[f"{type(owner).__name__}.{name}"] = len(value)
            elif object.__getattribute__(value, "__class__") is not type(value):
                facts[f"{type(owner).__name__}.{name}"] = "wrapped"
    return facts


def look_at_all() -> Facts:
    """Return what remains in the process and on the user's objects."""
    return look() | left_on_objects()


TRAININGS: dict[str, Callable[[], None]] = {
    "plain": plain,
    "lightning": in_lightning,
    "ranks": on_ranks,
}


def main() -> int:
    """Interrupt all training runs."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only", choices=TRAININGS)
    asked.add_argument("--every", type=int, default=1, help="take one line of so many")
    asked.add_argument("--from", type=int, default=0, dest="first", help="and begin with this one")
    asked.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="end each training's lines after so long",
    )
    asked.add_argument(
        "--within", default="", help="only lines of files whose name has this, as session/"
    )
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        # The monitor imports this module, which registers a warnings filter.
        importlib.import_module("pytorch_lightning")
    for name in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
        "pytorch_lightning",
        "lflops",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    popen = subprocess.Popen
    annotate_in_background.subprocess.Popen = lambda *_, **given: popen(["true"], **given)  # type: ignore[misc]
    wrong = 0
    print(
        "| training | lines | interrupted | another exception came out | something was left | minutes |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, train in TRAININGS.items():
        if given.only not in {None, name}:
            continue
        begun = time.monotonic()
        # Rank 1 is forked, and a fork after a backward pass has lost torch's threads. So each
        # process runs the training only once.
        once = name == "ranks"
        warm, cold = (
            [each for each in lines if given.within in each[0]]
            for lines in lines_in_a_child(train, once=once)
        )
        if once:
            elsewhere = {
                line
                for other in TRAININGS
                if other != name
                for lines in lines_in_a_child(TRAININGS[other])
                for line in lines
            }
            cold = [each for each in cold if each not in elsewhere]
        outcomes: list[Outcome] = []
        for places in (warm, cold):
            chosen = places[given.first :: given.every]
            for outcome in interrupt_each(
                train, chosen, cold=places is cold, once=once, look_at=look_at_all
            ):
                outcomes.append(outcome)
                if time.monotonic() - begun > 60 * given.minutes:
                    break
                if outcome.left or outcome.came_out not in EXPECTED[name]:
                    print(f"  {outcome}", file=sys.stderr, flush=True)
        others = [each for each in outcomes if each.came_out not in EXPECTED[name] | {NOT_REACHED}]
        left = [each for each in outcomes if each.left]
        counts = Counter(each.came_out for each in outcomes)
        reached = len(outcomes) - counts[NOT_REACHED]
        print(
            f"| {name} | {len(warm) + len(cold)} | {reached} | {len(others)} | {len(left)} | {(time.monotonic() - begun) / 60:.1f} |",
            flush=True,
        )
        wrong += len(others) + len(left)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

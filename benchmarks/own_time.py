"""What the callback itself takes of a step, in CPU time.

Its hooks and its wrappers, without what they call.

The difference of two trainings says nothing below 100 µs. So in the middle of a real fit the calls
that Lightning makes in one step are made again and again with nothing inside of them, in turn with
the callback's hooks and wrappers and without them. Between any two of these the model makes a real
step, so that caches are as cold as in a training. With warm caches the same calls follow each other
at once.
"""

import argparse
import contextlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median, quantiles
from typing import Any

import torch
from callback import NEVER, THIN, Masked
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from results import record
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig

from lflops import FlopsMonitor, Schedule


class Strategy(SingleDeviceStrategy):
    """Lightning's, whose methods do nothing while `is_empty`, but for the closure of a step."""

    is_empty = False

    def batch_to_device(self, *given: Any, **named: Any) -> Any:
        """Move a batch."""
        return given[0] if self.is_empty else super().batch_to_device(*given, **named)

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Run forward."""
        return None if self.is_empty else super().training_step(*given, **named)

    def backward(self, *given: Any, **named: Any) -> Any:
        """Run backward."""
        return None if self.is_empty else super().backward(*given, **named)

    def optimizer_step(self, *given: Any, **named: Any) -> Any:
        """Run the closure and the optimizer."""
        return given[1]() if self.is_empty else super().optimizer_step(*given, **named)


class Replay(Callback):
    """Replays the calls of a step. It stands after the monitor in the list of callbacks.

    Args:
        monitor: Whose time is measured.
        first: The step after which they are replayed.
        times: How often, with the monitor and without it.
    """

    def __init__(self, monitor: FlopsMonitor, first: int, times: int) -> None:
        """Measure nothing yet."""
        self.seconds: dict[tuple[bool, bool], list[float]] = {
            each: [] for each in product((True, False), repeat=2)
        }
        self._monitor = monitor
        self._first = first
        self._times = times

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, _: Any, batch: Any, batch_idx: int
    ) -> None:
        """Replay them all after that step."""
        if batch_idx != self._first:
            return
        (optimizer,) = trainer.optimizers
        for is_cold, _, is_watched in product((True, False), range(self._times), (False, True)):
            if is_cold:
                optimizer.zero_grad()
                pl_module.training_step(batch, 0).backward()
                optimizer.step()
            with (
                contextlib.nullcontext()
                if is_watched
                else without_wrappers(trainer.strategy, trainer.profiler)
            ):
                Strategy.is_empty = True
                start = time.thread_time()
                self._step(trainer, pl_module, optimizer, batch, batch_idx, is_watched=is_watched)
                self.seconds[is_cold, is_watched].append(time.thread_time() - start)
                Strategy.is_empty = False

    def _step(
        self,
        trainer: Any,
        pl_module: Any,
        optimizer: Any,
        batch: Any,
        batch_idx: int,
        *,
        is_watched: bool,
    ) -> None:
        """Make the calls of one step, as Lightning makes them in automatic optimization."""
        strategy, profiler, monitor = trainer.strategy, trainer.profiler, self._monitor

        def closure() -> None:
            with profiler.profile("[Strategy]Strategy.training_step"):
                strategy.training_step(batch, batch_idx)
            for action in CLOSURE:
                with profiler.profile(action):
                    pass
            with profiler.profile("[Strategy]Strategy.backward"):
                strategy.backward(None, None)

        with profiler.profile("[_TrainingEpochLoop].train_dataloader_next"):
            pass
        with profiler.profile("[Strategy]Strategy.batch_to_device"):
            strategy.batch_to_device(batch)
        for action in BEFORE:
            with profiler.profile(action):
                pass
        if is_watched:
            monitor.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        with profiler.profile("[LightningModule]Masked.optimizer_step"):
            strategy.optimizer_step(optimizer, closure)
        for action in AFTER:
            with profiler.profile(action):
                pass
        if is_watched:
            monitor.on_train_batch_end(trainer, pl_module, None, batch, batch_idx)


@contextlib.contextmanager
def without_wrappers(*owners: Any) -> Iterator[None]:
    """Take off what the monitor has put on these objects, and put it back."""
    taken = [
        {name: value for name, value in vars(owner).items() if isinstance(value, partial)}
        for owner in owners
    ]
    for owner, attributes in zip(owners, taken, strict=True):
        for name in attributes:
            delattr(owner, name)
    try:
        yield
    finally:
        for owner, attributes in zip(owners, taken, strict=True):
            for name, value in attributes.items():
                setattr(owner, name, value)


BEFORE = (
    "[LightningModule]Masked.on_before_batch_transfer",
    "[LightningModule]Masked.transfer_batch_to_device",
    "[LightningModule]Masked.on_after_batch_transfer",
    "[Callback]FlopsMonitor.on_train_batch_start",
    "[LightningModule]Masked.on_train_batch_start",
    "run_training_batch",
)
CLOSURE = (
    "[Callback]FlopsMonitor.on_before_zero_grad",
    "[LightningModule]Masked.on_before_zero_grad",
    "[LightningModule]Masked.optimizer_zero_grad",
    "[Callback]FlopsMonitor.on_before_backward",
    "[LightningModule]Masked.on_before_backward",
)
AFTER = (
    "[Callback]FlopsMonitor.on_after_backward",
    "[LightningModule]Masked.on_after_backward",
    "[Callback]FlopsMonitor.on_before_optimizer_step",
    "[LightningModule]Masked.on_before_optimizer_step",
    "[LightningModule]Masked.configure_gradient_clipping",
    "[Callback]FlopsMonitor.on_train_batch_end",
    "[LightningModule]Masked.on_train_batch_end",
)
"""Actions that Lightning tells its profiler of in a step, before, within and after the optimizer's closure."""


class Batches(IterableDataset[torch.Tensor]):
    """Batches of unknown number, so that no schedule is fitted to the run.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        """Make none yet."""
        self.number = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Make them at random."""
        return (torch.randint(1000, (1, 16)) for _ in range(self.number))


def replayed(monitor: FlopsMonitor, first: int, times: int) -> dict[tuple[bool, bool], list[float]]:
    """CPU seconds of the calls of one step, again and again, by whether caches are cold and whether the monitor is on."""
    torch.manual_seed(0)
    batches = Batches(first + 2)
    replay = Replay(monitor, first, times)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            max_epochs=1,
            callbacks=[monitor, replay],
            strategy=Strategy("cpu"),
            logger=CSVLogger(directory),
            log_every_n_steps=NEVER,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Masked(BertConfig(**THIN)), DataLoader(batches, batch_size=None))
    return replay.seconds


def main() -> None:
    """Measure clean steps, and steps after the last window."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=500)
    asked = parser.parse_args()
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun = Schedule(wait=2, warmup=1, active=1)
    cases: dict[str, Callable[[], FlopsMonitor]] = {
        "clean steps": lambda: FlopsMonitor(Schedule(wait=NEVER), ledger=False),
        "after the last window": lambda: FlopsMonitor(begun, trace=False, ledger=False),
        "the same with track=False": lambda: FlopsMonitor(
            begun, trace=False, track=False, ledger=False
        ),
        "clean steps, with the ledger": lambda: FlopsMonitor(Schedule(wait=NEVER)),
    }
    lines = [
        "BERT of 1 layer, hidden 48, batch 1, length 16, one thread: a step of about 3 ms. CPU time of the calls that Lightning makes in a",
        f"step, with nothing inside of them, {asked.times} times with the callback and without it, in turn. Wanted: 15 µs at most,",
        "and 100 µs with the ledger, of which its thread takes a part that is not in here (`ledger.py`).",
        "",
        "| steps | caches | without | with | the callback's own: median of the differences | quartiles |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, monitor in cases.items():
        seconds = replayed(monitor(), 40, asked.times)
        for is_cold, caches in ((True, "warmup"), (False, "warm")):
            without, watched = seconds[is_cold, False], seconds[is_cold, True]
            low, middle, high = quantiles(
                [1e6 * (after - before) for before, after in zip(without, watched, strict=True)],
                n=4,
            )
            both = f"{median(without) * 1e6:.1f} µs | {median(watched) * 1e6:.1f} µs"
            lines.append(
                f"| {name} | {caches} | {both} | {middle:.1f} µs | {low:.1f} to {high:.1f} µs |"
            )
    record("own_time.py", "The callback's own time in a step", [*lines, "", "Not run on CUDA."])


if __name__ == "__main__":
    main()

"""Measure the cost of watching a training run.

Compares the steps of a Trainer with `FlopsMonitor`, without it, and with other tools. Fits
alternate in one process, so that slow moments of the machine affect all of them equally.
"""

import argparse
import contextlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from results import record
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.monitoring.schedule import Schedule

THIN = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
NEVER = 10**9


class Masked(LightningModule):
    """A BERT model that is trained to predict its inputs."""

    def __init__(self, config: BertConfig) -> None:
        """Build the model."""
        super().__init__()
        self.bert = BertForMaskedLM(config)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.bert(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create AdamW."""
        return torch.optim.AdamW(self.parameters())


class Stopwatch(Callback):
    """A callback that records the end of each batch."""

    def __init__(self) -> None:
        """Create an empty list of times."""
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Read the clock."""
        self.times.append(time.perf_counter())

    def steps(self) -> list[float]:
        """Return the seconds between the ends of consecutive batches."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class DeepSpeeds(Callback):
    """A callback that runs DeepSpeed's profiler for one batch."""

    def __init__(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = batch

    def on_train_batch_start(self, *given: Any) -> None:
        """Start the profiler."""
        _, pl_module, _, batch_idx = given
        if batch_idx == self.batch:
            from deepspeed.profiling.flops_profiler import FlopsProfiler

            self.profiler = FlopsProfiler(pl_module)
            self.profiler.start_profile()

    def on_train_batch_end(self, *given: Any) -> None:
        """Stop the profiler."""
        batch_idx = given[-1]
        if batch_idx == self.batch:
            self.profiler.stop_profile()
            self.profiler.print_model_profile(profile_step=batch_idx, output_file="/dev/null")
            self.profiler.end_profile()


def fit(
    config: BertConfig,
    shape: tuple[int, int],
    callback: Callback | None,
    steps: int,
    profiler: Any = None,
) -> list[float]:
    """Train for some steps, and return the seconds of each step except the first."""
    torch.manual_seed(0)
    watch = Stopwatch()
    batches = [torch.randint(config.vocab_size, shape) for _ in range(8)]
    data: Any = DataLoader([batches[each % 8] for each in range(steps)], batch_size=None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            max_epochs=1,
            callbacks=[*([callback] if callback else []), watch],
            profiler=profiler,
            logger=CSVLogger(directory),
            log_every_n_steps=50,
            accelerator="cpu",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module = Masked(config)
        # ThroughputMonitor reads this attribute.
        module.flops_per_batch = 1
        trainer.fit(module, data)
    return watch.steps()


def compare(
    config: BertConfig, shape: tuple[int, int], steps: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure all ways to watch a training run.

    Returns:
        The seconds of all steps, by the way to watch; and the seconds of single, slower steps,
        by the kind of the step.
    """
    begun = Schedule(wait=2, warmup=1, active=1)
    # By this step, the report of the window is finished.
    behind = 14
    ways: dict[str, tuple[Callable[[], Callback | None], int]] = {
        "nothing": (lambda: None, behind),
        "FlopsMonitor, clean steps": (lambda: FlopsMonitor(Schedule(wait=NEVER)), behind),
        "FlopsMonitor, after the last window": (lambda: FlopsMonitor(begun, trace=False), behind),
        "the same with track=False": (
            lambda: FlopsMonitor(begun, trace=False, track=False),
            behind,
        ),
        "ThroughputMonitor": (lambda: ThroughputMonitor(batch_size_fn=len, window_size=10), behind),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    single: dict[str, list[float]] = {
        "FlopsMonitor, the counted step": [],
        "FlopsMonitor, the end of a window": [],
    }
    with contextlib.suppress(ImportError):
        import deepspeed.profiling.flops_profiler  # noqa: F401 - only checks that it is installed

        single["DeepSpeed's profiler, the profiled step"] = []
    for _ in range(rounds):
        for name, (callback, first) in ways.items():
            found[name] += fit(config, shape, callback(), steps)[first:]
        for name, seconds in active(config, shape, steps // 6).items():
            (single if name.startswith("the end") else found).setdefault(name, []).extend(seconds)
        taken = fit(config, shape, FlopsMonitor(begun, trace=False), 2 * behind)
        usual = median(taken[behind:])
        # The first value is the second step, because `fit` leaves out the first step.
        single["FlopsMonitor, the counted step"].append(taken[1])
        # The stopwatch runs after the monitor, so the step of the seventh batch includes the
        # monitor's work at the end of that batch.
        single["FlopsMonitor, the end of a window"].append(max(taken[3:behind]) - usual)
        if "DeepSpeed's profiler, the profiled step" in single:
            single["DeepSpeed's profiler, the profiled step"].append(
                fit(config, shape, DeepSpeeds(5), behind)[4]
            )
    return found, single


def active(config: BertConfig, shape: tuple[int, int], steps: int) -> dict[str, list[float]]:
    """Measure active steps, in which a tool records.

    Returns:
        The seconds of each step, by the tool. For tools that trace, also the extra seconds of
        the end, at which the trace is written.
    """
    whole = Schedule(wait=2, warmup=1, active=steps)
    # `fit` leaves out the first step.
    first = 2
    with tempfile.TemporaryDirectory() as directory:
        own = torch.profiler.schedule(wait=2, warmup=1, active=steps, repeat=1)
        lightnings = PyTorchProfiler(
            directory, "trace", schedule=own, activities=[torch.profiler.ProfilerActivity.CPU]
        )
        ways = {
            "FlopsMonitor, hooked steps": fit(
                config, shape, FlopsMonitor(whole, trace=False), steps + 6
            ),
            "FlopsMonitor, traced steps": fit(config, shape, FlopsMonitor(whole), 2 * steps + 6),
            "Lightning's PyTorchProfiler, traced steps": fit(
                config, shape, None, steps + 6, lightnings
            ),
        }
    found = {name: seconds[first : first + steps - 2] for name, seconds in ways.items()}
    for name, seconds in ways.items():
        if "traced" in name:
            ends = seconds[first + steps - 2 : first + steps + 1]
            found[f"the end of {steps} traced steps, {name.partition(',')[0]}"] = [
                max(ends) - median(seconds[first : first + steps - 2])
            ]
    return found


CASES: dict[str, tuple[str, BertConfig, tuple[int, int], int]] = {
    "launch-bound": (
        "BERT of 1 layer, hidden 48, batch 1, length 16, one thread",
        BertConfig(**THIN),
        (1, 16),
        300,
    ),
    "base": ("BERT-base, batch 2, length 64", BertConfig(), (2, 64), 30),
}


def main() -> None:
    """Measure two models, and write a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--case", choices=CASES, action="append")
    asked = parser.parse_args()
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    for case in asked.case or CASES:
        title, config, shape, steps = CASES[case]
        rounds = asked.rounds if case == "launch-bound" else max(asked.rounds // 2, 3)
        torch.set_num_threads(1 if case == "launch-bound" else threads)
        found, single = compare(config, shape, steps, rounds)
        usual = {name: quantiles(seconds, n=4)[0] for name, seconds in found.items()}
        lines = [
            f"{title}.",
            "",
            "| watched by | a step | more than nothing | ratio |",
            "|---|--:|--:|--:|",
        ]
        for name, seconds in usual.items():
            more, ratio = seconds - usual["nothing"], seconds / usual["nothing"]
            lines.append(f"| {name} | {seconds * 1e3:.3f} ms | {more * 1e6:.0f} µs | {ratio:.3f} |")
        lines += ["", "| single steps | seconds |", "|---|--:|"]
        lines += [f"| {name} | {median(seconds):.3f} |" for name, seconds in single.items()]
        lines += [
            "",
            f"Lower quartiles of all steps, medians of single ones, of {rounds} rounds, all kinds of fit in turn. Not run on CUDA.",
        ]
        record(f"callback.py --case {case}", f"What watching a training costs: {case}", lines)


if __name__ == "__main__":
    main()

"""A `SummaryWriter` of torch, or a run of Weights & Biases, as a logger: for loops that have no logger of their framework."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lflops.collect.inputs.arguments import describe
from lflops.errors import CountError


class WriterLogger:
    """Logs to a `SummaryWriter`, which stays its owner's to close."""

    def __init__(self, writer: Any) -> None:
        self.experiment = writer
        self.log_dir: str = writer.log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)


class RunLogger:
    """Logs to a run of Weights & Biases, which stays its owner's to finish.

    The run counts its own steps, so each point holds the training's step as `lflops_step`, and our curves are drawn over that.
    """

    def __init__(self, run: Any) -> None:
        self.experiment = run
        self.log_dir = str(Path(run.dir).parent)  # what is in `dir` itself is uploaded, and the artifacts have it already
        run.define_metric("lflops_step", hidden=True)
        for name in ("lflops/*", "lflops_modules/*"):
            run.define_metric(name, step_metric="lflops_step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a point of each curve."""
        self.experiment.log({**metrics, "lflops_step": step})


def loggers_of(given: Any) -> list[Any]:
    """Loggers unchanged, or loggers around the given writers: one, several in a list, or none; a `CountError` for anything else."""
    return [_logger_of(each) for each in (given if isinstance(given, list | tuple) else [] if given is None else [given])]


def _logger_of(given: Any) -> Any:
    if callable(getattr(given, "log_metrics", None)):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return WriterLogger(given)
    if callable(getattr(given, "define_metric", None)) and callable(getattr(given, "log", None)):
        return RunLogger(given)
    raise CountError(f"logger={describe(given)}: give a SummaryWriter, a run of wandb, or an object with log_metrics(values, step=...)")

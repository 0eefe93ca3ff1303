"""A `SummaryWriter` of torch as a logger, for loops that have no other."""

from collections.abc import Mapping
from typing import Any

from lflops.collect.inputs.arguments import describe
from lflops.errors import CountError

__all__ = ["WriterLogger", "loggers_of"]


class WriterLogger:
    """Logs to a `SummaryWriter`, which stays its owner's to close.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, writer: Any) -> None:
        """Write nothing yet."""
        self.experiment = writer
        self.log_dir: str = writer.log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)


def loggers_of(given: Any) -> list[Any]:
    """Loggers unchanged, or loggers around the writers that were given: one, several in a list, or none.

    Raises:
        CountError: One of them can do neither.
    """
    return [_logger_of(each) for each in (given if isinstance(given, list | tuple) else [] if given is None else [given])]


def _logger_of(given: Any) -> Any:
    if callable(getattr(given, "log_metrics", None)):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return WriterLogger(given)
    raise CountError(f"logger={describe(given)}: give a SummaryWriter, or an object with log_metrics(values, step=...)")

"""Provide `LightningProfiler`, which monitors a run as `Trainer(profiler=LightningProfiler())`."""

from typing import Any

from lflops.integrations.lightning.monitor import FlopsMonitor, InjectedMonitor
from lflops.integrations.lightning.training import ProfilerBase


class LightningProfiler(ProfilerBase):
    """Adds a `FlopsMonitor` to a Trainer. Pass it as the argument `profiler` of the Trainer.

    The monitor reports to the log, to the loggers and to files. If the Trainer already has a
    `FlopsMonitor` among its callbacks, no other monitor is added.

    Args:
        settings: The arguments of `FlopsMonitor`, such as `schedule`, `trace` or `dirpath`.

    Raises:
        CountError: A setting is unknown or wrong.

    Attributes:
        monitor: The monitor, which has the profiles and the ledger of the run.

    Example::

        trainer = Trainer(profiler=LightningProfiler())
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.monitor = FlopsMonitor(**settings)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Add the monitor before the Trainer sets up its callbacks."""
        super().setup(stage, local_rank, log_dir)
        # The Trainer has set this attribute on its profiler.
        trainer = vars(self)["_lightning_module"].trainer
        monitors = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]
        # A monitor that `LFLOPS=1` adds removes itself if there is another monitor.
        if all(isinstance(each, InjectedMonitor) for each in monitors):
            # Lightning requires callbacks that save checkpoints to be last.
            trainer.callbacks.insert(0, self.monitor)

    def start(self, action_name: str) -> None:
        """Do nothing, because the monitor itself detects the phases of the Trainer."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def summary(self) -> str:
        """Return an empty text, because the monitor logs its report when a window closes."""
        return ""

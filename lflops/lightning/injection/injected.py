"""The monitor of a script that says nothing of one."""

from typing import Any

from lflops.errors import LflopsError
from lflops.lightning.monitor import FlopsMonitor
from lflops.lightning.training import MisconfigurationException
from lflops.session.inputs.settings import settings_of


class InjectedMonitor(FlopsMonitor):
    """A monitor that was asked for from outside, with settings as `"wait=2,active=5"`; unknown ones are a `MisconfigurationException`.

    If the script already has a `FlopsMonitor`, this one does nothing. Without a logger and without `dirpath` it writes no file.
    """

    _writes_without_logger = False

    def __init__(self, asked: str) -> None:
        try:
            super().__init__(**settings_of(asked))
        except LflopsError as error:
            raise MisconfigurationException(f"LFLOPS={asked!r}: {error}") from error

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave, if there is another: what a model adds is known by now, and a list that served an earlier Trainer has its monitor."""
        monitors = [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]
        staying = next((each for each in monitors if not isinstance(each, InjectedMonitor)), monitors[0])
        if staying is self:
            super().setup(trainer, pl_module, stage)
        else:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]

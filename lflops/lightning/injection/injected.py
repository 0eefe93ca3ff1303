"""The monitor of a script that says nothing of one."""

from typing import Any

from lflops.errors import LflopsError
from lflops.lightning.injection.parse_env import arguments_of
from lflops.lightning.monitor import FlopsMonitor
from lflops.lightning.trainer.compat import MisconfigurationException

__all__ = ["InjectedMonitor"]


class InjectedMonitor(FlopsMonitor):
    """A monitor that was asked for from outside. If the script already has a `FlopsMonitor`, this one does nothing.

    Without a logger and without `dirpath` it writes no file.

    Args:
        asked: Settings, as in `"wait=2,active=5"`.

    Raises:
        MisconfigurationException: One of them is not known, or cannot be.
    """

    _writes_without_logger = False

    def __init__(self, asked: str) -> None:
        try:
            super().__init__(**arguments_of(asked, FlopsMonitor.__init__))
            self._settings.check()
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

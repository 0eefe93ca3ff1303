"""Lightning under either of its names, `lightning` and `pytorch_lightning`: what a callback takes from it works in both."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lflops.errors import MissingPackageError

__all__ = ["Base", "MisconfigurationException", "say"]

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def _packages() -> list[ModuleType]:
    """Those that are installed. Loading one makes it the one in whose name the other logs; one that was loaded before stays so."""
    users = [sys.modules[name] for name in _NAMES if name in sys.modules]
    logs = [_rank_zero(package).rank_zero_module.log for package in users]
    found = []
    for name in _NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise
    if not found:
        raise MissingPackageError("FlopsMonitor needs lightning or pytorch-lightning, and neither is installed: pip install lightning")
    for log in logs[-1:]:
        _rank_zero(found[0]).rank_zero_module.log = log
    return found


def _rank_zero(package: ModuleType) -> Any:
    return importlib.import_module(f"{package.__name__}.utilities.rank_zero")


_FOUND = _packages()

if TYPE_CHECKING:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback as Base
else:
    Base = type("Base", tuple(each.Callback for each in reversed(_FOUND)), {})
    MisconfigurationException = type(
        "MisconfigurationException",
        tuple(importlib.import_module(f"{each.__name__}.utilities.exceptions").MisconfigurationException for each in reversed(_FOUND)),
        {"__module__": __name__},
    )


def say(message: str) -> None:
    """Log a message of the main process's, as Lightning logs its own."""
    _rank_zero(_FOUND[0]).rank_zero_info(message)

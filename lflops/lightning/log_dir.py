"""The folder of a Trainer's run."""

import secrets
import time
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from lflops.lightning.compat import say

__all__ = ["log_dir_of"]

RUNS = "lflops_runs"
"""Below the Trainer's directory: a folder for each Trainer that has no logger."""

_RUN_FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_NAMED: WeakSet[Any] = WeakSet()
"""Trainers whose folder was logged."""


def log_dir_of(trainer: Any, *, without_logger: bool) -> str | None:
    """The folder that a run's files go below; `None` for no files. To be called by all ranks: they agree on the main process's."""
    if trainer.fast_dev_run or getattr(trainer, "barebones", False):
        return None
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is not None and isinstance(getattr(logger, "log_dir", None), str | PathLike):
        folder = trainer.log_dir  # of a logger that Lightning does not know that is where it saves, or nothing
        return None if folder is None else _local(trainer, str(folder))
    if logger is None and not without_logger:
        return None
    # A logger without a folder for the run has one for all its runs. In that of MLflow each folder is an experiment.
    above = trainer.default_root_dir if logger is None or type(logger).__name__ == "MLFlowLogger" else getattr(logger, "save_dir", None)
    if not isinstance(above, str | PathLike) or _local(trainer, str(above)) is None:
        return None
    if trainer not in _RUN_FOLDERS:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        _RUN_FOLDERS[trainer] = folder = trainer.strategy.broadcast(str(Path(above, RUNS, name).absolute()))
    if logger is None and trainer not in _NAMED:
        _NAMED.add(trainer)
        folder = _RUN_FOLDERS[trainer]
        say(f"lflops: the Trainer has no logger, so the files of this run go to {folder}; FlopsMonitor(dirpath=...) chooses another folder")
    return _RUN_FOLDERS[trainer]


def _local(trainer: Any, folder: str) -> str | None:
    """The folder, unless it is the address of a remote one: files are written to this machine alone."""
    if "://" not in folder:
        return folder
    if trainer not in _NAMED:
        _NAMED.add(trainer)
        say(f"lflops: the run is logged to {folder}, so lflops writes no files; FlopsMonitor(dirpath=...) chooses a folder of this machine")
    return None

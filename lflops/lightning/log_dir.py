"""The folder of a Trainer's run."""

import secrets
import time
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lflops.lightning.compat import say

__all__ = ["log_dir_of"]

RUNS = "lflops_runs"
"""Below the Trainer's directory: a folder for each Trainer that has no logger."""

_RUN_FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def log_dir_of(trainer: Any, *, without_logger: bool) -> str | None:
    """The folder that a run's files go below; `None` for no files. To be called by all ranks: they agree on the main process's.

    Args:
        trainer: Whose run it is.
        without_logger: Whether a Trainer that has no logger has files too. They are in a new folder, which one line in the log names.
    """
    if trainer.fast_dev_run or getattr(trainer, "barebones", False):
        return None
    if trainer.loggers:
        directory = trainer.log_dir
        return str(directory) if isinstance(directory, str | PathLike) else None
    if not without_logger:
        return None
    if trainer not in _RUN_FOLDERS:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        _RUN_FOLDERS[trainer] = folder = trainer.strategy.broadcast(str(Path(trainer.default_root_dir, RUNS, name).absolute()))
        say(f"lflops: the Trainer has no logger, so the files of this run go to {folder}; FlopsMonitor(dirpath=...) chooses another folder")
    return _RUN_FOLDERS[trainer]

"""Where the files of a monitor go."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from weakref import WeakKeyDictionary

from lflops.lightning.trainer.compat import say
from lflops.profile.model import Run

__all__ = ["OutputPaths", "log_dir_of", "open_text"]

RUNS = "lflops_runs"
"""Below the Trainer's directory: a folder for each Trainer that has no logger."""

_RUN_FOLDERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_WRITTEN: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()
"""The texts that a Trainer's run has begun."""


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


@contextlib.contextmanager
def open_text(path: Path, trainer: Any) -> Iterator[TextIO]:
    """A file to write text to, with the folders above it. What the same Trainer wrote there before is kept."""
    written = _WRITTEN.setdefault(trainer, set())
    resolved = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if resolved in written else "w", encoding="utf-8") as file:
        written.add(resolved)
        yield file


class OutputPaths(NamedTuple):
    """The folders of one monitor.

    Attributes:
        profiles: For profiles.
        traces: For traces; each window has a folder in it.
        monitor: Which of the Trainer's monitors it is, from 1; from the second on, names begin with it.
    """

    profiles: Path
    traces: Path
    monitor: int = 1

    @classmethod
    def of(cls, log_dir: str | None, dirpath: Path | None, monitor: int) -> "OutputPaths | None":
        """Below what was asked for, else below the Trainer's log directory; `None` where there is neither."""
        if dirpath is not None:
            return cls(dirpath, dirpath / "lflops_traces", monitor)
        return None if log_dir is None else cls(Path(log_dir) / "lflops", Path(log_dir) / "lflops_traces", monitor)

    def profile(self, run: Run) -> Path:
        """The file of a window."""
        return self.profiles / f"{self._window(run)}.profile.json"

    def of_rank(self, run: Run, rank: int) -> Path:
        """The file of what one rank alone knows of a window."""
        return self.profiles / f"{self._window(run)}.rank{rank}.json"

    def trace(self, run: Run, name: str) -> Path:
        """The file of one rank's trace of a window."""
        return self.traces / self._window(run) / name

    def _window(self, run: Run) -> str:
        return f"{'' if self.monitor == 1 else f'{self.monitor}-'}{run.stage}-{run.window}-{run.step}"

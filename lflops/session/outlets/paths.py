"""Where the files of a monitor go."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from weakref import WeakKeyDictionary

from lflops.profile.model import Run

__all__ = ["OutputPaths", "open_text"]

_WRITTEN: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()
"""The texts that a loop has begun."""


@contextlib.contextmanager
def open_text(path: Path, loop: object) -> Iterator[TextIO]:
    """A file to write text to, with the folders above it. What the same loop wrote there before is kept."""
    written = _WRITTEN.setdefault(loop, set())
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

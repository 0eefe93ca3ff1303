"""Where the files of a monitor go."""

import contextlib
import itertools
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from weakref import WeakKeyDictionary

from lflops.profile.profile import Run

# the texts that a loop has begun
_WRITTEN: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()

_CLAIMED: WeakKeyDictionary[Any, dict[Path, str]] = WeakKeyDictionary()
"""By loop: the folders that were claimed for it, and the part of each that it has."""

_MARKER = ".lflops-is-writing"
"""A file in a folder that a running loop has claimed.

It goes when the run ends, by when files of the run say whose folder it is.
"""

_FILES = ("*.profile.json", "*.rank*.json")


def claim(folder: Path, loop: object) -> str:
    """The part of a folder that one loop writes to.

    "" for all of it, "run-2" and so on where another loop has it, or had it.
    """
    # Nothing of another run is replaced, also where both run at once. The same loop has the same
    # part again.
    claimed = _CLAIMED.setdefault(loop, {})
    for number in itertools.count(1):
        if folder in claimed:
            break
        part = "" if number == 1 else f"run-{number}"
        try:
            Path(folder, part).mkdir(parents=True, exist_ok=True)
            if not any(next(Path(folder, part).glob(pattern), None) for pattern in _FILES):
                Path(folder, part, _MARKER).touch(exist_ok=False)
                claimed[folder] = part
        except FileExistsError:
            continue
        except OSError:
            # who writes the files says what is wrong with the folder
            return ""
    return claimed[folder]


def release(folder: Path, loop: object) -> None:
    """The run is over: take the marker out of its part of the folder, and the part if nothing was written to it."""
    part = _CLAIMED.get(loop, {}).get(folder)
    if part is not None:
        with contextlib.suppress(OSError):
            Path(folder, part, _MARKER).unlink(missing_ok=True)
            Path(folder, part).rmdir()


@contextlib.contextmanager
def open_text(path: Path, loop: object) -> Iterator[TextIO]:
    """A file to write text to, with the folders above it.

    What the same loop wrote there before is kept.
    """
    written = _WRITTEN.setdefault(loop, set())
    resolved = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if resolved in written else "w", encoding="utf-8") as file:
        written.add(resolved)
        yield file


class OutputPaths(NamedTuple):
    """The folders of one monitor."""

    # for profiles
    profiles: Path
    # for traces; each window has a folder in it
    traces: Path
    monitor: int = (
        # which of the Trainer's monitors it is, from 1; from the second on, names begin with it
        1
    )

    @classmethod
    def of(
        cls, log_dir: str | None, dirpath: str | PathLike[str] | None, monitor: int
    ) -> "OutputPaths | None":
        """Below what was asked for, else below the run's log directory.

        `None` where there is neither.
        """
        if dirpath is not None:
            return cls(Path(dirpath), Path(dirpath) / "lflops_traces", monitor)
        return (
            None
            if log_dir is None
            else cls(Path(log_dir) / "lflops", Path(log_dir) / "lflops_traces", monitor)
        )

    def within(self, part: str) -> "OutputPaths":
        """The same below a part of each folder."""
        return self._replace(profiles=self.profiles / part, traces=self.traces / part)

    def profile(self, run: Run) -> Path:
        return self.profiles / f"{self._window(run)}.profile.json"

    def of_rank(self, run: Run, rank: int) -> Path:
        """The file of what one rank alone knows of a window."""
        return self.profiles / f"{self._window(run)}.rank{rank}.json"

    def trace(self, run: Run, name: str) -> Path:
        return self.traces / self._window(run) / name

    def _window(self, run: Run) -> str:
        return (
            f"{'' if self.monitor == 1 else f'{self.monitor}-'}{run.stage}-{run.window}-{run.step}"
        )

"""Choose the paths of a monitor's files, and reserve a folder for each run."""

import contextlib
import itertools
import os
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lflops.files import (
    has_ended,
    open_for_append,
    owner_text,
    read,
    remove_leftovers,
    temporary_path,
    write_whole,
)
from lflops.profile.profile import Run

_WRITTEN: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()
"""The text files that each loop has written. More text of the same loop is appended to them."""

_CLAIMED: WeakKeyDictionary[Any, dict[Path, str]] = WeakKeyDictionary()
"""For each loop, the folders that it has claimed.

The value of a folder is the part that the loop uses: "" for the folder itself, or the name of a
subfolder (see `claim`).
"""

_MARKER = ".lflops-is-writing"
"""Name of the file that marks a folder as claimed by a running loop.

The file is removed when the run ends. From then on, the run's files show that the folder is in use.
The marker contains the id of the process, so that the marker of a killed run can be ignored.
"""

# If a folder has such files, it belongs to another run.
_FILES = ("*.profile.json", "*.rank*.json")


def claim(folder: Path, loop: object) -> str:
    """Reserve a folder, or a subfolder of it, for the files of one loop.

    No file of another run is replaced, even if both runs write at the same time. If the same loop
    claims the folder again, it gets the same result.

    Returns the reserved part of the folder: "" for the folder itself, or the name of a subfolder
    such as "run-2" if other loops use or have used the folder.
    """
    claimed = _CLAIMED.setdefault(loop, {})
    for number in itertools.count(1):
        if folder in claimed:
            break
        part = "" if number == 1 else f"run-{number}"
        path = folder / part
        try:
            path.mkdir(parents=True, exist_ok=True)
            _remove_stale_marker(path)
            if not _has_files(path):
                _mark(path)
                claimed[folder] = part
        except FileExistsError:
            continue
        except OSError:
            # the code that writes the files reports the problem
            return ""
    return claimed[folder]


def _mark(folder: Path) -> None:
    """Create the marker. Raises `FileExistsError` if another run has marked the folder."""
    with os.fdopen(open_for_append(folder / _MARKER, new=True), "ab") as file:
        file.write(owner_text())


def _remove_stale_marker(folder: Path) -> None:
    """Remove the marker of a run that was killed.

    The marker is renamed before it is removed. If two runs begin at the same time, only one of them
    succeeds in renaming it. If the slower run has renamed the new marker of the faster run, it
    notices this and renames the marker back.
    """
    marker = folder / _MARKER
    with contextlib.suppress(OSError):
        if not has_ended(read(marker)):
            return
        aside = temporary_path(folder, ".tmp")
        marker.rename(aside)
        if has_ended(read(aside)):
            aside.unlink()
        else:
            aside.rename(marker)


def _has_files(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _FILES)


def release(folder: Path, loop: object) -> None:
    """Remove the marker from the folder or subfolder that `claim` has reserved for a loop.

    If nothing is left in this folder or subfolder, it is removed too.
    """
    part = _CLAIMED.get(loop, {}).get(folder)
    if part is not None:
        path = folder / part
        with contextlib.suppress(OSError):
            (path / _MARKER).unlink(missing_ok=True)
            path.rmdir()


def append_text(path: Path, text: str, loop: object) -> None:
    """Append to a text file of one loop, and create the folders above it.

    A file that another loop has written is replaced.
    """
    written = _WRITTEN.setdefault(loop, set())
    absolute = path.absolute()
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if absolute not in written:
        write_whole(path, content)
        written.add(absolute)
        return
    with os.fdopen(open_for_append(path, new=False), "ab") as file:
        file.write(content)


class OutputPaths(NamedTuple):
    """The folders of one monitor.

    Attributes:
        profiles: The folder for profiles.
        traces: The folder for traces, with a subfolder for each window.
        monitor: The number of the monitor among the loop's monitors, from 1. File names begin with
            this number, unless it is 1.
    """

    profiles: Path
    traces: Path
    monitor: int = 1

    @classmethod
    def of(
        cls, log_dir: str | None, dirpath: str | PathLike[str] | None, monitor: int
    ) -> "OutputPaths | None":
        """Return the folders in `dirpath` if it is set, otherwise in the run's log directory.

        Returns `None` if neither is set.
        """
        if dirpath is not None:
            return cls(Path(dirpath), Path(dirpath) / "lflops_traces", monitor)
        if log_dir is not None:
            return cls(Path(log_dir) / "lflops", Path(log_dir) / "lflops_traces", monitor)
        return None

    def within(self, part: str) -> "OutputPaths":
        """Return the paths with `part` appended to both folders. `part` may be empty."""
        return self._replace(profiles=self.profiles / part, traces=self.traces / part)

    def remove_leftovers(self) -> None:
        """Remove what killed runs left in the folders: temporary files and markers of writers."""
        profiles = [self.profiles, *self.profiles.glob("run-*/")]
        for folder in profiles:
            _remove_stale_marker(folder)
        traces = [self.traces, *self.traces.glob("*/"), *self.traces.glob("run-*/*/")]
        for folder in (*profiles, *traces):
            remove_leftovers(folder)

    def profile(self, run: Run) -> Path:
        return self.profiles / f"{self._window(run)}.profile.json"

    def of_rank(self, run: Run, rank: int) -> Path:
        """Return the path of one rank's file for a window."""
        return self.profiles / f"{self._window(run)}.rank{rank}.json"

    def trace(self, run: Run, name: str) -> Path:
        return self.traces / self._window(run) / name

    def _window(self, run: Run) -> str:
        prefix = ""
        if self.monitor != 1:
            prefix = f"{self.monitor}-"
        return f"{prefix}{run.stage}-{run.window}-{run.step}"

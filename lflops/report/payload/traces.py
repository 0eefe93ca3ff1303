"""Where a profile's traces are, for the page."""

import os
from pathlib import Path

from msgspec import Struct

from lflops.profile.model import Profile

__all__ = ["TraceFile", "traces"]


class TraceFile(Struct, frozen=True, kw_only=True):
    """The trace of one rank."""

    rank: str
    file: str


def traces(profile: Profile, folder: Path | None) -> tuple[TraceFile, ...]:
    """One for each rank that traced, as it is reached from the folder; without one, as the profile names it."""
    files = {} if profile.trace is None else profile.trace.files
    return tuple(TraceFile(rank=rank, file=file if folder is None else _seen_from(folder, file)) for rank, file in files.items())


def _seen_from(folder: Path, file: str) -> str:
    try:
        return Path(os.path.relpath(file, folder)).as_posix()
    except ValueError:  # another drive of Windows'
        return file

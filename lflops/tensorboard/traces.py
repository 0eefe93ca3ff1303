"""Open a trace for the browser: only one that a payload names, and that is really below TensorBoard's log directory."""

import json
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

__all__ = ["Opened", "opened"]

_NAME = re.compile(r"[\w.-]+\.pt\.trace\.json(?:\.gz)?", re.ASCII)


class Opened(NamedTuple):
    """A file that is read, its name and its bytes."""

    file: BinaryIO
    name: str
    size: int


def opened(payload: bytes, index: str, run: Path, logdir: Path) -> Opened:
    """The trace, to be read and closed.

    Args:
        payload: It names its traces as they are reached from the run's folder.
        index: Which of them, counted from 0.
        run: The run's folder.
        logdir: TensorBoard's.

    Raises:
        LookupError: The payload names no such trace, or it does not exist.
        ValueError: It is no trace, or it is elsewhere, directly or through a link. The messages say so.
    """
    file = _named(payload, index)
    try:
        path = (run / file).resolve(strict=True)
        inside = path.is_relative_to(logdir.resolve())
    except (OSError, RuntimeError, ValueError):  # it is not there, or its links go round, or no path could be called so
        raise LookupError("the trace is not there, or not yet: it is written in the background") from None
    if not inside or not _NAME.fullmatch(path.name):
        raise ValueError("the trace does not lie below the log directory")
    try:
        # If the file is replaced meanwhile, a link is not followed and a pipe does not block.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise LookupError(f"the trace cannot be read: {error.strerror}") from None
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise ValueError("what the summary names is no file")
    return Opened(os.fdopen(number, "rb"), path.name, status.st_size)


def _named(payload: bytes, index: str) -> str:
    content = json.loads(payload)
    named = content.get("traces") if isinstance(content, dict) else None
    position = int(index) if index.isascii() and index.isdecimal() and len(index) < 6 else -1
    if not isinstance(named, list) or not 0 <= position < len(named):
        raise LookupError("the summary names no such trace")
    file = named[position].get("file") if isinstance(named[position], dict) else None
    if not isinstance(file, str) or not _NAME.fullmatch(file.rpartition("/")[2]):
        raise ValueError("what the summary names is no trace")
    return file

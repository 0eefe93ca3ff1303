"""Find free ports for groups of processes that the tests start."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST = 20_000
_NUMBER = 12_000
"""Ports from `_FIRST` on, below the range from which the system takes ports for connections.

So no connection of another test can take the port before it is used.
"""


def free_port() -> int:
    """Return a port that no process listens on.

    Other test processes of this user receive other ports, until all of them have been used once.
    """
    for _ in range(_NUMBER):
        port = _FIRST + _next() % _NUMBER
        with socket.socket() as tried:
            try:
                tried.bind(("0.0.0.0", port))  # noqa: S104 - a store of torch does this as well
            except OSError:
                continue
        return port
    raise AssertionError


def _next() -> int:
    """Increment a counter that all processes of this user share, and return it."""
    path = Path(tempfile.gettempdir(), f"lflops-test-ports-{os.getuid()}")
    with path.open("a+", encoding="utf-8") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        number = int(counter.read() or 61 * os.getpid()) + 1
        counter.truncate(0)
        counter.write(str(number))
    return number

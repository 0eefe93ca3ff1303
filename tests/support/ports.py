"""Find ports for groups of processes that the tests start."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _NUMBER = 20_000, 12_000
"""Below the ports that the system gives to any connection.

None of another test can come in between.
"""


def free_port() -> int:
    """One that nobody listens on, and that no other process of tests was given lately.

    It is free until somebody listens.
    """
    for _ in range(_NUMBER):
        port = _FIRST + _next() % _NUMBER
        with socket.socket() as tried:
            try:
                tried.bind(("0.0.0.0", port))  # noqa: S104 - as a store of torch listens
            except OSError:
                continue
        return port
    raise AssertionError


def _next() -> int:
    """A number that counts up over all processes of this user."""
    with Path(tempfile.gettempdir(), f"lflops-test-ports-{os.getuid()}").open(
        "a+", encoding="utf-8"
    ) as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        number = int(counter.read() or 61 * os.getpid()) + 1
        counter.truncate(0)
        counter.write(str(number))
    return number

"""Ports for groups of processes that the tests start."""

import itertools
import os
import socket

_FIRST, _NUMBER = 20_000, 12_000
"""Below the ports that the system gives to any connection: none of another test can come in between."""

_NEXT = itertools.count(61 * os.getpid())
"""Each process begins elsewhere, also where several suites run at once."""


def free_port() -> int:
    """One that nobody listens on."""
    for number in itertools.islice(_NEXT, _NUMBER):
        port = _FIRST + number % _NUMBER
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError

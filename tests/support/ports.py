"""Ports for groups of processes that the tests start."""

import itertools
import os
import socket

_NEXT = itertools.count(20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))
"""Each worker's own, below those that the system gives to whoever asks for any: another test's connection cannot come in between."""


def free_port() -> int:
    """One that nobody listens on."""
    for port in _NEXT:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError

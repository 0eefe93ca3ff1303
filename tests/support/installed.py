"""Context managers that install hooks."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from lflops.error_guard import CleanupStack

__all__ = ["installed"]


class Installs(Protocol):
    """A timer or a log of modules."""

    def install(self, undo: CleanupStack) -> None:
        """Install its hooks."""


@contextlib.contextmanager
def installed(listener: Installs) -> Iterator[None]:
    """Its hooks are on within."""
    with CleanupStack() as undo:
        listener.install(undo)
        yield

"""Install the hooks of a listener for the duration of a `with` block."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from lflops.error_guard import CleanupStack

__all__ = ["installed"]


class Installs(Protocol):
    """A listener with hooks, such as `ModuleTimer`."""

    def install(self, undo: CleanupStack) -> None:
        """Install the hooks, and register their removal."""


@contextlib.contextmanager
def installed(listener: Installs) -> Iterator[None]:
    """Install the hooks of a listener, and remove them at the end of the block."""
    with CleanupStack() as undo:
        listener.install(undo)
        yield

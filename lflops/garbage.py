"""Python's garbage collection, paused where many values are made that live on: it would look at all of them again and again."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["uncollected"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile."""
    with contextlib.ExitStack() as undo:
        if gc.isenabled():
            undo.callback(gc.enable)
            gc.disable()
        yield

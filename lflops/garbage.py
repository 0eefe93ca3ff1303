"""Pause Python's garbage collector while many values are created, and search live objects."""

import contextlib
import gc
import time
from collections.abc import Collection, Iterator
from typing import Any

LONGEST = 1.0
"""Maximum number of seconds of a search."""

CHUNK = 100_000
"""Objects that a search checks between two looks at the clock: about 2 ms."""


class SearchTimeout(Exception):  # noqa: N818 - the caller decides what it means
    """A search took too long."""


def alive(kinds: Collection[type]) -> Iterator[Any]:
    """Yield all live objects of exactly these classes.

    No function is called per object: `isinstance` would read the class of a proxy's object, and a
    profiler of Python calls would record a million calls.

    Raises:
        SearchTimeout: There are too many objects.
    """
    objects = gc.get_objects()
    deadline = time.monotonic() + LONGEST
    for start in range(0, len(objects), CHUNK):
        if time.monotonic() > deadline:
            raise SearchTimeout
        yield from [each for each in objects[start : start + CHUNK] if type(each) in kinds]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    # Pausing is inside `try`, so that an interrupt right after it leaves the collector enabled.
    try:
        gc.disable()
        yield
    finally:
        gc.enable()

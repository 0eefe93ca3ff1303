"""Python's garbage collector: pause it while many values are made, and search live objects."""

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

    Nothing is called for an object: `isinstance` would ask a proxy for the class of its object, and
    a profiler that records Python's stack would record a million calls.

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
    # Inside `try`, so that an interrupt after it leaves the collector enabled.
    try:
        gc.disable()
        yield
    finally:
        gc.enable()

"""Pause Python's garbage collector while many values are created, and find objects by class."""

import contextlib
import gc
import time
from collections.abc import Collection, Iterator
from typing import Any

LONGEST = 1.0
"""Maximum duration of a search for live objects, in seconds."""

CHUNK = 100_000
"""Number of objects that a search checks before it reads the clock again: about 2 ms of work."""


class SearchTimeout(Exception):  # noqa: N818 - the caller decides what it means
    """A search took longer than `LONGEST` seconds."""


def alive(kinds: Collection[type]) -> Iterator[Any]:
    """Yield all live objects that the garbage collector tracks and that have one of these classes.

    Instances of subclasses are left out. `isinstance` is not used, because it would also find
    proxies of such objects. No function is called for each object, because a Python profiler would
    then record a million calls.

    Raises:
        SearchTimeout: The search took longer than `LONGEST` seconds.
    """
    objects = gc.get_objects()
    deadline = time.monotonic() + LONGEST
    for start in range(0, len(objects), CHUNK):
        if time.monotonic() > deadline:
            raise SearchTimeout
        yield from [each for each in objects[start : start + CHUNK] if type(each) in kinds]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector during a block, unless it is already disabled."""
    if not gc.isenabled():
        yield
        return
    # `disable` is inside `try`, so that an interrupt right after it leaves the collector enabled.
    try:
        gc.disable()
        yield
    finally:
        gc.enable()

"""Python's garbage collector.

Paused where many values are made that live on, and asked for the objects of a class that are alive.
"""

import contextlib
import gc
import time
from collections.abc import Collection, Iterator
from typing import Any

LONGEST, CHUNK = 1.0, 100_000
"""Seconds that a search takes at most, and how many objects are looked at between two looks at the clock: about 2 ms."""


class SearchTimeout(Exception):  # noqa: N818 - whoever searches decides what it means
    """There are more objects than could be looked at."""


def alive(kinds: Collection[type]) -> Iterator[Any]:
    """The objects of exactly these classes, of all that are alive in the process."""
    # Nothing is called for an object: `isinstance` would ask a proxy for the class of its object,
    # and a profiler that records Python's stack would record a million calls. A `SearchTimeout`
    # where there are so many, or so little of the memory is at hand, that it takes too long.
    objects = gc.get_objects()
    deadline = time.monotonic() + LONGEST
    for start in range(0, len(objects), CHUNK):
        if time.monotonic() > deadline:
            raise SearchTimeout
        yield from [each for each in objects[start : start + CHUNK] if type(each) in kinds]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        if gc.isenabled():
            undo.callback(gc.enable)
            gc.disable()
        yield

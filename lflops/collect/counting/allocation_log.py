"""The allocations and frees of several steps in their order, as the allocator's simulation takes them."""

import weakref
from functools import partial
from typing import Any

from lflops.allocator.simulation import Request

__all__ = ["AllocationLog"]


class AllocationLog:
    """Requests to the allocator. A storage that outlives a step is one allocation; nothing is kept alive.

    Attributes:
        requests: Allocations and frees, from the first step on.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.requests: list[Request] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._made = 0

    def allocated(self, storage: Any, key: int, nbytes: int) -> None:
        """Add a storage, unless it is in the log already."""
        if key in self._alive:
            return
        self._made += 1
        self._alive[key] = (self._made, weakref.ref(storage, partial(self.freed, key)))
        self.requests.append(Request(self._made, nbytes))

    def freed(self, key: int, _reference: object = None) -> None:
        """Add the free of a storage."""
        alive = self._alive.pop(key, None)
        if alive is not None:
            self.requests.append(Request(alive[0], None))

    def stop(self) -> None:
        """Stop following storages."""
        self._alive.clear()

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
        self._replaced: tuple[int, int] | None = None

    def replaces(self, key: int) -> None:
        """Note that the next allocation takes the place of this storage, if that one is freed before any other allocation."""
        self._replaced = (key, len(self.requests))

    def allocated(self, storage: Any, key: int, nbytes: int) -> None:
        """Add a storage, unless it is in the log already."""
        if key in self._alive:
            return
        if self._replaced is not None and self._replaced[1] != len(self.requests):
            self._replaced = None
        self._made += 1
        self._alive[key] = (self._made, weakref.ref(storage, partial(self.freed, key)))
        self.requests.append(Request(self._made, nbytes))

    def freed(self, key: int, _reference: object = None) -> None:
        """Add the free of a storage."""
        alive = self._alive.pop(key, None)
        if alive is None:
            return
        if self._replaced is not None and self._replaced[0] == key:
            self.requests.insert(self._replaced[1], Request(alive[0], None))
            self._replaced = None
        else:
            self.requests.append(Request(alive[0], None))

    def stop(self) -> None:
        """Stop following storages."""
        self._alive.clear()

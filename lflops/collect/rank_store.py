"""What ranks leave for each other, under keys of our own in a store of torch's."""

from collections.abc import Iterator
from typing import Any

__all__ = ["RankStore"]

LARGEST_VALUE = 1 << 22
"""Bytes: a store refuses what is much larger."""


class RankStore:
    """A store with values of any size, in which nothing waits for a key that is not there.

    Args:
        store: One of torch's.
    """

    def __init__(self, store: Any) -> None:
        """Reach what is there of the store's keys."""
        self._open = store
        self._closed = False

    def close(self) -> None:
        """Be of no use any more: whoever asks for something, on whatever thread, gets a `ConnectionError`."""
        self._closed = True

    @property
    def _store(self) -> Any:
        if self._closed:
            raise ConnectionError("the process ends")
        return self._open

    def put(self, key: str, value: bytes) -> None:
        """Set a key, its further parts first."""
        parts = [value[start : start + LARGEST_VALUE] for start in range(0, len(value), LARGEST_VALUE)] or [b""]
        for number, part in enumerate(parts[1:], 1):
            self._store.set(f"{key}+{number}", part)
        self._store.set(key, len(parts).to_bytes(4, "little") + parts[0])

    def get(self, key: str) -> bytes:
        """What a key that is there was set to."""
        return b"".join(part for _, part in self._parts(key))

    def take(self, key: str) -> bytes:
        """The same, and it is gone then."""
        found = dict(self._parts(key))
        for part in found:
            self.drop(part)
        return b"".join(found.values())

    def drop(self, key: str) -> None:
        """Let a key of one part be gone, if it is there."""
        self._store.delete_key(key)

    def has(self, key: str) -> bool:
        """Whether a key is there."""
        return bool(self._store.check([key]))

    def add(self, key: str) -> int:
        """Count one more. Returns how many there are now."""
        return int(self._store.add(key, 1))

    def number(self, key: str) -> int:
        """How many were counted."""
        return int(self._store.add(key, 0))

    def _parts(self, key: str) -> Iterator[tuple[str, bytes]]:
        first = self._store.get(key)
        yield key, first[4:]
        for number in range(1, int.from_bytes(first[:4], "little")):
            yield f"{key}+{number}", self._store.get(f"{key}+{number}")

"""Read and write a key-value store that all ranks share, on a separate connection."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from lflops.torch_private.distributed import group_store

# The module with the store classes, if torch was built with them.
STORES: Any = distributed

# A key in the store of the process group. Its value is the random prefix of this run's keys.
RUN = "run"

# Share of the timeout that is passed to torch to open a connection. If the connection is refused,
# torch tries twice and takes up to 2.5 times as long.
CONNECT = 0.25

# Timeout of a wait that should never time out, because torch would log the timeout. A longer value
# would overflow, because torch counts in milliseconds.
FOREVER = timedelta(days=20)

# Maximum size in bytes of a value that is stored in one piece. A larger value is split, because a
# store refuses values that are much larger.
LARGEST_VALUE = 1 << 22


def shared_store(name: str, *, timeout: float) -> Any:
    """Open a second connection to the store of the default process group.

    Returns `None` if the connection fails or the class of the store is unknown.

    A connection serves one caller at a time, and the process group must not wait for a background
    thread, so background threads need their own connection. All ranks must call this function at a
    point where no rank is training. No collective is run. Each call for the same process group
    needs a different `name`. The call takes at most `timeout` seconds.

    For a `TCPStore`, the `clone` method cannot be used: it would wait for the connection as long as
    the group's timeout, usually half an hour. Other threads rely on that timeout, so it cannot be
    changed. Instead, a new connection to the store's address is opened.
    """
    group = group_store()
    # A custom store may raise any error, which must not end the training run.
    with suppress(Exception):
        innermost = _innermost(group)
        if isinstance(innermost, STORES.TCPStore):
            again = _opened(timeout, innermost.port, innermost.host)
            # The prefix of the group cannot be read from its store. So the rank that comes first
            # chooses a random prefix, and the other ranks read it.
            of_name = STORES.PrefixStore(name, group)
            run = of_name.compare_set(RUN, "", secrets.token_hex(8)).decode()
            return STORES.PrefixStore(f"{name}/{run}", again)
        if isinstance(innermost, STORES.FileStore):
            # The clone of a file store opens no connection.
            again = group.clone()
            again.set_timeout(timedelta(seconds=timeout))
            return STORES.PrefixStore(name, again)
    return None


def _innermost(store: Any) -> Any:
    while isinstance(store, STORES.PrefixStore):
        store = store.underlying_store
    return store


def wait_for(store: Any, key: str, is_over: threading.Event) -> None:
    """Wait until a key exists, without a timeout.

    For any store except `TCPStore`, the wait also ends when `is_over` is set.
    """
    if isinstance(_innermost(store), STORES.TCPStore):
        store.wait([key], FOREVER)
    else:
        poll(lambda: bool(store.check([key])), is_over.wait, is_over.is_set)


def _opened(timeout: float, port: int, host: str) -> Any:
    store = STORES.TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT * timeout),
    )
    store.set_timeout(timedelta(seconds=timeout))
    return store


def poll(
    is_there: Callable[[], bool],
    pause: Callable[[float], object],
    is_over: Callable[[], bool],
    longest: float = 0.2,
) -> bool:
    """Wait until `is_there` or `is_over` returns True; return whether `is_there` did.

    Between two calls of these functions, `pause` is called with a number of seconds. Each pause is
    twice as long as the one before, up to `longest` seconds.
    """
    seconds = 0.005
    while not is_there():
        if is_over():
            return False
        pause(seconds)
        seconds = min(2 * seconds, longest)
    return True


class RankStore:
    """A key-value store that accepts values of any size.

    Attributes:
        answers: Number of read requests that the store has answered. While this number increases,
            the store works.
    """

    def __init__(self, store: Any) -> None:
        self.answers = 0
        self._open = store
        self._closed = False

    def close(self) -> None:
        """Close the store: every later call of a method raises a `ConnectionError`."""
        self._closed = True

    @property
    def _store(self) -> Any:
        if self._closed:
            raise ConnectionError("this process is ending")
        return self._open

    def put(self, key: str, value: bytes) -> None:
        """Store a value under a key.

        A large value is split into parts, each with its own key. The first part is stored last, so
        the value is complete if the first part exists.
        """
        starts = range(0, max(len(value), 1), LARGEST_VALUE)
        parts = [value[start : start + LARGEST_VALUE] for start in starts]
        for number, part in enumerate(parts[1:], 1):
            self._store.set(f"{key}+{number}", part)
        self._store.set(key, len(parts).to_bytes(4, "little") + parts[0])

    def get(self, key: str) -> bytes:
        return b"".join(part for _, part in self._parts(key))

    def take(self, key: str) -> bytes:
        """Return a value and delete its key."""
        found = dict(self._parts(key))
        for part in found:
            self.drop(part)
        return b"".join(found.values())

    def drop(self, key: str) -> None:
        """Delete a key, if it exists. The value must not have been split into parts."""
        self._store.delete_key(key)

    def has(self, key: str) -> bool:
        exists = bool(self._store.check([key]))
        self.answers += 1
        return exists

    def add(self, key: str) -> int:
        """Increment a counter and return its new value."""
        return int(self._store.add(key, 1))

    def number(self, key: str) -> int:
        """Return the value of a counter; 0 if it was never incremented."""
        number = int(self._store.add(key, 0))
        self.answers += 1
        return number

    def _parts(self, key: str) -> Iterator[tuple[str, bytes]]:
        first = self._store.get(key)
        self.answers += 1
        yield key, first[4:]
        for number in range(1, int.from_bytes(first[:4], "little")):
            yield f"{key}+{number}", self._store.get(f"{key}+{number}")

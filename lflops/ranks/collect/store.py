"""A key-value store that all ranks share, on its own connection."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from lflops.torch_private.distributed import group_store

# where torch keeps them, if it was built with any
STORES: Any = distributed

# what the keys of this run begin with on another connection to the group's store
RUN = "run"

# of the timeout: for torch to open a connection. Where one is refused torch tries twice, and takes
# up to 2.5 times as long
CONNECT = 0.25

FOREVER = timedelta(
    days=20
    # a wait that ends by its timeout is logged by torch; what is longer does not fit in its
    # milliseconds
)

# bytes: a store refuses what is much larger
LARGEST_VALUE = 1 << 22


def shared_store(name: str, *, timeout: float) -> Any:
    """The store of the default process group, on another connection.

    `None` where there is no such thing.

    One connection answers one caller at a time, and the group must not wait for what a thread of
    ours asks. To be called by all ranks at a point where none of them trains: no collective is run.
    No two stores of a group have the same name. It takes `timeout` seconds at most.
    """
    # `clone` would wait for the connection as long as the group's own timeout says, half an hour as
    # a rule. That timeout is not ours to shorten, not for a moment: other threads wait by it. So
    # the connection is opened anew, by its address.
    group = group_store()
    with suppress(
        Exception
        # the user's store may raise any error, which must not end the training
    ):
        innermost = _innermost(group)
        if isinstance(innermost, STORES.TCPStore):
            again = _opened(timeout, innermost.port, innermost.host)
            # No store tells the group's prefix, which keeps the group apart from others. In its
            # place is one that the fastest rank chooses.
            run = (
                STORES.PrefixStore(name, group).compare_set(RUN, "", secrets.token_hex(8)).decode()
            )
            return STORES.PrefixStore(f"{name}/{run}", again)
        if isinstance(innermost, STORES.FileStore):
            # opens no connection
            again = group.clone()
            again.set_timeout(timedelta(seconds=timeout))
            return STORES.PrefixStore(name, again)
    return None


def _innermost(store: Any) -> Any:
    while isinstance(store, STORES.PrefixStore):
        store = store.underlying_store
    return store


def wait_for(store: Any, key: str, is_over: threading.Event) -> None:
    """Wait until a key is there, however long.

    Only where the store has no wait that costs nothing, the event ends it as well.
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
    """Look again and again, until it is there or the wait is over.

    Pauses double up to the `longest`. Returns whether it is there.
    """
    seconds = 0.005
    while not is_there():
        if is_over():
            return False
        pause(seconds)
        seconds = min(2 * seconds, longest)
    return True


class RankStore:
    """A store with values of any size, in which nothing waits for a key that is not there."""

    def __init__(self, store: Any) -> None:
        # how many requests it has answered: who works with it gets on
        self.answers = 0
        self._open = store
        self._closed = False

    def close(self) -> None:
        """Close: every later call, on any thread, gets a `ConnectionError`."""
        self._closed = True

    @property
    def _store(self) -> Any:
        if self._closed:
            raise ConnectionError("the process ends")
        return self._open

    def put(self, key: str, value: bytes) -> None:
        """Set a key, its further parts first."""
        parts = [
            value[start : start + LARGEST_VALUE] for start in range(0, len(value), LARGEST_VALUE)
        ] or [b""]
        for number, part in enumerate(parts[1:], 1):
            self._store.set(f"{key}+{number}", part)
        self._store.set(key, len(parts).to_bytes(4, "little") + parts[0])

    def get(self, key: str) -> bytes:
        return b"".join(part for _, part in self._parts(key))

    def take(self, key: str) -> bytes:
        """Get a value, and delete its key."""
        found = dict(self._parts(key))
        for part in found:
            self.drop(part)
        return b"".join(found.values())

    def drop(self, key: str) -> None:
        """Let a key of one part be gone, if it is there."""
        self._store.delete_key(key)

    def has(self, key: str) -> bool:
        there = bool(self._store.check([key]))
        self.answers += 1
        return there

    def add(self, key: str) -> int:
        """Count one more. Returns how many there are now."""
        return int(self._store.add(key, 1))

    def number(self, key: str) -> int:
        """Read a counter; 0 where it was never raised."""
        number = int(self._store.add(key, 0))
        self.answers += 1
        return number

    def _parts(self, key: str) -> Iterator[tuple[str, bytes]]:
        first = self._store.get(key)
        self.answers += 1
        yield key, first[4:]
        for number in range(1, int.from_bytes(first[:4], "little")):
            yield f"{key}+{number}", self._store.get(f"{key}+{number}")

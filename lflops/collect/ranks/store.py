"""A key-value store that all ranks share, on its own connection."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from lflops.collect.torch_private.distributed import group_store

STORES: Any = distributed  # where torch keeps them, if it was built with any

ADDRESS_KEY, RUN = "at", "run"
"""Where the first rank's own store is to be found; what the keys of this run begin with on another connection to the group's store."""

CONNECT, WAIT = 0.125, 0.375
"""Parts of the timeout: for torch to open a connection, and for the first rank to say where its store is. Where a connection is refused
torch tries twice, with pauses, and takes up to two and a half times what it is given. Two connections and the wait are within the whole."""

FOREVER = timedelta(days=20)  # a wait that ends by its timeout is logged by torch; what is longer does not fit in its milliseconds

LARGEST_VALUE = 1 << 22  # bytes: a store refuses what is much larger


def shared_store(name: str, rank: int, *, timeout: float) -> Any:
    """A store that all ranks of the default process group reach; `None` where they have none.

    That is the group's own, on another connection: one answers one caller at a time, and the group must not wait for what a thread of ours
    asks. Where that cannot be had the first rank opens one, and says in the group's where it is.

    To be called by all ranks at a point where none of them trains, and in no other way: no collective is run. No two stores of a group
    have the same name. A rank waits `timeout` seconds, at most, where the group's store has or allows no other connection.
    """
    group = group_store()
    if group is None:
        return None
    with suppress(Exception):  # an error of the user's store must not end the training
        shared = STORES.PrefixStore(name, group)
        again = _clone_connection(group, shared, name, timeout)
        if again is not None:
            return again
        if rank:
            return STORES.PrefixStore(name, _connect_to_rank0(shared, timeout))
        own = _opened(timeout)
        shared.set(ADDRESS_KEY, f"{own.host} {own.port}")
        return STORES.PrefixStore(name, own)
    return None


def _clone_connection(group: Any, shared: Any, name: str, timeout: float) -> Any:
    """The group's store on another connection; `None` where there is no such thing."""
    # `clone` would wait for the connection as long as the group's own timeout says, half an hour as a rule. That timeout is not ours to
    # shorten, not for a moment: other threads wait by it. So the connection is opened anew, by its address.
    with suppress(Exception):  # the user's store may raise any error
        innermost = _innermost(group)
        if isinstance(innermost, STORES.TCPStore):
            again = _opened(timeout, innermost.port, innermost.host)
            # No store tells the group's prefix, which keeps the group apart from others. In its place is one that the fastest rank chooses.
            run = shared.compare_set(RUN, "", secrets.token_hex(8)).decode()
            return STORES.PrefixStore(f"{name}/{run}", again)
        if isinstance(innermost, STORES.FileStore):
            again = group.clone()  # opens no connection
            again.set_timeout(timedelta(seconds=timeout))
            return STORES.PrefixStore(name, again)
    return None


def _innermost(store: Any) -> Any:
    while isinstance(store, STORES.PrefixStore):
        store = store.underlying_store
    return store


def wait_for(store: Any, key: str, is_over: threading.Event) -> None:
    """Wait until a key is there, however long. Only where the store has no wait that costs nothing, the event ends it as well."""
    if isinstance(_innermost(store), STORES.TCPStore):
        store.wait([key], FOREVER)
    else:
        poll(lambda: bool(store.check([key])), is_over.wait, is_over.is_set)


def _connect_to_rank0(shared: Any, timeout: float) -> Any:
    end = time.monotonic() + WAIT * timeout
    # A wait of the store's own would hold its connection, which others of the group may need.
    if not poll(lambda: bool(shared.check([ADDRESS_KEY])), time.sleep, lambda: time.monotonic() > end, 0.01):
        raise TimeoutError(ADDRESS_KEY)
    host, port = shared.get(ADDRESS_KEY).decode().split()
    return _opened(timeout, int(port), host)


def _opened(timeout: float, port: int = 0, host: str = "") -> Any:
    """A connection to a store; without a port to one that is opened on this machine, by the name that others know it by."""
    host = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    connect = timedelta(seconds=CONNECT * timeout)
    store = STORES.TCPStore(host, port, is_master=not port, wait_for_workers=False, timeout=connect)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def poll(is_there: Callable[[], bool], pause: Callable[[float], object], is_over: Callable[[], bool], longest: float = 0.2) -> bool:
    """Look again and again, until it is there or the wait is over. Pauses double up to the `longest`. Returns whether it is there."""
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
        self.answers = 0  # how many requests it has answered: who works with it gets on
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
        parts = [value[start : start + LARGEST_VALUE] for start in range(0, len(value), LARGEST_VALUE)] or [b""]
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

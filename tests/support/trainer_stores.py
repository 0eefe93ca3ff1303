"""Training runs in groups with a store that other connections cannot reach, or without a store."""

import contextlib
import os
import socket
import threading
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, TCPStore

from lflops.profile.profile import Profile
from tests.support.lightning_runs import watching
from tests.support.trainer_ranks import FEW, IN_THE_WINDOW, SECONDS, SOON, Spread, rank, train


class OneConnection(Store):
    """A store of somebody's own, as a launcher may have one."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self.store = store

    def clone(self) -> Store:
        raise RuntimeError("there is no other connection")

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def add(self, key: str, number: int) -> int:
        return self.store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self.store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait(keys, timeout or timedelta(seconds=SECONDS))


@cache
def join() -> OneConnection:
    """Make the group, before Lightning would.

    The first rank's store is the server of both: the cache keeps it until the process ends.
    """
    port = int(os.environ["MASTER_PORT"])
    store = OneConnection(
        TCPStore("127.0.0.1", port, 2, rank() == 0, timeout=timedelta(seconds=SECONDS))
    )
    distributed.init_process_group(
        "gloo", store=store, rank=rank(), world_size=2, timeout=timedelta(seconds=SECONDS)
    )
    return store


def without_a_store(folder: Path) -> tuple[list[Profile], list[str]]:
    """What the monitor tells, and warns of.

    Both ranks close the window at the same step: at the end.
    """
    join()
    monitor = watching(schedule=SOON, dirpath=folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train("ddp", monitor, batches=FEW)
    return monitor.profiles, [
        said for each in warned if (said := str(each.message)).startswith("FlopsMonitor")
    ]


class Killed(Spread):
    """On the first rank, in the window."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if not self.global_rank and batch_idx == IN_THE_WINDOW:
            os._exit(1)
        return super().training_step(batch, batch_idx)


def without_the_first(folder: Path) -> str:
    """By what the second's training is left when the first rank is killed, with the store in its process."""
    try:
        train("ddp", watching(schedule=SOON, dirpath=folder, on_error="warn"), module=Killed())
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


class Refusing:
    """Stands before a store's server, and lets one connection through.

    A machine that allows no second one.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        inner, _ = self._listening.accept()
        outer = socket.create_connection(("127.0.0.1", self._to))
        self._listening.close()
        for one, other in ((inner, outer), (outer, inner)):
            threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)


def on_a_refused_connection() -> tuple[list[Profile], timedelta, int]:
    """What the monitor tells, the timeout of the group's store afterwards, and the steps that the training made.

    The second rank's way to the store refuses what comes after the group's own connection. The
    group waits for an hour.
    """
    hour = timedelta(hours=1)
    server = (
        TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=True, wait_for_workers=False
        )
        if rank() == 0
        else None
    )
    port = int(os.environ["MASTER_PORT"])
    while server is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
    store = server or TCPStore(
        "127.0.0.1", Refusing(port).port, 2, is_master=False, wait_for_workers=False
    )
    store.set_timeout(hour)
    distributed.init_process_group("gloo", store=store, rank=rank(), world_size=2, timeout=hour)
    monitor = watching(schedule=SOON, gather_timeout=6.0, on_error="warn")
    module = train("ddp", monitor)
    return monitor.profiles, store.timeout, len(module.losses)  # type: ignore[attr-defined]

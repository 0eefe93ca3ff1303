"""Training runs in process groups whose store refuses further connections or has gone away."""

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
    """A store that cannot be cloned, like the store of some launchers."""

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
    """Make the process group before Lightning does.

    The store of rank 0 is the server for both ranks, so the cache keeps it until the process ends.
    """
    port = int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=SECONDS)
    store = OneConnection(TCPStore("127.0.0.1", port, 2, rank() == 0, timeout=timeout))
    distributed.init_process_group("gloo", store=store, rank=rank(), world_size=2, timeout=timeout)
    return store


def without_a_store(folder: Path) -> tuple[list[Profile], list[str]]:
    """Train with a store that cannot be cloned, and return the profiles and the monitor's warnings.

    Both ranks close the window at the same step, at the end of the run.
    """
    join()
    monitor = watching(schedule=SOON, dirpath=folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train("ddp", monitor, batches=FEW)
    texts = [str(each.message) for each in warned]
    return monitor.profiles, [text for text in texts if text.startswith("FlopsMonitor")]


class Killed(Spread):
    """A module that kills its process on rank 0, in the window."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if not self.global_rank and batch_idx == IN_THE_WINDOW:
            os._exit(1)
        return super().training_step(batch, batch_idx)


def without_the_first(folder: Path) -> str:
    """Train until rank 0 is killed, whose process has the store.

    Returns the name of the class of the error that ends training on rank 1, or "nothing".
    """
    try:
        train("ddp", watching(schedule=SOON, dirpath=folder, on_error="warn"), module=Killed())
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


class Refusing:
    """A proxy for the server of a store that accepts only one connection.

    Attributes:
        port: The port of the proxy.
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
    """Send everything that is received from one socket to the other."""
    with contextlib.suppress(OSError):
        data = one.recv(1 << 16)
        while data:
            other.sendall(data)
            data = one.recv(1 << 16)


def on_a_refused_connection() -> tuple[list[Profile], timedelta, int]:
    """Train while rank 1 can have only one connection to the store.

    The process group uses this connection, so lflops cannot open another one. The timeout of the
    group is an hour.

    Returns:
        The profiles, the timeout of the group's store afterwards, and the number of steps.
    """
    hour = timedelta(hours=1)
    port = int(os.environ["MASTER_PORT"])
    if rank() == 0:
        store = TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    else:
        _wait_for_server(port)
        proxy = Refusing(port).port
        store = TCPStore("127.0.0.1", proxy, 2, is_master=False, wait_for_workers=False)
    store.set_timeout(hour)
    distributed.init_process_group("gloo", store=store, rank=rank(), world_size=2, timeout=hour)
    monitor = watching(schedule=SOON, gather_timeout=6.0, on_error="warn")
    module = train("ddp", monitor)
    return monitor.profiles, store.timeout, len(module.losses)  # type: ignore[attr-defined]


def _wait_for_server(port: int) -> None:
    """Wait until the server of rank 0 accepts connections."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return

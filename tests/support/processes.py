"""Run a function without arguments that returns a profile in other processes.

Also runs backward on another thread.
"""

import datetime as dt
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
from torch import distributed
from torch.utils import _python_dispatch

from lflops import Profile

__all__ = ["Ranks", "Scenario", "anywhere", "as_a_device_would", "fork_context"]

Scenario = Callable[[], Profile]
SECONDS = 900
"""That a scenario may take."""


def here(scenario: Scenario) -> Profile:
    """Run it in this process, where autograd has numbered many nodes before."""
    return scenario()


def in_a_fresh_process(scenario: Scenario) -> Profile:
    """Run it where every thread numbers its nodes from the beginning, so that two threads give out the same numbers."""
    with _process() as fresh:
        return fresh.submit(scenario).result(timeout=SECONDS)


anywhere = pytest.mark.parametrize("run", [here, in_a_fresh_process])


def as_a_device_would(executor: ThreadPoolExecutor, function: Callable[[], Any]) -> Any:
    """Run it as torch runs the backward of a GPU.

    On another thread, to which it takes the modes of this one.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()

    def with_the_modes() -> Any:
        for mode in modes:
            _python_dispatch._push_mode(mode)
        try:
            return function()
        finally:
            for _ in modes:
                _python_dispatch._pop_mode()

    return executor.submit(with_the_modes).result()


class Ranks:
    """Processes of one group, each of which runs what it is asked for."""

    def __init__(self, world: int, folder: Path) -> None:
        store = f"file://{folder / 'store'}"
        self._ranks = [
            _process(initializer=_join, initargs=(store, rank, world)) for rank in range(world)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._everywhere(distributed.destroy_process_group)
        for rank in self._ranks:
            rank.shutdown()

    def run(self, scenario: Scenario) -> list[Profile]:
        """The profile of each rank."""
        return self._everywhere(scenario)

    def _everywhere(self, function: Callable[[], Any]) -> list[Any]:
        running = [rank.submit(function) for rank in self._ranks]
        return [each.result(timeout=SECONDS) for each in running]


def wait_for(path: Path, *, exists: bool = True) -> None:
    """Wait until a process that no one here can join has written a file, or taken it away.

    Raises:
        TimeoutError: It has not.
    """
    deadline = time.monotonic() + SECONDS
    while path.exists() != exists:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} was not {'written' if exists else 'taken away'} within {SECONDS} s"
            )
        time.sleep(0.05)


def fork_context() -> Any:
    """Makes processes that are fresh, but for what takes long to import.

    That is imported once, and nothing has run there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "lflops.integrations.lightning.monitor",
            "lflops.flop_counter.count",
            "pytest",
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
        ]
    )
    return context


def _process(**options: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=fork_context(), **options)


def _join(store: str, rank: int, world: int) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=world,
        timeout=dt.timedelta(seconds=SECONDS / 2),
    )

"""Run scenarios in other processes, and backward on another thread.

A scenario is a function without arguments that returns a profile.
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
"""Seconds that a scenario may take."""


def here(scenario: Scenario) -> Profile:
    """Run a scenario in this process, where autograd has already numbered many nodes."""
    return scenario()


def in_a_fresh_process(scenario: Scenario) -> Profile:
    """Run a scenario in a new process.

    There each thread numbers its autograd nodes from 0, so two threads use the same numbers.
    """
    with _process() as fresh:
        return fresh.submit(scenario).result(timeout=SECONDS)


anywhere = pytest.mark.parametrize("run", [here, in_a_fresh_process])


def as_a_device_would(executor: ThreadPoolExecutor, function: Callable[[], Any]) -> Any:
    """Run a function on another thread, with the dispatch modes of this thread.

    Torch runs the backward pass of a GPU in this way.
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
    """The processes of one process group. Each of them runs the same scenario."""

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
        """Run a scenario on all ranks, and return the profile of each rank."""
        return self._everywhere(scenario)

    def _everywhere(self, function: Callable[[], Any]) -> list[Any]:
        running = [rank.submit(function) for rank in self._ranks]
        return [each.result(timeout=SECONDS) for each in running]


def wait_for(path: Path, *, exists: bool = True) -> None:
    """Wait until another process has written a file, or has removed it.

    This is for processes that the caller cannot join.

    Raises:
        TimeoutError: The file was not written or removed in time.
    """
    deadline = time.monotonic() + SECONDS
    while path.exists() != exists:
        if time.monotonic() > deadline:
            event = "written" if exists else "removed"
            raise TimeoutError(f"{path} was not {event} within {SECONDS} s")
        time.sleep(0.05)


def fork_context() -> Any:
    """Return a multiprocessing context whose processes start quickly.

    They are forks of a process that has imported the slow modules and run nothing else.
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

"""Test that a slow rank is found in the loop of the documentation.

Two real processes train under DDP. Their clock stands still except where a `Part` advances it, so
all expected times are exact.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lflops
from lflops.timing.clock import HostClock, ThreadSchedule
from tests.support.fake_clock import StillClock
from tests.support.processes import Ranks
from tests.support.report_claims import disagreements, wrong_sums

STEPS, WIDTH = 120, 8


class Part(nn.Module):
    """A linear layer whose forward takes 10 ms, or 20 ms on rank 1 from step `slow_from` on."""

    def __init__(self, clock: StillClock, slow_from: float) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.clock = clock
        self.slow_from = slow_from
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        is_slow = distributed.get_rank() == 1 and self.steps >= self.slow_from
        self.clock.advance(20e-3 if is_slow else 10e-3)
        self.steps += 1
        return self.product(x)


def trained(slow_from: float) -> Any:
    """Train like the documentation does. The second of two parts is slow from step `slow_from` on.

    Returns:
        The stragglers of the last window, the log's lines about ranks, and the claims of the report
        that disagree with each other or do not add up. Only rank 0 has a profile.
    """
    clock = StillClock()
    said: list[str] = []
    HostClock.mark = clock.nanoseconds  # type: ignore[assignment]
    # the system's scheduling of this process is no part of the test
    ThreadSchedule.read = partial(int)  # type: ignore[method-assign,assignment]
    model = DistributedDataParallel(
        nn.Sequential(Part(clock, float("inf")), Part(clock, slow_from))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(4, WIDTH) for _ in range(STEPS)]
    with lflops.monitor(
        model, optimizer, log=said.append, log_every=10, hardware=None, on_error="raise"
    ) as monitor:
        for batch in monitor.data(loader):
            with monitor.step(batch):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    rows: list[Any] = []
    wrong: list[str] = []
    if monitor.profiles:
        profile = monitor.profiles[-1]
        rows = [
            (row.slow_rank, row.module, row.phase, row.since)
            for row in lflops.stragglers(profile).rows
        ]
        wrong = [*disagreements(profile), *wrong_sums(profile)]
    return rows, [each for each in said if "in the last" in each], wrong


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return two processes with a process group."""
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def test_a_rank_that_is_slow_in_each_step_is_named_with_its_module(two: Ranks) -> None:
    """The window names rank 1 and the slow part, and the log does not repeat it.

    All forms of the report agree, and their parts add up.
    """
    results: Any = two.run(partial(trained, 0))
    (rows, said, wrong), (others, _, _) = results
    assert ([(1, "1", "forward", None)], [], [], []) == (rows, said, others, wrong)


def test_a_rank_that_becomes_slow_behind_the_last_window_has_a_line_in_the_log(two: Ranks) -> None:
    """The window and the log name rank 1, which is slow from step 60 on, without a module.

    No step times modules after the last window, so the module is unknown. The steps are numbered
    like those of loggers. The slow part costs 10 ms in each step.
    """
    results: Any = two.run(partial(trained, 60))
    ((rank, module, phase, since),), (*_, line), wrong = results[0]
    assert ((1, "", "forward", 60), []) == ((rank, module, phase, since), wrong)
    assert "rank 1 is" in line
    assert "since step 60: this costs 10.0 ms per step" in line


def test_equal_ranks_are_not_accused(two: Ranks) -> None:
    """If no rank becomes slow, neither the window nor the log names a rank."""
    results: Any = two.run(partial(trained, STEPS))
    assert ([], [], []) == results[0]


def marks_around_opening(folder: Path) -> list[bool]:
    """Train with a trace on rank 0, and return whether lflops marked two steps as disturbed.

    The first is the step before the warm-up of the window. The second is the first step of the
    warm-up, in which rank 1 waits until rank 0 has prepared the profiler. The list is empty on a
    rank without a profile.
    """
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(
        model, optimizer, log=lambda _: None, hardware=None, on_error="raise", dirpath=folder
    ) as monitor:
        for batch in monitor.data([torch.randn(4, WIDTH) for _ in range(20)]):
            with monitor.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    if not monitor.profiles:
        return []
    steps = monitor.profiles[-1].steps
    counting = [step.kind for step in steps].index("counting")
    return ["background" in step.marks for step in steps[counting - 2 : counting]]


def test_the_step_that_waits_for_a_profiler_is_no_unprofiled_step(
    two: Ranks, tmp_path: Path
) -> None:
    """The first step of the warm-up has the mark "background", and the step before it does not.

    The warm-up has two steps, and the second one is the counting step.
    """
    results: Any = two.run(partial(marks_around_opening, tmp_path))
    assert [[False, True], []] == results

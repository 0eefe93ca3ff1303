"""A slow rank in the documented loop: two real processes under DDP, whose clock is the test's."""

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
    """A product that takes 10 ms, on rank 1 and from a step on twice as long."""

    def __init__(self, clock: StillClock, slow_from: float) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.clock, self.slow_from, self.steps = clock, slow_from, 0

    def forward(self, x: Tensor) -> Tensor:
        is_slow = distributed.get_rank() == 1 and self.steps >= self.slow_from
        self.clock.advance(20e-3 if is_slow else 10e-3)
        self.steps += 1
        return self.product(x)


def trained(slow_from: float) -> Any:
    """Train as the documentation does.

    The culprits of the last window, and what the log says of ranks.
    """
    clock, said = StillClock(), list[str]()
    HostClock.mark = clock.nanoseconds  # type: ignore[assignment]
    ThreadSchedule.read = partial(int)  # type: ignore[method-assign,assignment]  # what the system does is no part of the test
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
    rows: list[Any] = [
        row for profile in monitor.profiles[-1:] for row in lflops.stragglers(profile).rows
    ]
    wrong = [
        claim
        for profile in monitor.profiles[-1:]
        for claim in (*disagreements(profile), *wrong_sums(profile))
    ]
    return (
        [(row.slow_rank, row.module, row.phase, row.since) for row in rows],
        [each for each in said if "in the last" in each],
        wrong,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Both processes."""
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def test_a_rank_that_is_slow_in_each_step_is_named_with_its_module(two: Ranks) -> None:
    """Its window says so, and the log does not say it again.

    All drawings of the run agree, and parts add up.
    """
    results: Any = two.run(partial(trained, 0))
    (rows, said, wrong), (others, _, _) = results
    assert ([(1, "1", "forward", None)], [], [], []) == (rows, said, others, wrong)


def test_a_rank_that_becomes_slow_behind_the_last_window_has_a_line_in_the_log(two: Ranks) -> None:
    """In the 60 steps from number 60 on, as the loggers count.

    No step is hooked then, so no module is known.
    """
    results: Any = two.run(partial(trained, 60))
    ((rank, module, phase, since),), (*_, line), wrong = results[0]
    assert ((1, "", "forward", 60), []) == ((rank, module, phase, since), wrong)
    assert "rank 1 is" in line
    assert "since step 60: costs 10.0 ms a step" in line


def test_equal_ranks_are_not_accused(two: Ranks) -> None:
    """Neither in the window nor in the log."""
    results: Any = two.run(partial(trained, STEPS))
    assert ([], [], []) == results[0]


def marks_around_opening(folder: Path) -> list[bool]:
    """Train with a trace on rank 0.

    Whether the step before the warm-up of the window is disturbed by lflops, and the first step of
    the warm-up, in which rank 1 waits until rank 0 has prepared the profiler.
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
    """The warm-up has two steps, of which the second is counted."""
    results: Any = two.run(partial(marks_around_opening, tmp_path))
    assert [[False, True], []] == results

"""The steps of a run, from those of its ranks.

What the last rank took between two collectives, and the samples of all.
"""

import statistics
from collections import defaultdict
from typing import Any

import pytest

from lflops.profile.steps import Step
from lflops.ranks.merge.steps import MergedSteps
from tests.support.profile_builders import run
from tests.support.simulated_ranks import DATA, Plant, ddp

WAITS = ("backward", "sync")


def step(
    index: int = 0, *, samples: int | None = None, marks: tuple[str, ...] = (), **phases: float
) -> Step:
    """A clean step."""
    return Step(
        index=index,
        kind="unprofiled",
        seconds=sum(phases.values()),
        phases=phases,
        samples=samples,
        marks=marks,
    )


def merged(
    *ranks: list[Step],
    waits: tuple[str, ...] = WAITS,
    coordinates: list[dict[str, int]] | None = None,
    **facts: Any,
) -> list[Step]:
    """Of a run with so many ranks."""
    steps = MergedSteps(waits)
    for rank, each in enumerate(ranks):
        at = coordinates[rank] if coordinates else {}
        steps.add(
            rank,
            each,
            run(**({"world_size": len(ranks), "data_parallel_size": len(ranks)} | facts)),
            at,
        )
    return list(steps.merged())


def test_waiting_for_another_rank_is_in_no_phase_of_the_run() -> None:
    """Rank 1 waits 51 s for data; rank 0 waits 50 s of its 60 in backward for rank 1."""
    early, late = (
        step(data=1, forward=10, backward=60, optimizer=5, sync=1),
        step(data=51, forward=10, backward=10, optimizer=5, sync=1),
    )
    (whole,) = merged([early], [late])
    assert {"data": 51, "forward": 10, "backward": 10, "optimizer": 5, "sync": 1} == whole.phases
    assert 77 == whole.seconds
    assert [whole] == merged([late], [early])


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_the_phases_of_a_run_are_the_same_in_ten_runs_out_of_ten(seed: int, slow: int) -> None:
    """50 ms and the usual 1 for data.

    16 places of 2 ms forward and of 4 backward; 1.1 until the gradients are there; 3 for the
    optimizer.

    The other rank waits for that: 1 ms for data, 115 in backward. A place takes a few per cent more
    than planned, by chance.
    """
    times = ddp().run(2, 20, seed, [Plant(rank=slow, place=DATA, seconds=50e-3)])
    ranks: list[list[Step]] = []
    for rank in times.values():
        sums = [defaultdict[str, float](float) for _ in rank]
        for phases, places in zip(sums, rank, strict=True):
            for place, seconds in places.items():
                phases[place.phase] += seconds
        ranks.append([step(index, **phases) for index, phases in enumerate(sums)])
    whole = merged(*ranks)
    medians = {
        phase: 1e3 * statistics.median(each.phases[phase] for each in whole)
        for phase in ("data", "forward", "backward", "optimizer")
    }
    assert {
        phase: pytest.approx(planned, rel=0.05) for phase, planned in PLANNED.items()
    } == medians
    waits = statistics.median(each.phases["backward"] for each in ranks[1 - slow])
    assert pytest.approx(65.1e-3 + 50e-3, rel=0.05) == waits


PLANNED = {"data": 51.0, "forward": 32.0, "backward": 65.1, "optimizer": 3.0}
"""Milliseconds."""


@pytest.mark.parametrize("jitter", [-1e-6, 0.0, 1e-6])
def test_microseconds_do_not_decide_whose_phases_are_shown(jitter: float) -> None:
    """Whichever rank's step is the longer one: data 51 s."""
    (whole,) = merged(
        [step(data=1, backward=60 + jitter, sync=1)], [step(data=51, backward=10, sync=1)]
    )
    assert (51, 10) == (whole.phases["data"], whole.phases["backward"])


def test_each_interval_is_that_of_its_own_last_rank() -> None:
    """Rank 0 is late for the forward, where layers are gathered, rank 1 for the end of backward, by its recompute: 20 + 30 + 5 s."""
    first = step(data=15, forward=5, backward=30, optimizer=5)
    second = step(data=1, forward=19, recompute=25, backward=5, optimizer=5)
    (whole,) = merged([first], [second], waits=("forward", "backward"))
    assert {
        "data": 15,
        "forward": 5,
        "backward": 5,
        "recompute": 25,
        "optimizer": 5,
    } == whole.phases
    assert 55 == whole.seconds


def test_the_first_rank_does_not_wait_in_the_check_for_sigterm() -> None:
    """It is a broadcast of its own.

    That rank 1 is 20 s late with its optimizer is waited for in the next backward, of 25 s.
    """
    (whole,) = merged(
        [step(forward=5, backward=25, optimizer=1, sync=0)],
        [step(forward=5, backward=5, optimizer=21, sync=0)],
    )
    assert ({"forward": 5, "backward": 5, "optimizer": 21, "sync": 0}, 31) == (
        whole.phases,
        whole.seconds,
    )


def test_stages_that_work_in_turn_have_the_step_of_the_one_that_waits_least() -> None:
    """10 s of work each forward, 20 s of waiting for the other: 30 s, never 10 + 10."""
    (whole,) = merged(
        [step(forward=21, backward=9)],
        [step(forward=9, backward=21)],
        [step(forward=22, backward=7)],
        waits=("forward", "backward"),
    )
    assert 29 <= (whole.seconds or 0)


def test_ranks_that_never_wait_last_as_long_as_the_slowest() -> None:
    """There is no collective: the longest step is the run's, with its own phases."""
    longest = step(forward=5, backward=9)
    assert [longest] == merged(
        [step(forward=7, backward=3)], [longest], waits=(), data_parallel_size=None
    )


def test_the_marks_of_all_ranks_disturb_the_step() -> None:
    """A checkpoint of rank 0 holds up all."""
    (whole,) = merged(
        [step(forward=1, marks=("checkpoint",))], [step(forward=2, marks=("warmup",))]
    )
    assert ("checkpoint", "warmup") == whole.marks


def test_samples_are_those_of_all_batches() -> None:
    """4 and 8 are 12, not 4 or 8 times 2."""
    (whole,) = merged([step(samples=4, forward=1)], [step(samples=8, forward=1)])
    assert 12 == whole.samples


def test_ranks_that_share_a_batch_count_it_once() -> None:
    """Two by two: the ranks of one data coordinate have one batch."""
    at = [
        {"data": 0, "tensor": 0},
        {"data": 0, "tensor": 1},
        {"data": 1, "tensor": 0},
        {"data": 1, "tensor": 1},
    ]
    ranks = [[step(samples=n, forward=1)] for n in (4, 4, 8, 8)]
    (whole,) = merged(*ranks, coordinates=at, data_parallel_size=2)
    assert 12 == whole.samples


@pytest.mark.parametrize(
    ("samples", "facts"),
    [
        ((4, None), {}),
        ((4, 8), {"data_parallel_size": None}),
        ((4, 8), {"data_parallel_size": 3, "world_size": 3}),
    ],
    ids=["one has no number", "who shares a batch is unknown", "a rank is missing"],
)
def test_samples_that_are_unknown_have_no_sum(
    samples: tuple[int | None, ...], facts: dict[str, Any]
) -> None:
    """None, rather than a part of them."""
    (whole,) = merged(*([step(samples=n, forward=1)] for n in samples), **facts)
    assert whole.samples is None

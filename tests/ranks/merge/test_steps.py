"""Test how the steps of all ranks are merged into the steps of the run.

Between two collectives, a merged step has the time of the last rank. Its samples are those of all
ranks.
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
    """Return an unprofiled step."""
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
    """Return the steps of a run, merged from the steps of each rank.

    Args:
        ranks: The steps of each rank.
        waits: The phases in which ranks wait for each other.
        coordinates: The coordinates of each rank, if they are known.
        facts: Fields of `Run`.
    """
    sizes = {"world_size": len(ranks), "data_parallel_size": len(ranks)}
    of_run = run(**(sizes | facts))
    steps = MergedSteps(waits)
    for rank, each in enumerate(ranks):
        at = coordinates[rank] if coordinates else {}
        steps.add(rank, each, of_run, at)
    return list(steps.merged())


def test_waiting_for_another_rank_is_in_no_phase_of_the_run() -> None:
    """A wait for another rank is in no phase of the merged step.

    Rank 1 waits for data for 51 s. So rank 0 waits for rank 1 for 50 of its 60 s in backward.
    """
    early = step(data=1, forward=10, backward=60, optimizer=5, sync=1)
    late = step(data=51, forward=10, backward=10, optimizer=5, sync=1)
    (whole,) = merged([early], [late])
    assert {"data": 51, "forward": 10, "backward": 10, "optimizer": 5, "sync": 1} == whole.phases
    assert 77 == whole.seconds
    assert [whole] == merged([late], [early])


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_the_phases_of_a_run_are_the_same_in_ten_runs_out_of_ten(seed: int, slow: int) -> None:
    """The phases of the merged steps are the planned ones, whichever rank is slow, for ten seeds.

    The slow rank takes 50 ms longer than the usual 1 ms for data. There are 16 places of 2 ms in
    forward and of 4 ms in backward, and the gradients take 1.1 ms. The optimizer takes 3 ms. The
    other rank takes 1 ms for data and waits in backward, which takes 115 ms there. The times vary
    randomly by a few per cent.
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
    for phase, planned in PLANNED.items():
        median = statistics.median(each.phases[phase] for each in whole)
        assert pytest.approx(planned, rel=0.05) == 1e3 * median
    waits = statistics.median(each.phases["backward"] for each in ranks[1 - slow])
    assert pytest.approx(65.1e-3 + 50e-3, rel=0.05) == waits


PLANNED = {"data": 51.0, "forward": 32.0, "backward": 65.1, "optimizer": 3.0}
"""Milliseconds of each phase of a merged step."""


@pytest.mark.parametrize("jitter", [-1e-6, 0.0, 1e-6])
def test_microseconds_do_not_decide_whose_phases_are_shown(jitter: float) -> None:
    """Differences of microseconds do not decide which rank's phases are shown.

    Data takes 51 s in the merged step, whichever rank has the longer step.
    """
    first = step(data=1, backward=60 + jitter, sync=1)
    second = step(data=51, backward=10, sync=1)
    (whole,) = merged([first], [second])
    assert (51, 10) == (whole.phases["data"], whole.phases["backward"])


def test_each_interval_is_that_of_its_own_last_rank() -> None:
    """Each interval between collectives has the phases of its own last rank.

    Rank 0 is late in forward, where layers are gathered, because of its data. Rank 1 is late at the
    end of backward, because of its recomputation. The step takes 20 + 30 + 5 s.
    """
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
    """Rank 0 does not wait in Lightning's check for SIGTERM, which is a broadcast from rank 0.

    Rank 1 is 20 s late with its optimizer. Rank 0 waits for it in the next backward, which takes
    25 s there.
    """
    (whole,) = merged(
        [step(forward=5, backward=25, optimizer=1, sync=0)],
        [step(forward=5, backward=5, optimizer=21, sync=0)],
    )
    assert {"forward": 5, "backward": 5, "optimizer": 21, "sync": 0} == whole.phases
    assert 31 == whole.seconds


def test_stages_that_work_in_turn_have_the_step_of_the_one_that_waits_least() -> None:
    """The step of pipeline stages that work in turn is as long as that of the last rank.

    The ranks take about 30 s each, most of which are waits for the other stages. The merged step
    must not be the sum of the work in each phase, such as 9 + 7 s.
    """
    (whole,) = merged(
        [step(forward=21, backward=9)],
        [step(forward=9, backward=21)],
        [step(forward=22, backward=7)],
        waits=("forward", "backward"),
    )
    assert 29 <= (whole.seconds or 0)


def test_ranks_that_never_wait_last_as_long_as_the_slowest() -> None:
    """Without a collective, the merged step is the longest step, with the phases of its rank."""
    longest = step(forward=5, backward=9)
    assert [longest] == merged(
        [step(forward=7, backward=3)], [longest], waits=(), data_parallel_size=None
    )


def test_the_marks_of_all_ranks_disturb_the_step() -> None:
    """A merged step has the marks of all ranks: a checkpoint of rank 0 delays all ranks."""
    (whole,) = merged(
        [step(forward=1, marks=("checkpoint",))], [step(forward=2, marks=("warmup",))]
    )
    assert ("checkpoint", "warmup") == whole.marks


def test_samples_are_those_of_all_batches() -> None:
    """The samples of all ranks are added up: 4 + 8, not 2 × 4 or 2 × 8."""
    (whole,) = merged([step(samples=4, forward=1)], [step(samples=8, forward=1)])
    assert 12 == whole.samples


def test_ranks_that_share_a_batch_count_it_once() -> None:
    """Ranks with the same data coordinate have the same batch, so it is counted once.

    Two pairs of ranks have batches of 4 and 8 samples.
    """
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
    """If the samples of some ranks are unknown, the sum is unknown, and no partial sum is shown."""
    (whole,) = merged(*([step(samples=n, forward=1)] for n in samples), **facts)
    assert whole.samples is None

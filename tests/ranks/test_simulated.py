"""Test the search for stragglers with hundreds of simulated ranks that have the noise of a cluster.

The slow rank must be flagged, and no rank must be flagged if none is slow.
"""

from collections.abc import Iterable, Sequence

import pytest

import lflops
from lflops.profile.records import ModulePhase, Rank, Straggler
from lflops.ranks.merge.rank_comparison import compare_ranks
from lflops.ranks.merge.rank_table import table_of
from lflops.ranks.straggler_search import find_stragglers
from tests.support.profile_builders import profile, run, weights
from tests.support.simulated_ranks import (
    DATA,
    OPTIMIZER,
    Plant,
    Simulation,
    ddp,
    fsdp,
    patterns,
    staged,
    tensor_parallel,
)

Found = list[tuple[str, str, int]]
FORWARD = ModulePhase("layers.3.mlp", "forward")
BACKWARD = ModulePhase("layers.5.attention", "backward")


def named(
    simulation: Simulation, ranks: int, plants: Sequence[Plant], *, seed: int = 0, steps: int = 10
) -> Found:
    """Return the module, phase and rank of each straggler in a simulated run with some delays."""
    times = simulation.run(ranks, steps, seed, plants)
    compared = compare_ranks(table_of(times, simulation.waits, patterns=patterns()))
    assert compared is not None
    return [(row.module, row.phase, row.slow_rank) for row in find_stragglers(compared, ranks)]


PLANTED: dict[str, tuple[Plant, tuple[str, str]]] = {
    "forward": (Plant(rank=77, place=FORWARD, seconds=5e-3), FORWARD),
    "backward": (Plant(rank=0, place=BACKWARD, seconds=5e-3), BACKWARD),
    "data": (Plant(rank=255, place=DATA, seconds=10e-3), DATA),
    "optimizer": (Plant(rank=128, place=OPTIMIZER, seconds=5e-3), OPTIMIZER),
    "every third step": (Plant(rank=3, place=FORWARD, seconds=20e-3, every=3), FORWARD),
    "everything": (Plant(rank=200, factor=1.1), ("", "all")),
}


@pytest.mark.parametrize(
    "simulation", [ddp(), fsdp(), tensor_parallel()], ids=["ddp", "fsdp", "tensor parallel"]
)
@pytest.mark.parametrize(("plant", "place"), PLANTED.values(), ids=PLANTED)
def test_one_slow_rank_of_256_is_named_and_nobody_else(
    simulation: Simulation, plant: Plant, place: tuple[str, str]
) -> None:
    """If one of 256 ranks is slow, only this rank is flagged, with the right module and phase.

    A step takes about 100 ms. The times of modules vary by 2 %, ranks drift by as much, and one
    time in 500 is longer by 1 ms or more.
    """
    assert [(*place, plant.rank)] == named(simulation, 256, [plant])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("simulation", [ddp(), fsdp()], ids=["ddp", "fsdp"])
def test_of_256_equal_ranks_nobody_is_accused(simulation: Simulation, seed: int) -> None:
    """If all ranks are equally fast, no rank is flagged.

    In some steps, the slowest rank is late by several per cent, but it is another rank in the next
    step.
    """
    assert [] == named(simulation, 256, [], seed=seed)


def test_one_slow_rank_in_a_thousand_is_named() -> None:
    """A delay of 5 ms in steps of 100 ms is found on rank 700 of 1,024."""
    assert [(*FORWARD, 700)] == named(ddp(), 1024, [Plant(rank=700, place=FORWARD, seconds=5e-3)])
    assert [] == named(ddp(), 1024, [], seed=1)


def test_two_slow_ranks_are_both_named_the_worse_one_first() -> None:
    """Two slow ranks are both flagged, with the more expensive one first.

    Their delays are in different intervals between collectives.
    """
    plants = [
        Plant(rank=9, place=FORWARD, seconds=5e-3),
        Plant(rank=30, place=OPTIMIZER, seconds=10e-3),
    ]
    assert [(*OPTIMIZER, 30), (*FORWARD, 9)] == named(ddp(), 64, plants)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_slow_module_of_a_pipeline_is_named_with_its_stage(stages: int) -> None:
    """A delay of 10 ms in the backward of one layer of a pipeline is found, with the right stage.

    Without the delay, no rank is flagged.
    """
    slow = ModulePhase("layers.5", "backward")
    stage = 5 * stages // 8

    def found(plants: Sequence[Plant]) -> Found:
        times = staged(stages, 10, 0, plants)
        waits = {ModulePhase("", "forward")}
        compared = compare_ranks(table_of(times, waits, patterns=patterns()))
        assert compared is not None
        return [(row.module, row.phase, row.slow_rank) for row in find_stragglers(compared, stages)]

    assert [(*slow, stage)] == found([Plant(rank=stage, place=slow, seconds=10e-3)])
    assert [] == found([])


def test_a_stage_that_was_given_more_layers_is_named_with_its_work() -> None:
    """A pipeline stage that has more layers is flagged, and the cause is its work.

    Rank 1 has six layers and rank 0 has two. Each of the four additional layers takes 2 ms forward
    and 4 ms backward, like all others. If both ranks have equal MACs, the stages are not compared.
    """
    waits = ModulePhase("", "forward")

    def steps(layers: Iterable[int], waiting: float) -> list[dict[ModulePhase, float]]:
        step = {}
        for number in layers:
            step[ModulePhase(f"layers.{number}", "forward")] = 2e-3
            step[ModulePhase(f"layers.{number}", "backward")] = 4e-3
        step[waits] = waiting
        return [step] * 3

    times = {0: steps(range(2), 36e-3), 1: steps(range(2, 8), 12e-3)}
    of_layers = {f"layers.{number}": "layers.*" for number in range(8)}
    table = table_of(times, {waits}, patterns=of_layers)

    def found(macs: Sequence[int]) -> Sequence[Straggler]:
        ranks = tuple(
            Rank(rank=n, node=None, host=None, device=None, coordinates={}, status="ok", macs=each)
            for n, each in enumerate(macs)
        )
        compared = profile(
            {"": weights(0)},
            [],
            run=run(world_size=2),
            ranks=ranks,
            rank_comparison=compare_ranks(table),
        )
        return lflops.stragglers(compared).rows

    (row,) = found((1000, 3000))
    assert ("", "stage", 1) == (row.module, row.phase, row.slow_rank)
    assert ("work", 3.0) == (row.cause, row.work_ratio)
    assert 4 * 6e-3 == pytest.approx(row.seconds_lost)
    assert () == found((1000, 1000))

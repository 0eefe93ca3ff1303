"""Which rank is slow in what, what that costs a step, and how it is said."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed import HashStore

import lflops
from lflops.analysis.analysis import analyze
from lflops.integrations.deepspeed.text.summary import summary
from lflops.model.module_tree import ModuleTree
from lflops.profile.profile import Profile
from lflops.profile.records import Rank, RankComparison, RankDelay, RankWait
from lflops.profile.steps import Step
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.topology import Topology
from lflops.ranks.straggler import Straggler
from lflops.report.ranks import ranks
from lflops.report.report import report_of
from lflops.timing.measure import ASIDE, Divide, Pass, time_passes
from lflops.timing.module_hooks import ModuleTimer
from lflops.timing.module_times import NO_OVERHEAD, attach_module_times
from tests.support.fake_clock import StillClock
from tests.support.profile_builders import profile, run, spread, weights
from tests.support.terminal import drawn
from tests.support.timed_modules import Part

LAYERS = ("layers.0.mlp", "layers.1.mlp")
STEADY = (4e-3, 4.1e-3, 3.9e-3, 4e-3, 4e-3, 4.05e-3)


def excess(
    module: str,
    longer: tuple[float, ...] = STEADY,
    *,
    phase: str = "forward",
    rank: int = 5,
    **fields: Any,
) -> RankDelay:
    """Beyond the 10 ms that the others take, step by step; all of it makes the rank late."""
    usual: dict[str, Any] = {
        "seconds": 10e-3 + sorted(longer)[len(longer) // 2],
        "usual": 10e-3,
        "late": longer,
        "intervals": (0,),
    }
    return RankDelay(
        **({"module": module, "phase": phase, "rank": rank, "excess": longer} | usual | fields)
    )


def comparison(*excesses: RankDelay, **fields: Any) -> RankComparison:
    """Of steps of 100 ms."""
    given: dict[str, Any] = {
        "steps": 6,
        "seconds": 0.1,
        "lost_seconds": 5e-3,
        "delays": excesses,
        "waits": (),
        "places": 10,
    }
    return RankComparison(**(given | fields))


def compared(*excesses: RankDelay, **fields: Any) -> Profile:
    """Eight ranks whose clean step takes 100 ms."""
    rows = {name: weights(0) for name in ("", "layers", "layers.0", "layers.1", *LAYERS, "head")}
    each = tuple(
        Rank(rank=n, node=None, host=f"node{n // 4}", device=None, coordinates={}, status="ok")
        for n in range(8)
    )
    step = Step(index=0, kind="unprofiled", seconds=0.1, phases={})
    given: dict[str, Any] = {
        "run": run(world_size=8),
        "ranks": each,
        "rank_comparison": comparison(*excesses),
        "steps": (step,),
    }
    return profile(rows, [], **(given | fields))


def find_stragglers(*excesses: RankDelay, **fields: Any) -> list[tuple[str, str, int]]:
    """Module, phase and rank of each row."""
    given = compared(rank_comparison=comparison(*excesses, **fields))
    return [(row.module, row.phase, row.slow_rank) for row in lflops.stragglers(given).rows]


def test_the_worst_comes_first() -> None:
    """4 ms forward in the head before 2 ms backward in a layer; 14 ms are 1.4 times 10."""
    found = lflops.stragglers(
        compared(excess(LAYERS[0], (2e-3,) * 6, phase="backward", rank=1), excess("head"))
    ).rows
    assert [("head", "forward", 5), (LAYERS[0], "backward", 1)] == [
        (row.module, row.phase, row.slow_rank) for row in found
    ]
    assert [4e-3, 2e-3] == pytest.approx([row.seconds_lost for row in found])
    assert pytest.approx(1.4) == found[0].ratio
    assert [("steady", 6, 6)] * 2 == [(row.pattern, row.slow_steps, row.steps) for row in found]


def test_only_what_makes_the_rank_late_is_its_cost() -> None:
    """Of 4 ms longer in the head, others waited 1.5 ms.

    0.5 ms would be below a hundredth of the step.
    """
    (row,) = lflops.stragglers(compared(excess("head", late=(1.5e-3,) * 6))).rows
    assert pytest.approx(1.5e-3) == row.seconds_lost
    assert [] == find_stragglers(excess("head", late=(0.5e-3,) * 6))


NOISE = {
    "as often shorter": (4e-3, -4e-3, 5e-3, -5e-3, 3e-3, -3e-3),
    "wide": (0.1e-3, 12e-3, 2e-3, 0.4e-3, 9e-3, 4e-3),
    "once": (0.0, 40e-3, 0.0, 0.1e-3, 0.0, 0.0),
}


@pytest.mark.parametrize("seconds", NOISE.values(), ids=NOISE)
def test_noise_accuses_nobody(seconds: tuple[float, ...]) -> None:
    """A difference that comes and goes is none of the rank's."""
    assert [] == find_stragglers(excess("head", seconds))


def test_the_slowest_of_many_ranks_is_slow_by_chance() -> None:
    """4 ms among ranks that differ by 1 ms is six standard deviations of eight ranks too few.

    By 0.4 ms it is a culprit.
    """
    assert [] == find_stragglers(excess("head", noise=1e-3))
    assert [("head", "forward", 5)] == find_stragglers(excess("head", noise=0.4e-3))


THIRD = (0.0, 0.1e-3, 20e-3, -0.1e-3, 0.0, 20e-3, 0.1e-3, 0.0, 20.1e-3)


def test_bursts_are_told_from_noise_by_how_often_ranks_are_so_late() -> None:
    """20 ms in a third of the steps: 6.67 ms a step on the mean.

    Where any place of 10 s in all has 300 such excesses, it is noise.
    """
    given = compared(rank_comparison=comparison(excess("head", THIRD), steps=9))
    (row,) = lflops.stragglers(given).rows
    assert ("intermittent", 3, 9, pytest.approx(20e-3 / 3), None) == (
        row.pattern,
        row.slow_steps,
        row.steps,
        row.seconds_lost,
        row.ratio,
    )
    large_excesses: dict[str, Any] = {
        "steps": 9,
        "large_excesses": (0, 0, 0, 0, 0, 300),
        "large_excess_seconds": 10.0,
    }
    assert [] == find_stragglers(excess("head", THIRD), **large_excesses)


def test_bursts_that_other_ranks_have_too_are_noise() -> None:
    """Eight of 63 steps of the seven others are as slow there."""
    assert [] == find_stragglers(excess("head", THIRD, largest_of_others=(20e-3,) * 8), steps=9)


def test_one_long_disturbance_is_no_burst() -> None:
    """Three slow steps in a row, as when another process runs."""
    in_a_row = (0.0, 0.1e-3, 20e-3, 20e-3, 20e-3, 0.0, 0.1e-3, 0.0, 0.0)
    large_excesses: dict[str, Any] = {
        "steps": 9,
        "large_excesses": (0, 0, 0, 0, 0, 4),
        "large_excess_seconds": 10.0,
    }
    assert [] == find_stragglers(excess("head", in_a_row), **large_excesses)
    assert [("head", "forward", 5)] == find_stragglers(excess("head", THIRD), **large_excesses)


def test_a_collective_that_begins_there_comes_in_bursts_of_its_own() -> None:
    """Steady work there is the module's; bursts are those of the threads that reduce."""
    assert [] == find_stragglers(excess("head", THIRD, begins_collective=True), steps=9)
    assert [("head", "forward", 5)] == find_stragglers(excess("head", begins_collective=True))


def test_a_rank_that_is_slow_in_everything_is_one_row() -> None:
    """1 ms longer in each of 40 modules of 10 ms, 40 in all: each of them is explained by that."""
    modules = [excess(f"layers.{n}.mlp", (1e-3,) * 6, late=(40e-3,) * 6) for n in range(40)]
    everything = excess("", (40e-3,) * 6, phase="all", usual=0.4, seconds=0.44)
    assert [("", "all", 5)] == find_stragglers(everything, *modules)


def test_one_module_does_not_make_a_rank_slow_in_everything() -> None:
    """Of 5 ms that the rank is late 4 are the head's.

    What all else is slower by is below the noise.
    """
    head = excess("head", (30e-3,) * 6, late=(32e-3,) * 6)
    everything = excess("", (2e-3,) * 6, phase="all", usual=0.1, seconds=0.102, late=(32e-3,) * 6)
    assert ("head", "forward", 5) == find_stragglers(everything, head)[0]


def test_one_of_several_like_modules_is_named_alone() -> None:
    """Not the four of its kind. Where all are slow, they are one row."""
    one = excess("layers.1.mlp", (8e-3,) * 6)
    kind = excess("layers.*.mlp", (8.2e-3,) * 6, modules=4)
    assert [("layers.1.mlp", "forward", 5)] == find_stragglers(kind, one)
    much = excess("layers.*.mlp", (9.5e-3,) * 6, modules=4, late=(12e-3,) * 6)
    assert [
        ("layers.1.mlp", 1, pytest.approx(8e-3)),
        ("layers.*.mlp", 4, pytest.approx(1.5e-3)),
    ] == [
        (row.module, row.modules, row.seconds_lost)
        for row in lflops.stragglers(compared(much, one)).rows
    ]
    each = [excess(f"layers.{n}.mlp", (2e-3,) * 6, late=(8e-3,) * 6) for n in range(4)]
    (row,) = lflops.stragglers(compared(excess("layers.*.mlp", (8e-3,) * 6, modules=4), *each)).rows
    assert ("layers.*.mlp", 4) == (row.module, row.modules)


def test_what_one_culprit_explains_is_not_explained_twice() -> None:
    """The rank is 10 ms late, and takes 9 ms longer for data.

    That the head takes 9 ms longer too costs 1 ms.
    """
    data = excess("", (9e-3,) * 6, phase="data", late=(10e-3,) * 6)
    found = lflops.stragglers(compared(data, excess("head", (8.9e-3,) * 6, late=(10e-3,) * 6))).rows
    assert [("data", pytest.approx(9e-3)), ("forward", pytest.approx(1e-3))] == [
        (row.phase, row.seconds_lost) for row in found
    ]
    assert 2 == len(find_stragglers(data, excess("head", (8.9e-3,) * 6, intervals=(1,))))


def test_of_medians_no_steps_are_said() -> None:
    """Quartiles stand for them."""
    (row,) = lflops.stragglers(
        compared(
            rank_comparison=comparison(excess("head", (4e-3,) * 3), steps=3, from_quartiles=True)
        )
    ).rows
    assert (None, None) == (row.slow_steps, row.steps)


def test_a_run_that_was_not_compared_accuses_nobody() -> None:
    """One rank, or no times."""
    found = lflops.stragglers(compared(rank_comparison=None))
    assert ((), (), None, None) == (found.rows, found.waits, found.lost_share, found.step_seconds)


def said(given: Profile) -> dict[str, str]:
    """The lines by their labels, those without one with the line above."""
    lines: dict[str, str] = {}
    for label, value in ranks(analyze(given)):
        key = label or list(lines)[-1]
        lines[key] = f"{lines[key]} | {value}" if key in lines else value
    return lines


def test_the_worst_three_are_a_sentence_each() -> None:
    """And how many more there are."""
    given = compared(
        rank_comparison=comparison(
            excess(LAYERS[0], (31e-3,) * 6),
            excess("", (50e-3,) * 6, phase="data", rank=1, usual=0.3e-3, seconds=50.3e-3),
            excess("", (9e-3,) * 6, phase="all", rank=2, usual=90e-3, seconds=99e-3),
            excess("head", rank=3),
        )
    )
    assert (
        "rank 1 on node0 is ×168 slower than the other ranks in data loading, in 6 of 6 steps: costs 50.0 ms a step"
        " | rank 5 on node1 is 310.0 % slower than the other ranks in layers.0.mlp forward, in 6 of 6 steps: costs 31.0 ms a step"
        " | rank 2 on node0 is 10.0 % slower than the other ranks in everything, in 6 of 6 steps: costs 9.00 ms a step"
        " | 1 more"
    ) == said(given)["slow ranks"]


def test_ranks_of_one_host_are_said_to_be() -> None:
    """Four slow ranks on node1; where all ranks are on one host it is not named."""
    four = [excess("head", (n * 1e-3,) * 6, rank=n) for n in (4, 5, 6, 7)]
    assert said(compared(rank_comparison=comparison(*four)))["slow ranks"].endswith(
        " | 1 more, all of them on node1"
    )
    other = compared(rank_comparison=comparison(*four[:3], excess("head", rank=1)))
    assert said(other)["slow ranks"].endswith(" | 1 more")
    one = replace(other, ranks=tuple(replace(rank, host="node0") for rank in other.ranks))
    assert said(one)["slow ranks"].startswith("rank 6 is ")


def test_a_rank_that_costs_much_is_in_the_first_sentences() -> None:
    """6 of 100 ms; 4 are left to the list."""
    slow = compared(excess("", (6e-3,) * 6, phase="all", usual=60e-3, seconds=66e-3))
    sentence = "Rank 5 on node1 makes the other ranks wait for 6.0 % of the pass (6.00 ms): it is slow in everything."
    assert sentence == report_of(analyze(slow)).verdict.why[0]
    by_clean_steps = replace(slow, rank_comparison=None, unprofiled_comparison=slow.rank_comparison)
    assert sentence == report_of(analyze(by_clean_steps)).verdict.why[0]
    assert not any(
        "Rank" in each for each in report_of(analyze(compared(excess("head")))).verdict.why
    )


def test_bursts_and_kinds_are_said_as_such() -> None:
    """Without a ratio of medians, which the bursts are not in; with the number of modules."""
    burst = excess("head", THIRD)
    assert (
        "rank 5 on node1 is slower than the other ranks in head forward, in 3 of 9 steps: costs 6.67 ms a step"
        == said(compared(rank_comparison=comparison(burst, steps=9)))["slow ranks"]
    )
    kind = excess("layers.*.mlp", (8e-3,) * 6, modules=4)
    assert (
        "in layers.*.mlp forward (4 modules), in 6 of 6 steps: costs 8.00 ms a step"
        in said(compared(kind))["slow ranks"]
    )


def test_who_waits_for_whom_is_said() -> None:
    """The median waiting of seven; of two ranks the one that waits."""
    waits = (
        RankWait(
            module="",
            phase="backward",
            for_rank=3,
            ranks=7,
            seconds=50e-3,
            longest=51e-3,
            longest_rank=0,
        ),
        RankWait(
            module="head",
            phase="forward",
            for_rank=1,
            ranks=1,
            seconds=20e-3,
            longest=20e-3,
            longest_rank=0,
        ),
        RankWait(
            module="", phase="sync", for_rank=0, ranks=1, seconds=5e-3, longest=5e-3, longest_rank=1
        ),
    )
    assert (
        "7 ranks wait 50.0 ms a step for rank 3 in the model's own backward"
        " | rank 0 waits 20.0 ms a step for rank 1 in head forward"
        " | rank 1 waits 5.00 ms a step for rank 0 in Lightning's collectives"
    ) == said(compared(rank_comparison=comparison(waits=waits)))["waiting"]


def test_what_the_run_loses_altogether_is_one_sentence() -> None:
    """4 of 100 ms; where no rank is slower than the other ranks beyond noise, nothing."""
    line = said(compared(rank_comparison=comparison(excess("head"), lost_seconds=4e-3)))[
        "imbalance"
    ]
    assert (
        "with all ranks as fast as the median rank, a step would take 96.0 ms, 4.0 % less" == line
    )
    assert "imbalance" not in said(
        compared(rank_comparison=comparison(excess("head"), lost_seconds=None))
    )
    assert "imbalance" not in said(compared(rank_comparison=comparison(lost_seconds=4e-3)))


def test_equal_ranks_are_said_to_be_equal() -> None:
    """Half a millisecond is below a hundredth of the step."""
    expected = "none: no rank is slower than the other ranks beyond noise"
    assert expected == said(compared(excess("head", (0.5e-3,) * 6)))["slow ranks"]


def test_ranks_that_did_not_answer_are_named() -> None:
    """With their places in the run, as far as these are known."""
    given = compared()
    each = list(given.ranks)
    each[2] = replace(each[2], status="missing", host=None, coordinates={"data": 1, "tensor": 0})
    each[5] = replace(each[5], status="failed")
    each[7] = replace(each[7], status="late", host=None)
    lines = said(replace(given, ranks=tuple(each)))
    assert (
        "5 of 8 reported; failed: 5 (on node1); late: 7; missing: 2 (data 1, tensor 0)"
        == lines["ranks"]
    )
    assert "8 of 8 reported" == said(given)["ranks"]


def test_who_waits_for_data_is_told() -> None:
    """Rank 3 waits 40 ms, the others one."""
    given = compared()
    each = [
        replace(rank, data=spread(40e-3 if rank.rank == 3 else 1e-3), macs=100 + rank.rank)
        for rank in given.ranks
    ]
    lines = said(replace(given, ranks=tuple(each)))
    assert "1.00 ms to 40.0 ms, the most on rank 3" == lines["data wait by rank"]
    assert "828 MACs forward and backward, 100 to 107 on each" == lines["all ranks"]
    assert "CPU time by rank" not in lines


def test_the_lines_are_in_both_texts_and_of_one_rank_there_are_none() -> None:
    """The summary's and the table's."""
    given = compared(excess("head"))
    sentence = "rank 5 on node1 is 40.0 % slower than the other ranks in head forward, in 6 of 6 steps: costs 4.00 ms a step"
    assert any(sentence in line for line in summary(analyze(given)).splitlines())
    assert any(sentence in line for line in drawn(given, width=160))
    assert {} == said(replace(given, ranks=given.ranks[:1]))


class Layers(nn.Module):
    """Two layers of 10 ms forward and 20 ms backward each; the second is slower on a slow rank."""

    def __init__(self, clock: StillClock, slower: float) -> None:
        super().__init__()
        self.first = Part(clock, 0.010, 0.020)
        self.second = Part(clock, 0.010 + slower, 0.020)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_planted_delay_is_found_with_its_rank_its_module_and_its_cost() -> None:
    """Four ranks, each timed for itself.

    The third takes 3 ms longer in `second` forward: 1.3 times as long.

    So it is in each of three clean steps, which say that it is forward, and three hooked ones,
    which say that it is `second`.
    """
    store, reports = HashStore(), []
    for rank in range(4):
        clock = StillClock()
        model = Layers(clock, 0.003 if rank == 2 else 0.0)

        def run_once(divide: Divide, model: Layers = model) -> None:
            out = model(torch.ones(2))
            divide("backward", out)
            out.sum().backward()
            divide(ASIDE)

        passes = time_passes(
            Pass(run_once, first="forward"),
            ModuleTimer(ModuleTree({"": model}), clock),
            clock,
            warmup=0,
            repeats=3,
        )
        with lflops.counting(model) as counted:
            model(torch.ones(2)).sum().backward()
        facts = run(kind="training", stage="train", window=0)
        reports.append(
            attach_module_times(
                replace(counted.profile, run=facts, steps=passes.steps), passes.hooked, NO_OVERHEAD
            )
        )
    four = Topology(world_size=4, coordinates={}, sizes={})
    for rank in (3, 2, 1, 0):
        gather = RankCollector(store, rank, four, timeout=60.0)
        gather.push(*reports[rank])
        found = gather.finish()
    (row,) = lflops.stragglers(found[0]).rows
    expected = Straggler(
        module="second",
        phase="forward",
        modules=1,
        slow_rank=2,
        seconds_lost=pytest.approx(0.003, rel=1e-5),
        pattern="steady",
        slow_steps=6,
        steps=6,
        seconds=pytest.approx(0.013, rel=1e-5),
        usual=pytest.approx(0.010, rel=1e-5),
    )
    assert expected == row

"""Test the search for stragglers: their place, their cost, their causes and the report's lines."""

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
from lflops.profile.records import Rank, RankComparison, RankDelay, RankWait, Straggler
from lflops.profile.steps import Step
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.topology import Topology
from lflops.report.ranks import ranks
from lflops.report.summary_facts import report_of
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
    """Return the delay of a rank in one place.

    The other ranks take 10 ms there. `longer` is the excess in each step; by default, all of it
    makes the rank late.
    """
    median = sorted(longer)[len(longer) // 2]
    given: dict[str, Any] = {
        "module": module,
        "phase": phase,
        "rank": rank,
        "excess": longer,
        "seconds": 10e-3 + median,
        "usual": 10e-3,
        "late": longer,
        "intervals": (0,),
    }
    return RankDelay(**(given | fields))


def comparison(*excesses: RankDelay, **fields: Any) -> RankComparison:
    """Return a comparison of six steps of 100 ms with these delays."""
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
    """Return a profile of eight ranks with these delays, whose unprofiled step takes 100 ms."""
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
    """Return the module, phase and rank of each straggler."""
    given = compared(rank_comparison=comparison(*excesses, **fields))
    return [(row.module, row.phase, row.slow_rank) for row in lflops.stragglers(given).rows]


def test_the_worst_comes_first() -> None:
    """The straggler with the highest cost comes first.

    It costs 4 ms in forward of the head, and the other one 2 ms in backward of a layer. The ratio
    of 14 ms and 10 ms is 1.4.
    """
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
    """The cost of a delay is only the time by which it makes the rank late.

    The rank takes 4 ms longer in the head, but the other ranks wait for only 1.5 ms. If they wait
    for 0.5 ms, which is less than 1 % of the step, the rank is not flagged.
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
    """A rank whose excess varies like noise is not flagged."""
    assert [] == find_stragglers(excess("head", seconds))


def test_the_slowest_of_many_ranks_is_slow_by_chance() -> None:
    """If eight ranks differ by 1 ms, one of them may be 4 ms slower by chance.

    If they differ by only 0.4 ms, a rank that is 4 ms slower is flagged.
    """
    assert [] == find_stragglers(excess("head", noise=1e-3))
    assert [("head", "forward", 5)] == find_stragglers(excess("head", noise=0.4e-3))


THIRD = (0.0, 0.1e-3, 20e-3, -0.1e-3, 0.0, 20e-3, 0.1e-3, 0.0, 20.1e-3)


def test_bursts_are_told_from_noise_by_how_often_ranks_are_so_late() -> None:
    """An intermittent delay is reported unless excesses of this size are frequent anywhere.

    The delay of 20 ms in a third of the steps costs 6.67 ms per step. If there are 300 excesses as
    large in 10 s of all times, it is noise.
    """
    given = compared(rank_comparison=comparison(excess("head", THIRD), steps=9))
    (row,) = lflops.stragglers(given).rows
    assert ("intermittent", 3, 9) == (row.pattern, row.slow_steps, row.steps)
    assert pytest.approx(20e-3 / 3) == row.seconds_lost
    assert row.ratio is None
    large_excesses: dict[str, Any] = {
        "steps": 9,
        "large_excesses": (0, 0, 0, 0, 0, 300),
        "large_excess_seconds": 10.0,
    }
    assert [] == find_stragglers(excess("head", THIRD), **large_excesses)


def test_bursts_that_other_ranks_have_too_are_noise() -> None:
    """An intermittent delay is noise if the other ranks have such delays in the same place.

    Of the 63 steps of the seven other ranks, eight are as slow there.
    """
    assert [] == find_stragglers(excess("head", THIRD, largest_of_others=(20e-3,) * 8), steps=9)


def test_one_long_disturbance_is_no_burst() -> None:
    """Three slow steps in a row are not intermittent, because another process may have run then."""
    in_a_row = (0.0, 0.1e-3, 20e-3, 20e-3, 20e-3, 0.0, 0.1e-3, 0.0, 0.0)
    large_excesses: dict[str, Any] = {
        "steps": 9,
        "large_excesses": (0, 0, 0, 0, 0, 4),
        "large_excess_seconds": 10.0,
    }
    assert [] == find_stragglers(excess("head", in_a_row), **large_excesses)
    assert [("head", "forward", 5)] == find_stragglers(excess("head", THIRD), **large_excesses)


def test_a_collective_that_begins_there_comes_in_bursts_of_its_own() -> None:
    """Intermittent delays where a collective begins are ignored; steady delays are reported.

    The threads that communicate cause intermittent delays there. A steady delay is work of the
    module.
    """
    assert [] == find_stragglers(excess("head", THIRD, begins_collective=True), steps=9)
    assert [("head", "forward", 5)] == find_stragglers(excess("head", begins_collective=True))


def test_a_rank_that_is_slow_in_everything_is_one_row() -> None:
    """A rank that is slow in everything has one row, which explains the delay of each module.

    It takes 1 ms longer in each of 40 modules of 10 ms, which is 40 ms in all.
    """
    modules = [excess(f"layers.{n}.mlp", (1e-3,) * 6, late=(40e-3,) * 6) for n in range(40)]
    everything = excess("", (40e-3,) * 6, phase="all", usual=0.4, seconds=0.44)
    assert [("", "all", 5)] == find_stragglers(everything, *modules)


def test_one_module_does_not_make_a_rank_slow_in_everything() -> None:
    """A rank with a delay in one module is not reported as slow in everything.

    Of the 32 ms that the rank is late, 30 ms are in the head.
    """
    head = excess("head", (30e-3,) * 6, late=(32e-3,) * 6)
    everything = excess("", (2e-3,) * 6, phase="all", usual=0.1, seconds=0.102, late=(32e-3,) * 6)
    assert ("head", "forward", 5) == find_stragglers(everything, head)[0]


def test_one_of_several_like_modules_is_named_alone() -> None:
    """If one of four modules of the same kind is slow, only this module is reported.

    If the kind has a further delay, there is a second row with the rest. If all four are slow,
    there is one row for all of them.
    """
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
    """The cost of a delay excludes the lateness that another delay of the rank explains.

    The rank is 10 ms late and takes 9 ms longer for data. It also takes 8.9 ms longer in the head,
    but this explains only the remaining 1 ms. If the delays are in different intervals between
    collectives, they do not explain each other.
    """
    data = excess("", (9e-3,) * 6, phase="data", late=(10e-3,) * 6)
    found = lflops.stragglers(compared(data, excess("head", (8.9e-3,) * 6, late=(10e-3,) * 6))).rows
    assert [("data", pytest.approx(9e-3)), ("forward", pytest.approx(1e-3))] == [
        (row.phase, row.seconds_lost) for row in found
    ]
    assert 2 == len(find_stragglers(data, excess("head", (8.9e-3,) * 6, intervals=(1,))))


def test_of_medians_no_steps_are_said() -> None:
    """If only quartiles are known, as in merged profiles, the numbers of steps are unknown."""
    quartiles = comparison(excess("head", (4e-3,) * 3), steps=3, from_quartiles=True)
    (row,) = lflops.stragglers(compared(rank_comparison=quartiles)).rows
    assert (None, None) == (row.slow_steps, row.steps)


def test_a_run_that_was_not_compared_accuses_nobody() -> None:
    """Without a comparison of ranks, no rank is flagged and the lost time is unknown."""
    found = lflops.stragglers(compared(rank_comparison=None))
    assert ((), (), None, None) == (found.rows, found.waits, found.lost_share, found.step_seconds)


def said(given: Profile) -> dict[str, str]:
    """Return the lines about ranks by their labels.

    A line without a label is joined to the line above it, with ` | ` between them.
    """
    lines: dict[str, str] = {}
    key = ""
    for label, value in ranks(analyze(given)):
        if label:
            key = label
        if key in lines:
            lines[key] += f" | {value}"
        else:
            lines[key] = value
    return lines


def test_the_worst_three_are_a_sentence_each() -> None:
    """The three most expensive stragglers have a sentence each, and then there is their number."""
    given = compared(
        rank_comparison=comparison(
            excess(LAYERS[0], (31e-3,) * 6),
            excess("", (50e-3,) * 6, phase="data", rank=1, usual=0.3e-3, seconds=50.3e-3),
            excess("", (9e-3,) * 6, phase="all", rank=2, usual=90e-3, seconds=99e-3),
            excess("head", rank=3),
        )
    )
    assert (
        "rank 1 on node0 is 168× as slow as the other ranks in data loading, in 6 of 6 steps: "
        "this costs 50.0 ms per step"
        " | rank 5 on node1 is 310.0 % slower than the other ranks in the forward of layers.0.mlp, "
        "in 6 of 6 steps: this costs 31.0 ms per step"
        " | rank 2 on node0 is 10.0 % slower than the other ranks in all phases, in 6 of 6 steps: "
        "this costs 9.00 ms per step"
        " | 1 more"
    ) == said(given)["slow ranks"]


def test_ranks_of_one_host_are_said_to_be() -> None:
    """If all slow ranks are on one host, this is reported.

    Here, four slow ranks are on node1. If all ranks of the run are on one host, it is not named.
    """
    four = [excess("head", (n * 1e-3,) * 6, rank=n) for n in (4, 5, 6, 7)]
    assert said(compared(rank_comparison=comparison(*four)))["slow ranks"].endswith(
        " | 1 more, all of them on node1"
    )
    other = compared(rank_comparison=comparison(*four[:3], excess("head", rank=1)))
    assert said(other)["slow ranks"].endswith(" | 1 more")
    one = replace(other, ranks=tuple(replace(rank, host="node0") for rank in other.ranks))
    assert said(one)["slow ranks"].startswith("rank 6 is ")


def test_a_rank_that_costs_much_is_in_the_first_sentences() -> None:
    """A rank that costs 6 of 100 ms is in the first sentences of the report.

    This holds for module-timing steps and for unprofiled steps. A rank that costs 4 ms is only in
    the list of slow ranks.
    """
    slow = compared(excess("", (6e-3,) * 6, phase="all", usual=60e-3, seconds=66e-3))
    sentence = (
        "Rank 5 on node1 makes the other ranks wait for 6.0 % of the pass (6.00 ms): it is slow in "
        "all phases."
    )
    assert sentence == report_of(analyze(slow)).verdict.why[0]
    unprofiled = replace(slow, rank_comparison=None, unprofiled_comparison=slow.rank_comparison)
    assert sentence == report_of(analyze(unprofiled)).verdict.why[0]
    less_slow = report_of(analyze(compared(excess("head"))))
    assert not any("Rank" in each for each in less_slow.verdict.why)


def test_bursts_and_kinds_are_said_as_such() -> None:
    """The line of an intermittent delay has no ratio, because the medians do not show the delay.

    The line of a kind of modules has the number of modules.
    """
    burst = excess("head", THIRD)
    assert (
        "rank 5 on node1 is slower than the other ranks in the forward of head, in 3 of 9 steps: "
        "this costs 6.67 ms per step"
    ) == said(compared(rank_comparison=comparison(burst, steps=9)))["slow ranks"]
    kind = excess("layers.*.mlp", (8e-3,) * 6, modules=4)
    assert (
        "in the forward of layers.*.mlp (4 modules), in 6 of 6 steps: this costs 8.00 ms per step"
        in said(compared(kind))["slow ranks"]
    )


def test_who_waits_for_whom_is_said() -> None:
    """The report says which ranks wait for which rank, how long, and where.

    If several ranks wait, it has their median time. If one rank waits, it has the number of this
    rank.
    """
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
        "7 ranks wait 50.0 ms per step for rank 3 in backward outside the layers"
        " | rank 0 waits 20.0 ms per step for rank 1 in the forward of head"
        " | rank 1 waits 5.00 ms per step for rank 0 in Lightning's collectives"
    ) == said(compared(rank_comparison=comparison(waits=waits)))["waiting"]


def test_what_the_run_loses_altogether_is_one_sentence() -> None:
    """The total loss of 4 of 100 ms is one sentence.

    There is no such sentence if the loss is unknown, or if no rank is a straggler.
    """
    known = comparison(excess("head"), lost_seconds=4e-3)
    assert (
        "if all ranks were as fast as the median rank, a step would take 96.0 ms, 4.0 % less"
        == said(compared(rank_comparison=known))["imbalance"]
    )
    unknown = comparison(excess("head"), lost_seconds=None)
    assert "imbalance" not in said(compared(rank_comparison=unknown))
    without_straggler = comparison(lost_seconds=4e-3)
    assert "imbalance" not in said(compared(rank_comparison=without_straggler))


def test_equal_ranks_are_said_to_be_equal() -> None:
    """A delay of 0.5 ms is less than 1 % of the step, so the report says that no rank is slow."""
    expected = "none: no rank is slower than the other ranks by more than noise"
    assert expected == said(compared(excess("head", (0.5e-3,) * 6)))["slow ranks"]


def test_ranks_that_did_not_answer_are_named() -> None:
    """Ranks without a report are listed, with their host or coordinates if these are known."""
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
    """The report has the range of the data wait over the ranks: 40 ms on rank 3, 1 ms on others.

    It also has the MACs of all ranks. The CPU time is unknown here, so it has no line.
    """
    given = compared()
    each = []
    for rank in given.ranks:
        data_wait = 40e-3 if rank.rank == 3 else 1e-3
        each.append(replace(rank, data=spread(data_wait), macs=100 + rank.rank))
    lines = said(replace(given, ranks=tuple(each)))
    assert "1.00 ms to 40.0 ms, the longest on rank 3" == lines["data wait by rank"]
    assert "828 MACs in forward and backward, 100 to 107 per rank" == lines["all ranks"]
    assert "CPU time by rank" not in lines


def test_the_lines_are_in_both_texts_and_of_one_rank_there_are_none() -> None:
    """Both the summary and the terminal report have the lines about ranks.

    For a run with one rank, there are none.
    """
    given = compared(excess("head"))
    sentence = (
        "rank 5 on node1 is 40.0 % slower than the other ranks in the forward of head, in 6 of 6 "
        "steps: this costs 4.00 ms per step"
    )
    assert any(sentence in line for line in summary(analyze(given)).splitlines())
    assert any(sentence in line for line in drawn(given, width=160))
    assert {} == said(replace(given, ranks=given.ranks[:1]))


class Layers(nn.Module):
    """Two layers of 10 ms forward and 20 ms backward; the second takes `slower` seconds longer."""

    def __init__(self, clock: StillClock, slower: float) -> None:
        super().__init__()
        self.first = Part(clock, 0.010, 0.020)
        self.second = Part(clock, 0.010 + slower, 0.020)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_planted_delay_is_found_with_its_rank_its_module_and_its_cost() -> None:
    """A delay is found with its rank, its module and its cost, from timing to the result.

    Four ranks are timed separately. The third takes 3 ms longer in forward of `second`, which is
    1.3 times as long. Its three unprofiled steps show that the delay is in forward, and its three
    module-timing steps show that it is in `second`.
    """
    store = HashStore()
    reports = []
    for rank in range(4):
        clock = StillClock()
        model = Layers(clock, 0.003 if rank == 2 else 0.0)

        def run_once(divide: Divide, model: Layers = model) -> None:
            out = model(torch.ones(2))
            divide("backward", out)
            out.sum().backward()
            divide(ASIDE)

        timer = ModuleTimer(ModuleTree({"": model}), clock)
        passes = time_passes(Pass(run_once, first="forward"), timer, clock, warmup=0, repeats=3)
        with lflops.counting(model) as counted:
            model(torch.ones(2)).sum().backward()
        facts = run(kind="training", stage="train", window=0)
        profile_of_rank = replace(counted.profile, run=facts, steps=passes.steps)
        reports.append(attach_module_times(profile_of_rank, passes.hooked, NO_OVERHEAD))
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

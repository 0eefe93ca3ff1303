"""Which rank is slow in what, what that costs a step, and how it is said."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed import HashStore

import lflops
from lflops.analyze.analysis import analyze
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.ranks.gather import Gather
from lflops.collect.ranks.topology import Topology
from lflops.collect.timing.attach_times import divided
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.stamps import NO_OVERHEAD
from lflops.collect.timing.timed_passes import ASIDE, Divide, Pass, time_passes
from lflops.profile.model import Profile
from lflops.profile.records import Phase, Rank, RankStat, Step
from lflops.report.deepspeed_text.summary import summary
from lflops.report.lines.ranks import ranks
from tests.support.fake_clock import StillClock
from tests.support.profile_builders import profile, run, spread, weights
from tests.support.terminal import drawn
from tests.support.timed_modules import Part

LAYERS = ("layers.0.mlp", "layers.1.mlp")


def stat(module: str, *, high: float, phase: Phase = "forward", rank: int = 5, **fields: Any) -> RankStat:
    """Ten ms on the median rank, without a collective in it, the slow rank slow in each of four steps."""
    usual: dict[str, Any] = {"slowest_steps": 4, "steps": 4, "lost_seconds": high - 10e-3, "waiting": "none"}
    return RankStat(**({"module": module, "phase": phase, "low": 9e-3, "median": 10e-3, "high": high, "high_rank": rank} | usual | fields))


def compared(*stats: RankStat, **fields: Any) -> Profile:
    """Eight ranks whose clean step takes 100 ms."""
    rows = {name: weights(0) for name in ("", "layers", "layers.0", "layers.1", *LAYERS, "head")}
    each = tuple(Rank(rank=n, node=None, host=f"node{n // 4}", device=None, coordinates={}, status="ok") for n in range(8))
    step = Step(index=0, kind="clean", seconds=0.1, phases={})
    given: dict[str, Any] = {"run": run(world_size=8), "ranks": each, "rank_stats": stats, "steps": (step,)}
    return profile(rows, [], **(given | fields))


def test_the_worst_comes_first() -> None:
    """4 ms lost forward in the head before 2 ms backward in a layer: 40 % and 20 % over the median."""
    found = lflops.imbalance(compared(stat(LAYERS[0], high=12e-3, phase="backward", rank=1), stat("head", high=14e-3)))
    assert [("head", "forward", 5), (LAYERS[0], "backward", 1)] == [(row.module, row.phase, row.slow_rank) for row in found.rows]
    assert [0.4, 0.2] == pytest.approx([row.spread for row in found.rows])
    assert [4e-3, 2e-3] == pytest.approx([row.seconds_lost for row in found.rows])


def test_what_is_lost_is_lost_step_by_step() -> None:
    """Another rank is slow each time: by their medians no rank is slow, and yet the step costs 3 ms more."""
    (row,) = lflops.imbalance(compared(stat("head", high=10e-3, slowest_steps=1, lost_seconds=3e-3))).rows
    assert (3e-3, False, 1, 4) == (row.seconds_lost, row.always, row.slowest_steps, row.steps)


def test_where_steps_are_not_known_medians_tell() -> None:
    """2 ms between the slow rank's and the median one's; nobody knows whether always."""
    (row,) = lflops.imbalance(compared(stat("head", high=12e-3, slowest_steps=None, steps=None, lost_seconds=None))).rows
    assert (pytest.approx(2e-3), None, None) == (row.seconds_lost, row.always, row.steps)


def test_modules_of_one_kind_stand_together() -> None:
    """Two layers of 10 ms in which rank 5 takes 12 and 13: 5 of 20 ms. A layer in which rank 2 is slow is no part of it."""
    stats = stat(LAYERS[0], high=12e-3), stat(LAYERS[1], high=13e-3, slowest_steps=3), stat(LAYERS[1], high=11e-3, phase="backward", rank=2)
    together, alone = lflops.imbalance(compared(*stats)).alike
    assert ("layers.*.mlp", 2, 5, False, 7, 8) == (
        together.module,
        together.modules,
        together.slow_rank,
        together.always,
        together.slowest_steps,
        together.steps,
    )
    assert (0.25, 5e-3) == (pytest.approx(together.spread), pytest.approx(together.seconds_lost))
    assert (LAYERS[1], 1, 2) == (alone.module, alone.modules, alone.slow_rank)


def test_a_median_of_nothing_has_no_share() -> None:
    """Only the slow rank takes any time there."""
    (row,) = lflops.imbalance(compared(stat("head", high=12e-3, median=0.0, low=0.0, lost_seconds=12e-3))).rows
    assert (None, 12e-3) == (row.spread, row.seconds_lost)


def said(given: Profile) -> dict[str, str]:
    """The lines by their labels, those without one with the line above."""
    lines: dict[str, str] = {}
    for label, value in ranks(analyze(given)):
        key = label or list(lines)[-1]
        lines[key] = f"{lines[key]} | {value}" if key in lines else value
    return lines


def test_the_worst_three_are_a_sentence_each() -> None:
    """Of five, of which one costs less than a hundredth of the step: 0.5 of 100 ms."""
    stats = [
        stat(LAYERS[0], high=11.4e-3, lost_seconds=31e-3),
        stat("head", high=12e-3, slowest_steps=3, phase="backward"),
        stat("", high=11.5e-3, rank=1),
        stat("layers", high=11.2e-3),
        stat("layers.0", high=10.5e-3),
    ]
    assert (
        "rank 5 is 14.0 % slower than the median in layers.0.mlp forward, every step: 31.00 ms a step"
        " | rank 5 is 20.0 % slower than the median in head backward, in 3 of 4 cases: 2.00 ms a step"
        " | rank 1 is 15.0 % slower than the median in the root's own forward, every step: 1.50 ms a step"
    ) == said(compared(*stats))["slow ranks"]


def test_where_ranks_may_be_waiting_nobody_is_called_slow() -> None:
    """A collective ran in the head, nobody knows how long."""
    lines = said(compared(stat("head", high=90e-3, waiting="unknown")))
    assert "not told: head forward, in which ranks wait for each other, nobody knows how long" == lines["slow ranks"]


def test_equal_ranks_are_said_to_be_equal() -> None:
    """Half a millisecond is noise."""
    assert "none costs more than 1.0 % of the step" == said(compared(stat("head", high=10.5e-3)))["slow ranks"]


def test_ranks_that_did_not_answer_are_named() -> None:
    """With their places in the run, as far as these are known."""
    given = compared()
    each = list(given.ranks)
    each[2] = replace(each[2], status="missing", host=None, coordinates={"data": 1, "tensor": 0})
    each[5] = replace(each[5], status="failed")
    each[7] = replace(each[7], status="late", host=None)
    lines = said(replace(given, ranks=tuple(each)))
    assert "5 of 8 answered in full; failed: 5 (on node1); late: 7; missing: 2 (data 1, tensor 0)" == lines["ranks"]
    assert "all 8 answered" == said(given)["ranks"]


def test_who_waits_for_data_is_told() -> None:
    """Rank 3 waits 40 ms, the others one."""
    given = compared()
    each = [replace(rank, data=spread(40e-3 if rank.rank == 3 else 1e-3), macs=100 + rank.rank) for rank in given.ranks]
    lines = said(replace(given, ranks=tuple(each)))
    assert "1.00 ms to 40.00 ms, the most on rank 3" == lines["data wait by rank"]
    assert "828 MACs forward and backward, 100 to 107 on each" == lines["all ranks"]
    assert "CPU time by rank" not in lines


def test_the_lines_are_in_both_texts_and_of_one_rank_there_are_none() -> None:
    """The summary's and the table's."""
    given = compared(stat("head", high=14e-3))
    sentence = "rank 5 is 40.0 % slower than the median in head forward, every step: 4.00 ms a step"
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
    """Four ranks, each timed for itself; the third takes 3 ms longer in `second` forward: 30 % over the median, in each of two steps."""
    store, reports = HashStore(), []
    for rank in range(4):
        clock = StillClock()
        model = Layers(clock, 0.003 if rank == 2 else 0.0)

        def run_once(divide: Divide, model: Layers = model) -> None:
            out = model(torch.ones(2))
            divide("backward", out)
            out.sum().backward()
            divide(ASIDE)

        passes = time_passes(Pass(run_once, first="forward"), ModuleTimer(ModuleTree({"": model}), clock), clock, warmup=0, repeats=2)
        with lflops.counting(model) as counted:
            model(torch.ones(2)).sum().backward()
        facts = run(kind="training", stage="train", window=0)
        reports.append(divided(replace(counted.profile, run=facts, steps=passes.steps), passes.hooked, NO_OVERHEAD))
    four = Topology(world_size=4, coordinates={}, sizes={})
    for rank in (3, 2, 1, 0):
        gather = Gather(store, rank, four, timeout=60.0)
        gather.push(*reports[rank])
        found = gather.finish()
    worst, *others = lflops.imbalance(found[0]).rows
    assert ("second", "forward", 2, True, 2) == (worst.module, worst.phase, worst.slow_rank, worst.always, worst.steps)
    assert (0.3, 0.003) == (pytest.approx(worst.spread, rel=1e-5), pytest.approx(worst.seconds_lost, rel=1e-5))
    assert [0.0] * len(others) == pytest.approx([row.seconds_lost for row in others], abs=1e-8)

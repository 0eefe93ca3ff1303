"""Test which rank is late and where, with tables of steps whose times are written by hand."""

from collections.abc import Mapping, Sequence

import pytest

from lflops.profile.records import ModulePhase, RankComparison, RankDelay
from lflops.ranks.merge.rank_comparison import SelfWork, compare_ranks, times_last
from lflops.ranks.merge.rank_series import RankSeries
from lflops.ranks.merge.rank_table import intervals_of, table_of

DATA = ModulePhase("", "data")
OPTIMIZER = ModulePhase("", "optimizer")
SYNC = ModulePhase("", "sync")
BODY = ModulePhase("body", "forward")
HEAD = ModulePhase("head", "forward")
END = ModulePhase("", "backward")
WAITS = {END, SYNC}
PATTERNS = {f"layers.{n}": "layers.*" for n in range(8)}
PATTERNS |= {f"layers.{n}.mlp": "layers.*.mlp" for n in range(8)}


def compared(
    times: Mapping[int, Sequence[Mapping[ModulePhase, float]]],
    **options: Mapping[ModulePhase, SelfWork],
) -> RankComparison:
    """Return the comparison of the ranks."""
    found = compare_ranks(table_of(times, WAITS, patterns=PATTERNS), **options)
    assert found is not None
    return found


def step(**seconds: float) -> dict[ModulePhase, float]:
    """Return a step; by default, it takes 20 s.

    16 s of work come before the wait for gradients, and 2 s before the next synchronization.
    """
    usual = {
        "data": 1.0,
        "body": 10.0,
        "head": 5.0,
        "end": 1.0,
        "optimizer": 2.0,
        "sync": 1.0,
    } | seconds
    return dict(zip((DATA, BODY, HEAD, END, OPTIMIZER, SYNC), usual.values(), strict=True))


def of(found: RankComparison, rank: int) -> dict[tuple[str, str], RankDelay]:
    """Return the delays of a rank by module and phase, without its delay in everything."""
    delays = {}
    for each in found.delays:
        if each.rank == rank and each.phase != "all":
            delays[each.module, each.phase] = each
    return delays


def test_a_place_where_ranks_wait_ends_an_interval() -> None:
    """Each place in which ranks wait for each other ends an interval.

    Backward runs in the reverse order of the places. The interval of the optimizer ends with
    Lightning's synchronization.
    """
    up = ModulePhase("up", "backward")
    down = ModulePhase("down", "backward")
    places = [OPTIMIZER, SYNC, DATA, END, BODY, up, HEAD, down]
    assert {DATA: 0, BODY: 0, HEAD: 0, down: 0, up: 0, OPTIMIZER: 1} == intervals_of(places, WAITS)
    gathers = ModulePhase("unit", "forward")
    places = [DATA, BODY, gathers, HEAD, END, OPTIMIZER, SYNC]
    assert {DATA: 0, BODY: 0, HEAD: 1, OPTIMIZER: 2} == intervals_of(places, {gathers, END, SYNC})


def test_without_a_collective_at_its_end_a_steps_last_interval_goes_on_in_the_next() -> None:
    """Without a collective at the end of the step, the optimizer is in the first interval.

    Other ranks wait for a slow optimizer when they wait for the next gradients.
    """
    assert {DATA: 0, BODY: 0, OPTIMIZER: 0} == intervals_of([DATA, BODY, END, OPTIMIZER], {END})


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    """A rank is compared with the median of the other ranks.

    Of the times 1, 2, 3 and 9, the median without the first is 3, and without the last it is 2. Of
    two ranks, each is compared with the other.
    """
    four = RankSeries({0: (1.0,), 1: (2.0,), 2: (3.0,), 3: (9.0,)})
    assert {0: (3.0,), 1: (3.0,), 2: (2.0,), 3: (2.0,)} == four.median_of_others()
    assert {0: (9.0,), 1: (1.0,)} == RankSeries({0: (1.0,), 1: (9.0,)}).median_of_others()


def test_the_slow_rank_is_late_and_the_one_that_waits_is_not() -> None:
    """Only the slow rank has a delay, not the rank that waits for it.

    Rank 1 takes 4 s longer in the body, and rank 0 waits 4 s longer at the end of backward.
    """
    found = compared({0: [step(end=5)] * 3, 1: [step(body=14)] * 3})
    assert {} == of(found, 0)
    (body,) = of(found, 1).values()
    assert ("body", "forward") == (body.module, body.phase)
    assert ((4, 4, 4), (4, 4, 4)) == (body.excess, body.late)
    assert (14, 10) == (body.seconds, body.usual)
    (wait,) = found.waits
    assert ("", "backward") == (wait.module, wait.phase)
    assert (1, 1) == (wait.for_rank, wait.ranks)
    assert (4, 0) == (wait.seconds, wait.longest_rank)


def test_a_rank_that_is_slow_here_and_fast_there_is_late_by_the_rest() -> None:
    """A rank that is slow in one place and fast in another is late by the difference.

    It takes 4 s longer in the body and 3 s less in the head, before the same collective. So the
    other rank waits for 1 s.
    """
    found = compared({0: [step(end=2)] * 3, 1: [step(body=14, head=2)] * 3})
    assert (1, 1, 1) == of(found, 1)["body", "forward"].late


def test_two_ranks_may_both_cost_something() -> None:
    """Two ranks may both be late: rank 1 in the body, and rank 0 in the optimizer.

    Each is late in its own interval, although both work for 22 s in the step.
    """
    found = compared({0: [step(end=5, optimizer=6)] * 3, 1: [step(body=14, sync=5)] * 3})
    assert [("", "optimizer")] == list(of(found, 0))
    assert [("body", "forward")] == list(of(found, 1))
    assert 4 + 4 == found.lost_seconds


def test_what_a_step_loses_is_what_the_last_rank_takes_longer_than_the_median_one() -> None:
    """The lost time of a step is the time of the last rank minus the time of the median rank.

    Before the first collective, the ranks work for 16, 17 and 22 s, so 5 s are lost.
    """
    found = compared({0: [step()], 1: [step(head=6)], 2: [step(data=7)]})
    assert 5 == found.lost_seconds


def test_the_last_rank_of_each_step_is_counted() -> None:
    """It is counted in how many steps each rank is the last: rank 2 in two of three steps."""
    table = table_of(
        {
            0: [step()] * 3,
            1: [step(), step(), step(head=6)],
            2: [step(data=7), step(data=8), step()],
        },
        WAITS,
    )
    assert {2: 2, 1: 1, 0: 0} == times_last(table)


def test_waiting_is_told_from_transfer_where_traces_know_it() -> None:
    """If traces measured a collective, its time is divided into waiting and transfer.

    Rank 0 spent 4 s in the all-reduce of the head. Rank 1, for which it waits, spent 0.5 s, which
    is the transfer. No rank has a delay in the head.
    """
    known = {HEAD: {0: 4.0, 1: 0.5}}
    found = compare_ranks(
        table_of({0: [step(head=9)], 1: [step(head=5.5, body=13.5)]}, {HEAD, *WAITS}, (), known)
    )
    assert found is not None
    assert [("body", "forward", 1, (3.5,))] == [
        (e.module, e.phase, e.rank, e.excess) for e in found.delays if e.phase != "all"
    ]
    (wait,) = found.waits
    assert ("head", "forward", 1) == (wait.module, wait.phase, wait.for_rank)
    assert (3.5, 3.5, 0.5) == (wait.seconds, wait.traced_seconds, wait.transfer_seconds)


def test_one_disturbance_is_no_waiting_of_the_run() -> None:
    """A single long wait does not count as a wait of the run.

    Rank 0 waits for 1 s in five of six steps and for 60 s in one, so its wait is 1 s, not the mean
    of 10.8 s. A wait in every third step counts.
    """

    def waiting(*seconds: float) -> tuple[float, float | None]:
        waits = [step(end=1 + each) for each in seconds]
        is_late = [step(body=10 + each) for each in seconds]
        found = compared({0: waits, 1: is_late})
        (wait,) = found.waits
        return wait.seconds, found.lost_seconds

    assert (1.0, 1.0) == waiting(1, 1, 60, 1, 1, 1)
    assert (pytest.approx(40 / 6), pytest.approx(40 / 6)) == waiting(0, 0, 20, 0, 0, 20)


def test_modules_that_repeat_are_compared_together_too() -> None:
    """Modules of the same kind are also compared together.

    A delay of 0.5 s in each of eight layers is 4 s in all of them.
    """
    layers = [ModulePhase(f"layers.{n}.mlp", "forward") for n in range(8)]
    usual = dict.fromkeys(layers, 2.0) | {END: 1.0, SYNC: 0.0}
    slow = dict.fromkeys(layers, 2.5) | {END: 1.0, SYNC: 0.0}
    found = compared({0: [usual] * 3, 1: [slow] * 3})
    together = of(found, 1)["layers.*.mlp", "forward"]
    assert 8 == together.modules
    assert (20.0, 16.0) == (together.seconds, together.usual)
    assert (4.0,) * 3 == together.excess


def stage(number: int, *, seconds: float, waiting: float) -> dict[ModulePhase, float]:
    """Return a step of a pipeline stage with one layer."""
    return {
        ModulePhase(f"layers.{number}", "forward"): seconds,
        ModulePhase("", "forward"): waiting,
    }


def test_a_module_that_one_rank_alone_has_is_compared_with_those_like_it() -> None:
    """A module that only one rank has is compared with similar modules of other ranks.

    Two pipeline stages work in turn. The layer of the second stage takes 6 s and that of the first
    takes 2 s, and the first stage waits for 6 s.
    """
    times = {0: [stage(0, seconds=2, waiting=6)] * 3, 1: [stage(1, seconds=6, waiting=2)] * 3}
    work = {ModulePhase(f"layers.{n}", "forward"): SelfWork(100, 10) for n in range(2)}
    found = compare_ranks(table_of(times, {ModulePhase("", "forward")}, patterns=PATTERNS), work)
    assert found is not None
    rows = [(each.module, each.phase, each.rank, each.excess, each.late) for each in found.delays]
    whole = ("", "stage", 1, (4,) * 3, (6,) * 3)
    assert [whole, ("layers.1", "forward", 1, (4,) * 3, (6,) * 3)] == rows


def test_a_module_like_no_other_is_held_against_its_share_of_the_work() -> None:
    """A module without similar modules is compared by its share of the work.

    It has half the FLOPs of the other stage's module, which takes 2 s, so it should take 1 s. Up to
    three times this time is tolerated, so its 6 s are 3 s too many.
    """
    times = {
        0: [{ModulePhase("up", "forward"): 2.0, ModulePhase("", "forward"): 6.0}] * 3,
        1: [{ModulePhase("down", "forward"): 6.0, ModulePhase("", "forward"): 2.0}] * 3,
    }
    work = {
        ModulePhase("up", "forward"): SelfWork(100, 10),
        ModulePhase("down", "forward"): SelfWork(50, 5),
    }
    found = compare_ranks(table_of(times, {ModulePhase("", "forward")}), work)
    assert found is not None
    assert [("down", 1, (3.0,) * 3)] == [
        (each.module, each.rank, each.excess) for each in found.delays if each.module
    ]


def test_one_rank_and_no_steps_are_not_compared() -> None:
    """One rank, or ranks without steps, cannot be compared."""
    assert compare_ranks(table_of({0: [step()]}, WAITS)) is None
    assert compare_ranks(table_of({0: [], 1: []}, WAITS)) is None


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_a_rank_that_is_slower_everywhere_has_one_excess_for_all(factor: float) -> None:
    """A rank that is slower everywhere also has one delay for everything.

    Two modules with 5 s forward and 10 s backward each take 30 s; the slow rank takes 10 % or 50 %
    longer.
    """

    def one(times: float) -> dict[ModulePhase, float]:
        return {
            ModulePhase("part0", "forward"): 5 * times,
            ModulePhase("part0", "backward"): 10 * times,
            ModulePhase("part1", "forward"): 5 * times,
            ModulePhase("part1", "backward"): 10 * times,
            END: 1.0,
            SYNC: 0.0,
        }

    found = compared({0: [one(1)] * 3, 1: [one(factor)] * 3})
    (everything,) = (each for each in found.delays if each.phase == "all")
    assert (1, "", 30.0) == (everything.rank, everything.module, everything.usual)
    assert [30 * (factor - 1)] * 3 == pytest.approx(everything.excess)

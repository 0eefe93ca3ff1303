"""Who was late and for what, from tables of steps whose every second was written by hand."""

from collections.abc import Mapping, Sequence

import pytest

from lflops.profile.records import ModulePhase, RankComparison, RankDelay
from lflops.ranks.merge.rank_comparison import SelfWork, compare_ranks, times_last
from lflops.ranks.merge.rank_series import RankSeries
from lflops.ranks.merge.rank_table import intervals_of, table_of

DATA, OPTIMIZER, SYNC = (
    ModulePhase("", "data"),
    ModulePhase("", "optimizer"),
    ModulePhase("", "sync"),
)
BODY, HEAD, END = (
    ModulePhase("body", "forward"),
    ModulePhase("head", "forward"),
    ModulePhase("", "backward"),
)
WAITS = {END, SYNC}
PATTERNS = {f"layers.{n}{part}": f"layers.*{part}" for n in range(8) for part in ("", ".mlp")}


def compared(
    times: Mapping[int, Sequence[Mapping[ModulePhase, float]]],
    **options: Mapping[ModulePhase, SelfWork],
) -> RankComparison:
    """The evidence."""
    found = compare_ranks(table_of(times, WAITS, patterns=PATTERNS), **options)
    assert found is not None
    return found


def step(**seconds: float) -> dict[ModulePhase, float]:
    """A step of 20 s: 16 s until the gradients are awaited, 2 s until the next synchronization."""
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
    """A rank's excesses by place."""
    return {
        (each.module, each.phase): each
        for each in found.delays
        if each.rank == rank and each.phase != "all"
    }


def test_a_place_where_ranks_wait_ends_an_interval() -> None:
    """Backward runs in the reverse order of the rows, and the optimizer's interval ends with Lightning's synchronization."""
    up, down = ModulePhase("up", "backward"), ModulePhase("down", "backward")
    places = [OPTIMIZER, SYNC, DATA, END, BODY, up, HEAD, down]
    assert {DATA: 0, BODY: 0, HEAD: 0, down: 0, up: 0, OPTIMIZER: 1} == intervals_of(places, WAITS)
    gathers = ModulePhase("unit", "forward")
    places = [DATA, BODY, gathers, HEAD, END, OPTIMIZER, SYNC]
    assert {DATA: 0, BODY: 0, HEAD: 1, OPTIMIZER: 2} == intervals_of(places, {gathers, END, SYNC})


def test_without_a_collective_at_its_end_a_steps_last_interval_goes_on_in_the_next() -> None:
    """What the optimizer takes is waited for where the next gradients are awaited."""
    assert {DATA: 0, BODY: 0, OPTIMIZER: 0} == intervals_of([DATA, BODY, END, OPTIMIZER], {END})


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    """Of 1, 2, 3 and 9: without the first 3, without the last 2; of two ranks, the other."""
    four = RankSeries({0: (1.0,), 1: (2.0,), 2: (3.0,), 3: (9.0,)})
    assert {0: (3.0,), 1: (3.0,), 2: (2.0,), 3: (2.0,)} == four.median_of_others()
    assert {0: (9.0,), 1: (1.0,)} == RankSeries({0: (1.0,), 1: (9.0,)}).median_of_others()


def test_the_slow_rank_is_late_and_the_one_that_waits_is_not() -> None:
    """Rank 1 takes 4 s longer in the body.

    Rank 0 waits 4 s more at the end of backward, which is no excess of its.
    """
    found = compared({0: [step(end=5)] * 3, 1: [step(body=14)] * 3})
    assert {} == of(found, 0)
    (body,) = of(found, 1).values()
    assert ("body", "forward", (4, 4, 4), (4, 4, 4), 14, 10) == (
        body.module,
        body.phase,
        body.excess,
        body.late,
        body.seconds,
        body.usual,
    )
    (wait,) = found.waits
    assert ("", "backward", 1, 1, 4, 0) == (
        wait.module,
        wait.phase,
        wait.for_rank,
        wait.ranks,
        wait.seconds,
        wait.longest_rank,
    )


def test_a_rank_that_is_slow_here_and_fast_there_is_late_by_the_rest() -> None:
    """4 s longer in the body, 3 s shorter in the head, before the same collective.

    Nobody waits longer than 1 s.
    """
    found = compared({0: [step(end=2)] * 3, 1: [step(body=14, head=2)] * 3})
    assert (1, 1, 1) == of(found, 1)["body", "forward"].late


def test_two_ranks_may_both_cost_something() -> None:
    """Rank 1 in the body, rank 0 in the optimizer.

    Each is late in its interval, though both are busy 22 s.
    """
    found = compared({0: [step(end=5, optimizer=6)] * 3, 1: [step(body=14, sync=5)] * 3})
    assert [("", "optimizer")] == list(of(found, 0))
    assert [("body", "forward")] == list(of(found, 1))
    assert 4 + 4 == found.lost_seconds


def test_what_a_step_loses_is_what_the_last_rank_takes_longer_than_the_median_one() -> None:
    """Busy 16, 17 and 22 s before the first collective: 5 of 22 + 1 + 2 + 1."""
    found = compared({0: [step()], 1: [step(head=6)], 2: [step(data=7)]})
    assert 5 == found.lost_seconds


def test_the_last_rank_of_each_step_is_counted() -> None:
    """Rank 2 in two of three steps."""
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
    """In its all-reduce rank 0 spent 4 s, and rank 1, for which it waits, 0.5: the transfer.

    Nobody is accused of the head.
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
    assert ("head", "forward", 1, 3.5, 3.5, 0.5) == (
        wait.module, wait.phase, wait.for_rank, wait.seconds, wait.traced_seconds, wait.transfer_seconds
    )  # fmt: skip


def test_one_disturbance_is_no_waiting_of_the_run() -> None:
    """Of six steps rank 0 waits 1 s in each, and in one of them 60: 1 s, not 10.8.

    What comes in every third step is kept.
    """

    def waiting(*seconds: float) -> tuple[float, float | None]:
        found = compared(
            {
                0: [step(end=1 + each) for each in seconds],
                1: [step(body=10 + each) for each in seconds],
            }
        )
        (wait,) = found.waits
        return wait.seconds, found.lost_seconds

    assert (1.0, 1.0) == waiting(1, 1, 60, 1, 1, 1)
    assert (pytest.approx(40 / 6), pytest.approx(40 / 6)) == waiting(0, 0, 20, 0, 0, 20)


def test_modules_that_repeat_are_compared_together_too() -> None:
    """0.5 s in each of eight layers is 4 s in all of them."""
    layers = [ModulePhase(f"layers.{n}.mlp", "forward") for n in range(8)]
    slow, usual = (dict.fromkeys(layers, seconds) | {END: 1.0, SYNC: 0.0} for seconds in (2.5, 2.0))
    found = compared({0: [usual] * 3, 1: [slow] * 3})
    together = of(found, 1)["layers.*.mlp", "forward"]
    assert (8, 20.0, 16.0, (4.0,) * 3) == (
        together.modules,
        together.seconds,
        together.usual,
        together.excess,
    )


def stage(number: int, *, seconds: float, waiting: float) -> dict[ModulePhase, float]:
    """A pipeline's stage of one layer."""
    return {
        ModulePhase(f"layers.{number}", "forward"): seconds,
        ModulePhase("", "forward"): waiting,
    }


def test_a_module_that_one_rank_alone_has_is_compared_with_those_like_it() -> None:
    """Two stages that work in turn.

    The second takes 6 s where the first takes 2, and the first waits for all of that.
    """
    times = {0: [stage(0, seconds=2, waiting=6)] * 3, 1: [stage(1, seconds=6, waiting=2)] * 3}
    work = {ModulePhase(f"layers.{n}", "forward"): SelfWork(100, 10) for n in range(2)}
    found = compare_ranks(table_of(times, {ModulePhase("", "forward")}, patterns=PATTERNS), work)
    assert found is not None
    rows = [(each.module, each.phase, each.rank, each.excess, each.late) for each in found.delays]
    whole = ("", "stage", 1, (4,) * 3, (6,) * 3)
    assert [whole, ("layers.1", "forward", 1, (4,) * 3, (6,) * 3)] == rows


def test_a_module_like_no_other_is_held_against_its_share_of_the_work() -> None:
    """Half the FLOPs of the other stage's module, which takes 2 s.

    Three times 1 s is allowed, 6 s are 3 too many.
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
    """There is nobody, and nothing."""
    assert compare_ranks(table_of({0: [step()]}, WAITS)) is None
    assert compare_ranks(table_of({0: [], 1: []}, WAITS)) is None


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_a_rank_that_is_slower_everywhere_has_one_excess_for_all(factor: float) -> None:
    """30 s of work in four modules: a tenth, or half of it, more."""
    places = [ModulePhase(f"part{n}", phase) for n in range(2) for phase in ("forward", "backward")]

    def one(times: float) -> dict[ModulePhase, float]:
        return dict(zip(places, (5 * times, 10 * times, 5 * times, 10 * times), strict=True)) | {
            END: 1.0,
            SYNC: 0.0,
        }

    found = compared({0: [one(1)] * 3, 1: [one(factor)] * 3})
    (everything,) = (each for each in found.delays if each.phase == "all")
    assert (1, "", 30.0) == (everything.rank, everything.module, everything.usual)
    assert [30 * (factor - 1)] * 3 == pytest.approx(everything.excess)

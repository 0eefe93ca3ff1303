"""Which rank is slow, from the unprofiled steps of all ranks alone.

Steps written by hand, with 1 % of jitter, and what is planted in them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.findings.rules import slow_rank
from lflops.profile.profile import Profile
from lflops.profile.records import FlaggedRank, ModulePhase, Rank, RankComparison, RankDelay
from lflops.profile.steps import DISTURBANCES, Step, is_compared
from lflops.ranks.merge.unprofiled_steps import MOST_STEPS, UnprofiledSteps
from lflops.ranks.reported_stragglers import ReportedStragglers
from lflops.ranks.straggler import Straggler
from lflops.ranks.stragglers import _merged
from lflops.report.ranks import ranks as lines
from tests.support.profile_builders import profile, run, weights

USUAL = {"data": 1e-3, "forward": 10e-3, "backward": 20e-3, "optimizer": 2e-3}
WAITS = {ModulePhase("", "backward"), ModulePhase("", "sync")}
Plant = Callable[[int], float]
"""Seconds in addition, by the step."""


def every(period: int, seconds: float = 10e-3, *, first: int = 0) -> Plant:
    """In each so many steps, from one on."""
    return lambda step: seconds if step >= first and not step % period else 0.0


def nothing(_step: int) -> float:
    """Where nothing is planted."""
    return 0.0


def shared(
    number: int,
    plants: Mapping[tuple[int, str], Plant],
    *,
    ranks: int = 2,
    seed: int = 0,
    preempted: Mapping[tuple[int, str], Plant] | None = None,
    **beside: Callable[[int, int], Any],
) -> UnprofiledSteps:
    """The steps of ranks that wait for the last one at the end of backward.

    Args:
        number: Of steps.
        plants: What one rank takes longer for, by rank and phase.
        ranks: How many there are.
        seed: Of the jitter.
        preempted: How long a rank waits for its core, by rank and phase; each rank knows it.
        beside: Further fields of a step, by rank and step.
    """
    draw, kept = random.Random(seed), UnprofiledSteps()  # noqa: S311 - nothing is secret
    of_rank: dict[int, list[Step]] = {rank: [] for rank in range(ranks)}
    for step in range(number):
        took = {
            rank: {
                phase: seconds * draw.gauss(1, 0.01) + plants.get((rank, phase), nothing)(step)
                for phase, seconds in USUAL.items()
            }
            for rank in of_rank
        }
        waits = {
            rank: {
                phase: plant(step)
                for (of_rank_, phase), plant in (preempted or {}).items()
                if of_rank_ == rank
            }
            for rank in of_rank
        }
        for rank, of_phase in waits.items():
            for phase, seconds in of_phase.items():
                took[rank][phase] += seconds
        busy = {rank: sum(phases.values()) - phases["optimizer"] for rank, phases in took.items()}
        for rank, phases in took.items():
            waiting = max(busy.values()) - busy[rank] + 0.5e-3
            phases["backward"] += waiting
            more = {name: value(rank, step) for name, value in beside.items()}
            if preempted is not None:
                more["waited_by_phase"] = waits[rank]
                more["thread_waited"] = sum(waits[rank].values())
            of_rank[rank].append(
                Step(
                    index=step + 1,
                    kind="unprofiled",
                    seconds=sum(phases.values()),
                    phases=phases,
                    **({"waiting": waiting} | more),
                )
            )
    for rank, steps in of_rank.items():
        kept.add(rank, steps, ranks=ranks)
    return kept


def given(
    clean: UnprofiledSteps,
    *,
    ranks: int = 2,
    waits: set[ModulePhase] = WAITS,
    hooked: RankComparison | None = None,
    macs: Sequence[int] = (),
    chips: Sequence[str] = (),
) -> Profile:
    """A profile with nothing but the comparison."""
    facts = [
        {"macs": macs[n] if macs else None, "device": chips[n] if chips else None}
        for n in range(ranks)
    ]
    each = tuple(
        Rank(rank=n, node=None, host=None, coordinates={}, status="ok", **facts[n])
        for n in range(ranks)
    )
    rows = {name: weights(0) for name in ("", "slow")}
    return profile(
        rows,
        [],
        run=run(world_size=ranks),
        ranks=each,
        unprofiled_comparison=clean.compared(waits),
        rank_comparison=hooked,
    )


def first(found: Profile) -> Straggler:
    """The one culprit."""
    (row,) = lflops.stragglers(found).rows
    return row


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_phase_that_takes_longer_in_each_step_is_named(phase: str) -> None:
    """Also backward, which is as long on the rank that waits at its end."""
    row = first(given(shared(60, {(1, phase): every(1)})))
    assert (1, "", phase, "steady", 60, 60) == (
        row.slow_rank,
        row.module,
        row.phase,
        row.pattern,
        row.slow_steps,
        row.steps,
    )
    assert pytest.approx(10e-3, rel=0.05) == row.seconds_lost


@pytest.mark.parametrize(("period", "steps"), [(3, 60), (10, 60), (10, 250), (50, 250)])
def test_what_comes_in_some_steps_is_named(period: int, steps: int) -> None:
    """Once in so many, as a checkpoint or a log; it costs a step that share of 30 ms."""
    row = first(given(shared(steps, {(0, "forward"): every(period, 30e-3)})))
    assert (0, "forward", "intermittent", -(-steps // period)) == (
        row.slow_rank,
        row.phase,
        row.pattern,
        row.slow_steps,
    )
    assert pytest.approx(30e-3 * -(-steps // period) / steps, rel=0.05) == row.seconds_lost


@pytest.mark.parametrize(
    ("steps", "waited", "is_named"), [(30, 0.5e-3, True), (30, 4e-3, False), (60, 4e-3, True)]
)
def test_on_a_busy_machine_a_few_bursts_are_chance(
    steps: int, waited: float, is_named: bool
) -> None:
    """In every sixth step, where both ranks wait for their cores 4 ms of 34, or hardly at all.

    Of many steps it is no chance.
    """
    clean = shared(steps, {(0, "forward"): every(6, 30e-3)}, thread_waited=lambda *_: waited)
    assert ["intermittent"] * is_named == [
        row.pattern for row in lflops.stragglers(given(clean)).rows
    ]


def test_what_begins_late_is_named_with_its_first_step() -> None:
    """In the last 40 of 200 steps: the step at index 160 is number 161."""
    row = first(given(shared(200, {(1, "data"): every(1, first=160)})))
    assert (1, "data", 161) == (row.slow_rank, row.phase, row.since)
    assert first(given(shared(200, {(1, "data"): every(1)}))).since is None


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nobody_is_accused_of_jitter(ranks: int) -> None:
    """In none of ten runs."""
    assert [()] * 10 == [
        lflops.stragglers(given(shared(120, {}, ranks=ranks, seed=seed), ranks=ranks)).rows
        for seed in range(10)
    ]


def said(found: Profile) -> str:
    """Of the slow ranks."""
    return dict(lines(analyze(found)))["slow ranks"]


def test_ranks_that_take_turns_are_not_accused() -> None:
    """Each is 10 ms late in every second step.

    Where the tokens of their batches go with that, these are the reason.
    """
    turns: dict[tuple[int, str], Plant] = {
        (0, "forward"): every(2),
        (1, "forward"): lambda step: 10e-3 * (step % 2),
    }
    for tokens, differ in (
        (lambda _rank, _step: 512, False),
        (lambda rank, step: 1024 if step % 2 == rank else 512, True),
    ):
        found = given(shared(60, turns, tokens=tokens))
        result = lflops.stragglers(found)
        assert ((), True, differ) == (result.rows, result.is_alternating, result.lengths_differ)
        assert differ == ("the lengths of their batches differ" in said(found))
        assert pytest.approx(10 / 43.5, rel=0.03) == result.lost_share


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_of_several_that_take_turns_none_is_accused(ranks: int) -> None:
    """Each is 10 ms late once in so many steps, so each step is.

    One of them that is late alone is still named.
    """

    def turn(rank: int) -> Plant:
        return lambda step: 10e-3 * (step % ranks == rank)

    result = lflops.stragglers(
        given(
            shared(120, {(rank, "forward"): turn(rank) for rank in range(ranks)}, ranks=ranks),
            ranks=ranks,
        )
    )
    assert ((), True) == (result.rows, result.is_alternating)
    alone = lflops.stragglers(
        given(shared(120, {(1, "forward"): turn(1)}, ranks=ranks), ranks=ranks)
    )
    assert ([(1, "forward")], False) == (
        [(row.slow_rank, row.phase) for row in alone.rows],
        alone.is_alternating,
    )


def test_on_a_busy_machine_nobody_takes_turns() -> None:
    """The same delays, where each rank waited 5 ms a step for its core."""
    turns: dict[tuple[int, str], Plant] = {
        (0, "forward"): every(2),
        (1, "forward"): lambda step: 10e-3 * (step % 2),
    }
    result = lflops.stragglers(found := given(shared(60, turns, thread_waited=lambda *_: 5e-3)))
    assert ((), False, True) == (result.rows, result.is_alternating, result.busy_machine)
    assert said(found).startswith("cannot tell: this machine was busy")


def test_hooked_steps_say_which_module_it_is() -> None:
    """Three are enough for that, and none of what they say beyond the clean steps is believed."""
    excess = RankDelay(
        module="slow",
        phase="forward",
        rank=1,
        seconds=15e-3,
        usual=5e-3,
        excess=(10e-3,) * 3,
        late=(10e-3,) * 3,
        intervals=(0,),
    )
    other = replace(excess, module="", phase="optimizer", rank=0)
    hooked = RankComparison(
        steps=3, seconds=43e-3, lost_seconds=10e-3, delays=(excess, other), waits=(), places=4
    )
    row = first(given(shared(30, {(1, "forward"): every(1)}), hooked=hooked))
    assert ("slow", "forward", 1, 30) == (row.module, row.phase, row.slow_rank, row.steps)


def test_where_ranks_wait_within_a_phase_hooked_steps_have_to_be_enough() -> None:
    """As under FSDP: the clean steps cannot say who was slow in forward.

    Three hooked ones accuse nobody of 2 of 43 ms.
    """
    excess = RankDelay(
        module="slow",
        phase="forward",
        rank=1,
        seconds=7e-3,
        usual=5e-3,
        excess=(2e-3,) * 6,
        late=(2e-3,) * 6,
        intervals=(0,),
    )
    many = RankComparison(
        steps=6, seconds=43e-3, lost_seconds=2e-3, delays=(excess,), waits=(), places=4
    )
    few = replace(many, steps=3, delays=(replace(excess, excess=(2e-3,) * 3, late=(2e-3,) * 3),))
    waits = WAITS | {ModulePhase("slow", "forward"), ModulePhase("slow", "backward")}
    clean = shared(30, {})
    assert "slow" == first(given(clean, waits=waits, hooked=many)).module
    assert "cannot tell: 3 steps of all ranks to compare, and 6 are needed" == said(
        given(clean, waits=waits, hooked=few)
    )


def test_few_steps_accuse_nobody() -> None:
    """Five of both ranks, whatever is in them."""
    found = given(shared(5, {(1, "forward"): every(1)}))
    assert ((), 5) == (lflops.stragglers(found).rows, lflops.stragglers(found).too_few_steps)
    assert "cannot tell: 5 steps of all ranks to compare, and 6 are needed" == said(found)


def busy(rank: int, _step: int) -> float:
    """Seconds of the CPU in the thread of rank 1, which is 10 ms late.

    No more than in that of rank 0.
    """
    return 33e-3


def test_the_cause_is_named_with_its_evidence() -> None:
    """Kept off its core, in all places.

    Another thread; more tokens; or none of these, where it sleeps of itself.
    """
    plant: dict[tuple[int, str], Plant] = {(1, "forward"): every(1)}
    everywhere: dict[tuple[int, str], Plant] = {
        (1, phase): every(1, 0.3 * seconds) for phase, seconds in USUAL.items()
    }
    of_system: dict[str, Any] = {
        "thread_cpu": busy,
        "cpu_user": busy,
        "cpu_system": lambda *_: 0.0,
        "thread_waited": lambda rank, _: 8e-3 * rank,
    }
    preempted = first(given(shared(60, everywhere, **of_system)))
    assert ("all", "preempted") == (preempted.phase, preempted.cause)
    seldom = first(
        given(shared(60, everywhere, **of_system | {"thread_waited": lambda rank, _: 3e-3 * rank}))
    )
    assert ("all", None) == (seldom.phase, seldom.cause)  # it explains 3 of 10 ms
    asleep = first(
        given(
            shared(
                30,
                plant,
                thread_cpu=busy,
                cpu_user=busy,
                cpu_system=lambda *_: 0.0,
                thread_waited=lambda *_: 0.0,
            )
        )
    )
    assert ("forward", None) == (asleep.phase, asleep.cause)

    def process(rank: int, _step: int) -> float:
        return 33e-3 + 8e-3 * rank

    thread = first(
        given(
            shared(
                30,
                plant,
                thread_cpu=busy,
                cpu_user=process,
                cpu_system=lambda *_: 0.0,
                thread_waited=lambda *_: 0.0,
            )
        )
    )
    assert "thread" == thread.cause
    both: dict[str, Any] = {"thread_cpu": busy, "cpu_user": process, "cpu_system": lambda *_: 0.0}
    for waited, cause in (
        (9e-3, "preempted"),
        (7e-3, "thread"),
    ):  # of 10 ms, where other threads computed for 8
        assert (
            cause
            == first(
                given(
                    shared(
                        60,
                        everywhere,
                        **both,
                        thread_waited=lambda rank, _, waited=waited: waited * rank,
                    )
                )
            ).cause
        )
    longer = first(given(shared(30, plant, tokens=lambda rank, _: 512 + 512 * rank)))
    assert ("work", 2.0) == (longer.cause, longer.work_ratio)
    counted = first(given(shared(30, plant), macs=(1000, 3100)))
    assert ("work", 3.1) == (counted.cause, counted.work_ratio)
    assert "its batch has 3.1 × the work of the other ranks" in said(
        given(shared(30, plant), macs=(1000, 3100))
    )


@pytest.mark.parametrize(
    ("device", "steps", "phase", "is_issue"),
    [
        ("cpu", 30, "all", False),
        ("cpu", 60, "all", True),
        ("cpu", 30, "forward", True),
        ("cuda", 30, "all", True),
    ],
)
def test_a_rank_on_a_cpu_is_accused_of_all_that_it_does_from_many_steps_on(
    device: str, steps: int, phase: str, is_issue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 30 % longer, for no known cause.

    For a few seconds, neighbours of its core do that; 30 steps of 34 ms are one.
    """
    plants = {
        (1, each): every(1, 0.3 * seconds)
        for each, seconds in USUAL.items()
        if phase in {each, "all"}
    }
    found = given(shared(steps, plants))
    of_step = Step(index=1, kind="unprofiled", seconds=sum(USUAL.values()), phases=USUAL)
    found = replace(
        found, run=replace(found.run, kind="training", device_type=device), steps=(of_step,) * 6
    )
    (finding,) = (each for each in lflops.explain(found).findings if each.cause == "rank")
    assert (1, phase, is_issue) == (finding.rank, finding.phase, finding.is_issue)
    monkeypatch.setattr(slow_rank, "OBSERVED_SECONDS", 0.5)
    assert [True] == [
        each.is_issue for each in lflops.explain(found).findings if each.cause == "rank"
    ]


def test_a_slow_rank_with_another_chip_than_all_others_has_its_cause() -> None:
    """A chip that another rank has as well is no cause, and no chip makes data late."""
    clean = shared(30, {(2, "forward"): every(1)}, ranks=3)
    other = given(clean, ranks=3, chips=("H100", "H100", "A100"))
    assert ("all", "chip") == (first(other).phase, first(other).cause)
    assert "than the other ranks in everything" in said(other)
    assert "; its chip is A100, while other ranks have H100" in said(other)
    assert None is first(given(clean, ranks=3, chips=("H100", "A100", "A100"))).cause
    assert None is first(given(clean, ranks=3)).cause
    late = shared(30, {(2, "data"): every(1)}, ranks=3)
    assert ("data", None) == (
        (row := first(given(late, ranks=3, chips=("H100", "H100", "A100")))).phase,
        row.cause,
    )


def test_a_rank_whose_core_is_shared_is_named_though_its_delays_are_neither_steady_nor_bursts() -> (
    None
):
    """In two of three steps it waits up to 16 ms for its core, 5 on average.

    Where both ranks are hit as often, none is named.
    """

    def waited(rank: int, step: int) -> float:
        return (0.0, 4e-3, 16e-3)[(7 * step + step // 5) % 3] * ((step + rank) % 2 or 0.5)

    for unfair in (True, False):
        alone = {
            rank: (lambda step, rank=rank: waited(rank, step))
            for rank in ((1,) if unfair else (0, 1))
        }
        plants: dict[tuple[int, str], Plant] = {
            (rank, "forward"): plant for rank, plant in alone.items()
        }
        clean = shared(
            96, plants, thread_waited=lambda rank, step, alone=alone: alone.get(rank, nothing)(step)
        )
        found = lflops.stragglers(given(clean))
        if not unfair:
            assert ((), True) == (found.rows, found.busy_machine)
            continue
        (row,) = found.rows
        assert ("", "all", 1, "preempted") == (row.module, row.phase, row.slow_rank, row.cause)
        assert sum(waited(1, step) for step in range(96)) / 96 == pytest.approx(
            row.seconds_lost, rel=0.02
        )
        assert "in no single place" in said(given(clean))


@pytest.mark.parametrize(
    ("event", "said_of_it"),
    [("validation", "in validation"), ("checkpoint", "in saving checkpoints")],
)
def test_a_rank_that_takes_longer_between_batches_is_named_with_what_it_does_there(
    event: str, said_of_it: str
) -> None:
    """Each twentieth step has an event of 60 ms on rank 1, of 10 ms on rank 0.

    50 ms in 5 of 100 steps.
    """
    clean, draw = UnprofiledSteps(), random.Random(0)  # noqa: S311 - nothing is secret
    for rank in range(2):
        steps = []
        for index in range(100):
            phases = {phase: seconds * draw.gauss(1, 0.01) for phase, seconds in USUAL.items()} | {
                "other": 1e-3
            }
            marks: tuple[str, ...] = ()
            if index % 20 == 7:
                phases, marks = phases | {"other": (10e-3, 60e-3)[rank]}, (event,)
            steps.append(
                Step(
                    index=index,
                    kind="unprofiled",
                    seconds=sum(phases.values()),
                    phases=phases,
                    waiting=0.5e-3,
                    marks=marks,
                )
            )
        clean.add(rank, steps, ranks=2)
    found = given(clean)
    (row,) = lflops.stragglers(found).rows
    assert (event, 1, "intermittent", 5, 100) == (
        row.phase,
        row.slow_rank,
        row.pattern,
        row.slow_steps,
        row.steps,
    )
    assert 2.5e-3 == pytest.approx(row.seconds_lost, rel=0.02)
    assert said_of_it in said(found)


def test_steps_with_an_event_are_compared_and_other_disturbed_steps_are_not() -> None:
    """As it is in `DISTURBANCES`."""
    assert ["checkpoint", "validation"] == [
        mark for mark in sorted(DISTURBANCES) if is_compared((mark, "no_update"))
    ]
    assert is_compared(())
    assert not is_compared(("validation", "warmup"))


def test_on_a_busy_machine_it_is_chance_who_waits_longest_for_a_core() -> None:
    """Rank 1 waits 12 ms a step and rank 0 half as long, in no regular order: nobody is accused."""
    draws = {rank: random.Random(rank) for rank in range(2)}  # noqa: S311 - nothing is secret
    waits = {
        rank: [draw.expovariate(1 / (6e-3 + 6e-3 * rank)) for _ in range(96)]
        for rank, draw in draws.items()
    }
    plants: dict[tuple[int, str], Plant] = {
        (rank, "forward"): (lambda step, rank=rank: waits[rank][step]) for rank in range(2)
    }
    found = lflops.stragglers(
        given(shared(96, plants, thread_waited=lambda rank, step: waits[rank][step]))
    )
    assert ((), True) == (found.rows, found.busy_machine)


def test_a_sleeper_is_not_excused_by_a_little_more_work() -> None:
    """It takes twice as long for 1.2 times the work."""
    row = first(given(shared(30, {(1, "forward"): every(1)}), macs=(1000, 1200)))
    assert ("forward", None) == (row.phase, row.cause)


def test_the_last_steps_of_a_run_are_kept() -> None:
    """So many, however long it is; of many ranks fewer."""
    clean = shared(MOST_STEPS + 50, {})
    compared = clean.compared(WAITS)
    assert compared is not None
    assert (MOST_STEPS, 51, MOST_STEPS + 50) == (compared.steps, compared.at[0], compared.at[-1])
    many = UnprofiledSteps()
    many.add(
        0,
        (Step(index=n, kind="unprofiled", seconds=1.0, phases={"data": 1.0}) for n in range(200)),
        ranks=1 << 20,
    )
    assert 16 == many.common


def test_only_steps_that_all_ranks_have_are_compared() -> None:
    """Rank 1 has one of three."""
    clean = UnprofiledSteps()
    clean.add(
        0,
        (Step(index=n, kind="unprofiled", seconds=1.0, phases={"data": 1.0}) for n in (1, 2, 3)),
        ranks=2,
    )
    assert clean.compared(WAITS) is None
    clean.add(1, [Step(index=2, kind="unprofiled", seconds=1.0, phases={"data": 1.0})], ranks=2)
    assert 1 == clean.common


def test_a_cause_in_no_single_place_has_one_row_with_all_that_it_costs() -> None:
    """A rank that was preempted in forward and in backward, by 4 and by 6 ms.

    Another one in forward.
    """
    row = Straggler(
        module="",
        phase="all",
        modules=1,
        slow_rank=1,
        seconds_lost=4e-3,
        pattern="steady",
        slow_steps=9,
        steps=9,
        seconds=2.0,
        usual=1.0,
    )
    first, other = _merged([row, replace(row, slow_rank=2), replace(row, seconds_lost=6e-3)])
    assert [(1, 10e-3), (2, 4e-3)] == [
        (each.slow_rank, each.seconds_lost) for each in (first, other)
    ]


def uneven(most: float) -> Plant:
    """Waits for a core as they come: from nothing up to `most`, in no regular order."""
    return lambda step: most * ((7 * step + step // 5) % 13) / 12


OWN = ("", "forward", 1, None)


@pytest.mark.parametrize("steps", [7, 20, 106])
def test_a_delay_outside_the_layers_is_no_preemption(steps: int) -> None:
    """8 ms in rank 1's own forward, in each step; its thread waits 6 ms on average in backward.

    What is there in each step is no preemption, whatever the rank waits for elsewhere.
    """
    clean = shared(
        steps, {(1, "forward"): every(1, 8e-3)}, preempted={(1, "backward"): uneven(12e-3)}
    )
    rows = lflops.stragglers(given(clean)).rows
    row = rows[0]
    assert OWN == (row.module, row.phase, row.slow_rank, row.cause)
    assert pytest.approx(8e-3, rel=0.05) == row.seconds_lost
    assert {"preempted"} >= {each.cause for each in rows[1:]}


def test_where_only_whole_steps_are_known_a_delay_in_each_of_them_is_no_preemption() -> None:
    """The same, on ranks that know how long their threads waited, and not in which phase."""
    waiting = uneven(12e-3)
    clean = shared(
        60,
        {(1, "forward"): every(1, 8e-3), (1, "backward"): waiting},
        thread_waited=lambda rank, step: rank * waiting(step),
    )
    row = lflops.stragglers(given(clean)).rows[0]
    assert OWN == (row.module, row.phase, row.slow_rank, row.cause)


@pytest.mark.parametrize("phase", USUAL)
def test_preemption_accuses_no_phase(phase: str) -> None:
    """10 ms in each of 7 steps, in whatever phase: too few to say anything of the rank.

    In each of 60, its core is shared.
    """
    for steps, causes in ((7, []), (60, ["preempted"])):
        clean = shared(steps, {}, preempted={(1, phase): every(1)})
        rows = lflops.stragglers(given(clean)).rows
        assert causes == [row.cause for row in rows]
        assert ["all"] * len(causes) == [row.phase for row in rows]


@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_preemption_accuses_no_phase_where_only_whole_steps_are_known(phase: str) -> None:
    """7 ms on average, as much as the thread waited in these steps."""
    waiting = uneven(14e-3)
    for steps, causes in ((7, []), (60, ["preempted"])):
        clean = shared(
            steps,
            {(1, phase): waiting},
            thread_waited=lambda rank, step: rank * waiting(step),
        )
        assert causes == [row.cause for row in lflops.stragglers(given(clean)).rows]


def test_a_preempted_rank_does_not_hide_a_slow_one() -> None:
    """Rank 1's backward takes 20 ms longer, and rank 0 waits 23 ms for its core in the optimizer.

    Both are in one interval, since nothing synchronizes a custom loop after its optimizer. Then
    rank 0 is the last in each step, and without the waits rank 1.
    """
    clean = shared(
        106, {(1, "backward"): every(1, 20e-3)}, preempted={(0, "optimizer"): every(1, 23e-3)}
    )
    row = lflops.stragglers(given(clean)).rows[0]
    assert (1, "backward", None) == (row.slow_rank, row.phase, row.cause)
    assert pytest.approx(20e-3, rel=0.05) == row.seconds_lost


def test_a_slow_phase_of_a_rank_that_is_slow_in_everything_comes_first() -> None:
    """Loading data takes 21.5 ms longer, and all else 30 % of 32 ms: 9.6 ms.

    The second row does not count the first one's time again.
    """
    plants: dict[tuple[int, str], Plant] = {
        (1, phase): every(1, 0.3 * seconds) for phase, seconds in USUAL.items()
    }
    plants[1, "data"] = every(1, 21.5e-3)
    data, rest = lflops.stragglers(given(shared(106, plants))).rows
    assert ("data", "all") == (data.phase, rest.phase)
    assert (pytest.approx(21.5e-3, rel=0.03), pytest.approx(9.6e-3, rel=0.1)) == (
        data.seconds_lost,
        rest.seconds_lost,
    )
    assert pytest.approx(1.3, rel=0.02) == rest.ratio


@pytest.mark.parametrize("first_step", [0, 1, 2])
def test_every_third_of_ten_steps_is_named(first_step: int) -> None:
    """As two unprofiled and eight module-timing steps have it; 20 ms."""
    third: Plant = lambda step: 0.0 if (step - first_step) % 3 else 20e-3  # noqa: E731
    row = first(given(shared(10, {(1, "forward"): third})))
    assert ("forward", 1, "intermittent") == (row.phase, row.slow_rank, row.pattern)
    assert (4 if first_step == 0 else 3) == row.slow_steps


def hooked_steps(*excesses: tuple[str, tuple[float, ...]]) -> RankComparison:
    """Rank 1 beyond the others in forward, by module, in module-timing steps of 43 ms."""
    delays = tuple(
        RankDelay(
            module=module,
            phase="forward",
            rank=1,
            seconds=5e-3 + sorted(excess)[len(excess) // 2],
            usual=5e-3,
            excess=excess,
            late=excess,
            intervals=(0,),
        )
        for module, excess in excesses
    )
    return RankComparison(
        steps=len(delays[0].excess),
        seconds=43e-3,
        lost_seconds=0.0,
        delays=delays,
        waits=(),
        places=4,
    )


def test_one_hooked_step_shows_in_which_module_a_known_delay_is() -> None:
    """Every third of 120 steps, and one of three hooked ones. Two modules that share it: unknown."""
    clean = shared(120, {(1, "forward"): every(3, 20e-3)})
    once = (0.0, 20e-3, 0.1e-3)
    noise = (0.2e-3, 1e-3, 0.0)
    named = first(given(clean, hooked=hooked_steps(("slow", once), ("other", noise))))
    assert ("slow", "forward", 40) == (named.module, named.phase, named.slow_steps)
    shared_by_two = first(given(clean, hooked=hooked_steps(("slow", once), ("other", once))))
    assert ("", "forward", 40) == (
        shared_by_two.module,
        shared_by_two.phase,
        shared_by_two.slow_steps,
    )


@pytest.mark.parametrize(("phase", "module"), [("optimizer", ""), ("forward", "slow")])
def test_hooked_steps_do_not_overrule_unprofiled_ones(phase: str, module: str) -> None:
    """Seven hooked steps in which rank 1 takes three times as long, in 60 in which it does not."""
    hooked = hooked_steps((module, (10e-3,) * 7))
    delay = replace(hooked.delays[0], phase=phase)
    found = given(shared(60, {}), hooked=replace(hooked, delays=(delay,)))
    assert () == lflops.stragglers(found).rows


def test_a_phase_whose_module_is_unknown_is_not_the_model_s_own() -> None:
    """Only module-timing steps can show that the delay is outside the layers."""
    clean = shared(60, {(1, "forward"): every(1)})
    assert "in forward (module unknown), in 60 of 60 steps" in said(given(clean))
    own = hooked_steps(("", (10e-3, 10e-3, 10e-3)), ("slow", (0.2e-3, 0.0, 0.1e-3)))
    assert "in the model's own forward, in 60 of 60 steps" in said(given(clean, hooked=own))


def test_the_end_of_backward_is_no_work_where_ranks_wait_in_its_modules_too() -> None:
    """As under FSDP: in every tenth step the last collective takes 20 ms longer on rank 0."""
    clean = shared(60, {}, waiting=lambda rank, step: 0.5e-3 if rank or step % 10 else 20.5e-3)
    waits = WAITS | {ModulePhase("slow", "forward"), ModulePhase("slow", "backward")}
    assert () == lflops.stragglers(given(clean, waits=waits)).rows


REPORTED = FlaggedRank(
    module="slow",
    phase="backward",
    modules=1,
    rank=1,
    seconds_lost=20e-3,
    pattern="steady",
    slow_steps=70,
    steps=70,
    seconds=30e-3,
    usual=10e-3,
    first_step=1,
    last_step=70,
)


def ended_with(plants: Mapping[tuple[int, str], Plant], *flagged: FlaggedRank) -> Profile:
    """A run whose log reported stragglers, and its last comparison."""
    found = given(shared(106, plants))
    compared = found.unprofiled_comparison
    assert compared is not None
    return replace(found, unprofiled_comparison=replace(compared, flagged=flagged))


def test_what_the_log_reported_is_in_the_last_answer() -> None:
    """A module's backward, up to step 70; then rank 0 is slow in the optimizer."""
    found = ended_with({(0, "optimizer"): every(1)}, REPORTED)
    earlier, current = lflops.stragglers(found).rows
    assert ("slow", "backward", 1, 70) == (
        earlier.module,
        earlier.phase,
        earlier.slow_rank,
        earlier.until,
    )
    assert ("optimizer", 0, None) == (current.phase, current.slow_rank, current.until)
    assert "in slow backward, in 70 of 70 steps, up to step 70: costs 20.0 ms a step" in said(found)


def test_what_is_still_slow_has_the_module_that_the_log_knew() -> None:
    """One row, with the cost of the last comparison."""
    row = first(ended_with({(1, "backward"): every(1)}, REPORTED))
    assert ("slow", "backward", None) == (row.module, row.phase, row.until)
    assert pytest.approx(10e-3, rel=0.05) == row.seconds_lost


def test_a_rank_that_was_slow_in_everything_is_not_named_twice() -> None:
    """Its data is slow, and that says more."""
    everything = replace(REPORTED, module="", phase="all")
    assert "data" == first(ended_with({(1, "data"): every(1)}, everything)).phase


@pytest.mark.parametrize(("steps", "kept"), [(19, []), (20, [(1, "forward", 1, 20)])])
def test_what_a_few_steps_show_is_not_kept(steps: int, kept: list[Any]) -> None:
    """The many that follow say it better."""
    reported = ReportedStragglers()
    found = given(shared(steps, {(1, "forward"): every(1)}))
    reported.keep(found, lflops.stragglers(found))
    compared = found.unprofiled_comparison
    assert compared is not None
    later = reported.added_to(compared, found.run.stage)
    assert kept == [
        (each.rank, each.phase, each.first_step, each.last_step) for each in later.flagged
    ]


def test_macs_that_read_the_same_are_not_said_to_differ() -> None:
    """427,820,001 and 427,820,002."""
    found = given(shared(60, {}), macs=(427_820_001, 427_820_002))
    assert "855.64 M MACs forward and backward" == dict(lines(analyze(found)))["all ranks"]

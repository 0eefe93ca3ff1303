"""Test the search for stragglers in the unprofiled steps of all ranks.

The steps are artificial: each phase takes its usual time with a random variation of 1 %, plus the
delays that a test plants.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.findings.rules import slow_rank
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase, Rank, RankComparison, RankDelay, Straggler
from lflops.profile.steps import DISTURBANCES, Step, is_compared
from lflops.ranks.merge.unprofiled_steps import MOST_STEPS, UnprofiledSteps, most_steps
from lflops.ranks.reported_stragglers import ENOUGH_TO_KEEP, ReportedStragglers
from lflops.ranks.stragglers import _merged
from lflops.report.ranks import ranks as lines
from tests.support.profile_builders import profile, run, weights

USUAL = {"data": 1e-3, "forward": 10e-3, "backward": 20e-3, "optimizer": 2e-3}
WAITS = {ModulePhase("", "backward"), ModulePhase("", "sync")}
Plant = Callable[[int], float]
"""Return the additional seconds of a step."""


def every(period: int, seconds: float = 10e-3, *, first: int = 0) -> Plant:
    """Return a delay of `seconds` in every step whose index is a multiple of `period`.

    It begins with step `first`.
    """
    return lambda step: seconds if step >= first and not step % period else 0.0


def nothing(_step: int) -> float:
    """Return no delay."""
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
    """Return the steps of ranks that wait for the last rank at the end of backward.

    Args:
        number: The number of steps.
        plants: The delays, by rank and phase.
        ranks: The number of ranks.
        seed: The seed of the random variation.
        preempted: The seconds for which a rank waits for a core in each step, by rank and phase. If
            it is passed, each step has these waits.
        beside: Further fields of a step, as functions of rank and step.
    """
    draw = random.Random(seed)  # noqa: S311 - nothing is secret
    kept = UnprofiledSteps()
    of_rank: dict[int, list[Step]] = {rank: [] for rank in range(ranks)}
    for step in range(number):
        took: dict[int, dict[str, float]] = {rank: {} for rank in of_rank}
        for rank, phases in took.items():
            for phase, seconds in USUAL.items():
                delay = plants.get((rank, phase), nothing)
                phases[phase] = seconds * draw.gauss(1, 0.01) + delay(step)
        waits: dict[int, dict[str, float]] = {rank: {} for rank in of_rank}
        for (rank, phase), wait in (preempted or {}).items():
            waits[rank][phase] = wait(step)
            took[rank][phase] += wait(step)
        busy = {rank: sum(phases.values()) - phases["optimizer"] for rank, phases in took.items()}
        for rank, phases in took.items():
            waiting = max(busy.values()) - busy[rank] + 0.5e-3
            phases["backward"] += waiting
            fields: dict[str, Any] = {"waiting": waiting}
            for name, value in beside.items():
                fields[name] = value(rank, step)
            if preempted is not None:
                fields["waited_by_phase"] = waits[rank]
                fields["thread_waited"] = sum(waits[rank].values())
            ended = Step(
                index=step + 1,
                kind="unprofiled",
                seconds=sum(phases.values()),
                phases=phases,
                **fields,
            )
            of_rank[rank].append(ended)
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
    """Return a profile with the comparison of unprofiled steps and little else.

    Args:
        clean: The steps of all ranks.
        ranks: The number of ranks.
        waits: The places in which ranks wait for each other.
        hooked: A comparison of module-timing steps.
        macs: The MACs of each rank, if they are known.
        chips: The device of each rank, if it is known.
    """
    of_ranks = []
    for number in range(ranks):
        rank = Rank(rank=number, node=None, host=None, device=None, coordinates={}, status="ok")
        if macs:
            rank = replace(rank, macs=macs[number])
        if chips:
            rank = replace(rank, device=chips[number])
        of_ranks.append(rank)
    rows = {name: weights(0) for name in ("", "slow")}
    return profile(
        rows,
        [],
        run=run(world_size=ranks),
        ranks=tuple(of_ranks),
        unprofiled_comparison=clean.compared(waits),
        rank_comparison=hooked,
    )


def first(found: Profile) -> Straggler:
    """Return the only straggler."""
    (row,) = lflops.stragglers(found).rows
    return row


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_phase_that_takes_longer_in_each_step_is_named(phase: str) -> None:
    """A phase that takes 10 ms longer in each step is found.

    This includes backward, although it takes as long on the other rank, which waits at its end.
    """
    row = first(given(shared(60, {(1, phase): every(1)})))
    assert (1, "", phase) == (row.slow_rank, row.module, row.phase)
    assert ("steady", 60, 60) == (row.pattern, row.slow_steps, row.steps)
    assert pytest.approx(10e-3, rel=0.05) == row.seconds_lost


@pytest.mark.parametrize(("period", "steps"), [(3, 60), (10, 60), (10, 250), (50, 250)])
def test_what_comes_in_some_steps_is_named(period: int, steps: int) -> None:
    """A delay of 30 ms that comes only in some steps is found, for example while a rank logs.

    Its cost is the mean over all steps.
    """
    row = first(given(shared(steps, {(0, "forward"): every(period, 30e-3)})))
    slow_steps = math.ceil(steps / period)
    assert (0, "forward", "intermittent") == (row.slow_rank, row.phase, row.pattern)
    assert slow_steps == row.slow_steps
    assert pytest.approx(30e-3 * slow_steps / steps, rel=0.05) == row.seconds_lost


@pytest.mark.parametrize(
    ("steps", "waited", "is_named"), [(30, 0.5e-3, True), (30, 4e-3, False), (60, 4e-3, True)]
)
def test_on_a_busy_machine_a_few_bursts_are_chance(
    steps: int, waited: float, is_named: bool
) -> None:
    """On a busy machine, a delay in every sixth of 30 steps is chance; in 60 steps, it is not.

    The machine is busy if both ranks wait for a core for 4 ms of a step of 34 ms. If they hardly
    wait, the delay is also reported in 30 steps.
    """
    clean = shared(steps, {(0, "forward"): every(6, 30e-3)}, thread_waited=lambda *_: waited)
    assert ["intermittent"] * is_named == [
        row.pattern for row in lflops.stragglers(given(clean)).rows
    ]


def test_what_begins_late_is_named_with_its_first_step() -> None:
    """If a delay begins during the run, the straggler has the index of its first slow step.

    The delay begins with the 161st of 200 steps, and step indices begin with 1.
    """
    row = first(given(shared(200, {(1, "data"): every(1, first=160)})))
    assert (1, "data", 161) == (row.slow_rank, row.phase, row.since)
    assert first(given(shared(200, {(1, "data"): every(1)}))).since is None


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nobody_is_accused_of_jitter(ranks: int) -> None:
    """Random variation alone flags no rank, in ten runs."""
    for seed in range(10):
        found = given(shared(120, {}, ranks=ranks, seed=seed), ranks=ranks)
        assert () == lflops.stragglers(found).rows


def said(found: Profile) -> str:
    """Return the report's line about slow ranks."""
    return dict(lines(analyze(found)))["slow ranks"]


def test_ranks_that_take_turns_are_not_accused() -> None:
    """If two ranks are late in turns, no rank is flagged: each is 10 ms late in every second step.

    If the late rank has more tokens in its batch, the report gives this as the reason.
    """
    turns: dict[tuple[int, str], Plant] = {
        (0, "forward"): every(2),
        (1, "forward"): lambda step: 10e-3 * (step % 2),
    }

    def equal(_rank: int, _step: int) -> int:
        return 512

    def more_if_late(rank: int, step: int) -> int:
        return 1024 if step % 2 == rank else 512

    for tokens, differ in ((equal, False), (more_if_late, True)):
        found = given(shared(60, turns, tokens=tokens))
        result = lflops.stragglers(found)
        assert ((), True, differ) == (result.rows, result.is_alternating, result.lengths_differ)
        assert differ == ("the sequence lengths of the batches differ" in said(found))
        assert pytest.approx(10 / 43.5, rel=0.03) == result.lost_share


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_of_several_that_take_turns_none_is_accused(ranks: int) -> None:
    """If several ranks are late in turns, no rank is flagged.

    In each step, another rank is 10 ms late. If only one of them is late, once in `ranks` steps, it
    is flagged.
    """

    def turn(rank: int) -> Plant:
        return lambda step: 10e-3 * (step % ranks == rank)

    all_turns = {(rank, "forward"): turn(rank) for rank in range(ranks)}
    result = lflops.stragglers(given(shared(120, all_turns, ranks=ranks), ranks=ranks))
    assert ((), True) == (result.rows, result.is_alternating)
    one_turn = {(1, "forward"): turn(1)}
    alone = lflops.stragglers(given(shared(120, one_turn, ranks=ranks), ranks=ranks))
    assert [(1, "forward")] == [(row.slow_rank, row.phase) for row in alone.rows]
    assert not alone.is_alternating


def test_on_a_busy_machine_nobody_takes_turns() -> None:
    """On a busy machine, ranks that are late in turns are not reported as alternating.

    Each rank waits for a core for 5 ms in each step, so the reason cannot be known.
    """
    turns: dict[tuple[int, str], Plant] = {
        (0, "forward"): every(2),
        (1, "forward"): lambda step: 10e-3 * (step % 2),
    }
    found = given(shared(60, turns, thread_waited=lambda *_: 5e-3))
    result = lflops.stragglers(found)
    assert ((), False, True) == (result.rows, result.is_alternating, result.busy_machine)
    assert said(found).startswith("cannot tell: this machine was busy")


def test_hooked_steps_say_which_module_it_is() -> None:
    """Module-timing steps show in which module a delay of the unprofiled steps is.

    Three of them are enough. A delay that only they have, here in the optimizer, is not reported.
    """
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
    """If ranks wait for each other within a phase, module-timing steps must be enough alone.

    With FSDP, the unprofiled steps cannot show which rank is slow in forward. A delay of 2 ms in
    steps of 43 ms is found in six module-timing steps, but not in three.
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
    expected = "cannot tell: only 3 steps can be compared between all ranks, but 6 are needed"
    assert expected == said(given(clean, waits=waits, hooked=few))


def test_few_steps_accuse_nobody() -> None:
    """Five steps are too few to flag a rank, whatever delay they have."""
    found = given(shared(5, {(1, "forward"): every(1)}))
    assert ((), 5) == (lflops.stragglers(found).rows, lflops.stragglers(found).too_few_steps)
    expected = "cannot tell: only 5 steps can be compared between all ranks, but 6 are needed"
    assert expected == said(found)


def busy(rank: int, _step: int) -> float:
    """Return the CPU seconds of the thread, which are the same on both ranks."""
    return 33e-3


def test_the_cause_is_named_with_its_evidence() -> None:
    """The cause of a delay of about 10 ms on rank 1 is found from the counters of both ranks.

    It is a wait for a core, another thread of the process, or more work. If the rank sleeps, the
    cause is unknown.
    """
    plant: dict[tuple[int, str], Plant] = {(1, "forward"): every(1)}
    everywhere: dict[tuple[int, str], Plant] = {
        (1, phase): every(1, 0.3 * seconds) for phase, seconds in USUAL.items()
    }

    def waiting(seconds: float) -> Callable[[int, int], float]:
        return lambda rank, _step: seconds * rank

    def other_threads(rank: int, _step: int) -> float:
        """Return the CPU seconds of the process: other threads of rank 1 compute for 8 ms."""
        return 33e-3 + 8e-3 * rank

    one_thread: dict[str, Any] = {
        "thread_cpu": busy,
        "cpu_user": busy,
        "cpu_system": lambda *_: 0.0,
    }
    preempted = first(given(shared(60, everywhere, **one_thread, thread_waited=waiting(8e-3))))
    assert ("all", "preempted") == (preempted.phase, preempted.cause)
    # A wait of 3 ms explains too little of 10 ms.
    seldom = first(given(shared(60, everywhere, **one_thread, thread_waited=waiting(3e-3))))
    assert ("all", None) == (seldom.phase, seldom.cause)
    asleep = first(given(shared(30, plant, **one_thread, thread_waited=waiting(0.0))))
    assert ("forward", None) == (asleep.phase, asleep.cause)

    many_threads = one_thread | {"cpu_user": other_threads}
    thread = first(given(shared(30, plant, **many_threads, thread_waited=waiting(0.0))))
    assert "thread" == thread.cause
    # Other threads computed for 8 ms. The cause that explains more of the delay is named.
    for waited, cause in ((9e-3, "preempted"), (7e-3, "thread")):
        steps = shared(60, everywhere, **many_threads, thread_waited=waiting(waited))
        assert cause == first(given(steps)).cause
    longer = first(given(shared(30, plant, tokens=lambda rank, _: 512 + 512 * rank)))
    assert ("work", 2.0) == (longer.cause, longer.work_ratio)
    counted = first(given(shared(30, plant), macs=(1000, 3100)))
    assert ("work", 3.1) == (counted.cause, counted.work_ratio)
    assert "its batch has 3.1 × as much work as the batches of the other ranks" in said(
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
    """A rank on a CPU that is slow in everything is an issue only after many steps.

    Everything takes 30 % longer, for an unknown cause. Other processes on neighbouring cores can
    cause this for a few seconds, and 30 steps of 34 ms take only one second. A delay in a single
    phase, or on a GPU, is an issue after 30 steps.
    """
    plants = {}
    for each, seconds in USUAL.items():
        if phase in {each, "all"}:
            plants[1, each] = every(1, 0.3 * seconds)
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
    """If the slow rank is the only one with its chip, the chip is the cause.

    A chip that another rank has, too, is no cause. A delay in data has another cause, too.
    """
    clean = shared(30, {(2, "forward"): every(1)}, ranks=3)
    other = given(clean, ranks=3, chips=("H100", "H100", "A100"))
    assert ("all", "chip") == (first(other).phase, first(other).cause)
    assert "than the other ranks in all phases" in said(other)
    assert "; its chip is A100, while other ranks have H100" in said(other)
    assert None is first(given(clean, ranks=3, chips=("H100", "A100", "A100"))).cause
    assert None is first(given(clean, ranks=3)).cause
    late = shared(30, {(2, "data"): every(1)}, ranks=3)
    row = first(given(late, ranks=3, chips=("H100", "H100", "A100")))
    assert ("data", None) == (row.phase, row.cause)


def test_a_rank_whose_core_is_shared_is_named_though_its_delays_are_neither_steady_nor_bursts() -> (
    None
):
    """A rank that often waits for its core is flagged, although its delays are irregular.

    In two of three steps, it waits for up to 16 ms, and for 5 ms on average. If both ranks wait as
    often, no rank is flagged.
    """

    def waited(rank: int, step: int) -> float:
        seconds = (0.0, 4e-3, 16e-3)[(7 * step + step // 5) % 3]
        is_longer = (step + rank) % 2
        return seconds if is_longer else seconds / 2

    def steps(waiting_ranks: Sequence[int]) -> UnprofiledSteps:
        def thread_waited(rank: int, step: int) -> float:
            return waited(rank, step) if rank in waiting_ranks else 0.0

        plants: dict[tuple[int, str], Plant] = {
            (rank, "forward"): partial(waited, rank) for rank in waiting_ranks
        }
        return shared(96, plants, thread_waited=thread_waited)

    of_one = given(steps([1]))
    (row,) = lflops.stragglers(of_one).rows
    assert ("", "all", 1, "preempted") == (row.module, row.phase, row.slow_rank, row.cause)
    mean = sum(waited(1, step) for step in range(96)) / 96
    assert mean == pytest.approx(row.seconds_lost, rel=0.02)
    assert "in different places" in said(of_one)

    of_both = lflops.stragglers(given(steps([0, 1])))
    assert ((), True) == (of_both.rows, of_both.busy_machine)


@pytest.mark.parametrize(
    ("event", "said_of_it"),
    [("validation", "in validation"), ("checkpoint", "in saving checkpoints")],
)
def test_a_rank_that_takes_longer_between_batches_is_named_with_what_it_does_there(
    event: str, said_of_it: str
) -> None:
    """A rank whose validation or checkpoint takes longer is flagged, with this event.

    Every twentieth step has an event. It takes 60 ms on rank 1 and 10 ms on rank 0, so 50 ms are
    lost in 5 of 100 steps.
    """
    clean = UnprofiledSteps()
    draw = random.Random(0)  # noqa: S311 - nothing is secret
    for rank, event_seconds in enumerate((10e-3, 60e-3)):
        steps = []
        for index in range(100):
            phases = {phase: seconds * draw.gauss(1, 0.01) for phase, seconds in USUAL.items()}
            phases["other"] = 1e-3
            marks: tuple[str, ...] = ()
            if index % 20 == 7:
                phases["other"] = event_seconds
                marks = (event,)
            step = Step(
                index=index,
                kind="unprofiled",
                seconds=sum(phases.values()),
                phases=phases,
                waiting=0.5e-3,
                marks=marks,
            )
            steps.append(step)
        clean.add(rank, steps, ranks=2)
    found = given(clean)
    (row,) = lflops.stragglers(found).rows
    assert (event, 1) == (row.phase, row.slow_rank)
    assert ("intermittent", 5, 100) == (row.pattern, row.slow_steps, row.steps)
    assert 2.5e-3 == pytest.approx(row.seconds_lost, rel=0.02)
    assert said_of_it in said(found)


def test_steps_with_an_event_are_compared_and_other_disturbed_steps_are_not() -> None:
    """Of the steps with a mark in `DISTURBANCES`, only those with an event are compared.

    The events are checkpoints and validations. A step with a further disturbance is not compared.
    """
    assert ["checkpoint", "validation"] == [
        mark for mark in sorted(DISTURBANCES) if is_compared((mark, "no_update"))
    ]
    assert is_compared(())
    assert not is_compared(("validation", "warmup"))


def test_on_a_busy_machine_it_is_chance_who_waits_longest_for_a_core() -> None:
    """On a busy machine, no rank is flagged because it waits for a core longer than the other.

    The waits are random: 12 ms in a step of rank 1 on average, and half as long on rank 0.
    """
    waits = []
    plants: dict[tuple[int, str], Plant] = {}
    for rank, mean in enumerate((6e-3, 12e-3)):
        draw = random.Random(rank)  # noqa: S311 - nothing is secret
        waits.append([draw.expovariate(1 / mean) for _ in range(96)])
        plants[rank, "forward"] = waits[rank].__getitem__
    clean = shared(96, plants, thread_waited=lambda rank, step: waits[rank][step])
    found = lflops.stragglers(given(clean))
    assert ((), True) == (found.rows, found.busy_machine)


def test_a_sleeper_is_not_excused_by_a_little_more_work() -> None:
    """A rank with 1.2 × the work of the other rank has no reason to take twice as long."""
    row = first(given(shared(30, {(1, "forward"): every(1)}), macs=(1000, 1200)))
    assert ("forward", None) == (row.phase, row.cause)


def test_the_last_steps_of_a_run_are_kept() -> None:
    """Only the last `MOST_STEPS` steps of a run are kept, and fewer if there are many ranks."""
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
    """Only steps that all ranks have are compared: rank 1 has one of the three steps."""
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
    """Several rows of one rank with the same place are merged, and their costs are added up.

    Rank 1 has two rows, with 4 ms and 6 ms. Rank 2 has another row.
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
    """Return irregular waits for a core, from 0 to `most` seconds."""
    return lambda step: most * ((7 * step + step // 5) % 13) / 12


OWN = ("", "forward", 1, None)


@pytest.mark.parametrize("steps", [7, 20, 106])
def test_a_delay_outside_the_layers_is_no_preemption(steps: int) -> None:
    """A steady delay is not attributed to waits for a core in another phase.

    Rank 1 takes 8 ms longer in forward in each step, and its thread waits for a core in backward,
    for 6 ms on average.
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
    """A steady delay is not attributed to waits for a core if only the waits of steps are known.

    The ranks know how long their threads waited in each step, but not in which phase.
    """
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
    """A wait for a core of 10 ms in each step flags no phase, whatever phase it is in.

    In 7 steps, it flags no rank either. In 60 steps, the rank is flagged for all phases together,
    with the cause `preempted`.
    """
    for steps, causes in ((7, []), (60, ["preempted"])):
        clean = shared(steps, {}, preempted={(1, phase): every(1)})
        rows = lflops.stragglers(given(clean)).rows
        assert causes == [row.cause for row in rows]
        assert ["all"] * len(causes) == [row.phase for row in rows]


@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_preemption_accuses_no_phase_where_only_whole_steps_are_known(phase: str) -> None:
    """A wait for a core flags no single phase if only the waits of whole steps are known.

    The thread waits for 7 ms on average. In 7 steps, no rank is flagged. In 60 steps, the rank is
    flagged with the cause `preempted`.
    """
    waiting = uneven(14e-3)
    for steps, causes in ((7, []), (60, ["preempted"])):
        clean = shared(
            steps,
            {(1, phase): waiting},
            thread_waited=lambda rank, step: rank * waiting(step),
        )
        assert causes == [row.cause for row in lflops.stragglers(given(clean)).rows]


def test_a_preempted_rank_does_not_hide_a_slow_one() -> None:
    """A rank that waits for its core does not hide a rank that is slow.

    Backward of rank 1 takes 20 ms longer, and rank 0 waits for its core for 23 ms in the optimizer.
    Both delays are in one interval, because a custom loop does not synchronize after the optimizer.
    So rank 0 is the last rank in each step, but without its waits, rank 1 is the last.
    """
    clean = shared(
        106, {(1, "backward"): every(1, 20e-3)}, preempted={(0, "optimizer"): every(1, 23e-3)}
    )
    row = lflops.stragglers(given(clean)).rows[0]
    assert (1, "backward", None) == (row.slow_rank, row.phase, row.cause)
    assert pytest.approx(20e-3, rel=0.05) == row.seconds_lost


def test_a_slow_phase_of_a_rank_that_is_slow_in_everything_comes_first() -> None:
    """If a rank is slow in everything and slower in one phase, this phase comes first.

    Data takes 21.5 ms longer. The other phases take 30 % longer than 32 ms, which is 9.6 ms. The
    second row does not include the time of the first.
    """
    plants: dict[tuple[int, str], Plant] = {
        (1, phase): every(1, 0.3 * seconds) for phase, seconds in USUAL.items()
    }
    plants[1, "data"] = every(1, 21.5e-3)
    data, rest = lflops.stragglers(given(shared(106, plants))).rows
    assert ("data", "all") == (data.phase, rest.phase)
    assert pytest.approx(21.5e-3, rel=0.03) == data.seconds_lost
    assert pytest.approx(9.6e-3, rel=0.1) == rest.seconds_lost
    assert pytest.approx(1.3, rel=0.02) == rest.ratio


@pytest.mark.parametrize("first_step", [0, 1, 2])
def test_every_third_of_ten_steps_is_named(first_step: int) -> None:
    """A delay of 20 ms in every third of ten steps is found, whichever step it begins with."""

    def third(step: int) -> float:
        return 20e-3 if (step - first_step) % 3 == 0 else 0.0

    row = first(given(shared(10, {(1, "forward"): third})))
    assert ("forward", 1, "intermittent") == (row.phase, row.slow_rank, row.pattern)
    assert (4 if first_step == 0 else 3) == row.slow_steps


def hooked_steps(*excesses: tuple[str, tuple[float, ...]]) -> RankComparison:
    """Return a comparison of module-timing steps of 43 ms.

    `excesses` are the modules in which rank 1 takes longer in forward, and the excess in each step.
    """
    delays = []
    for module, excess in excesses:
        median = sorted(excess)[len(excess) // 2]
        delay = RankDelay(
            module=module,
            phase="forward",
            rank=1,
            seconds=5e-3 + median,
            usual=5e-3,
            excess=excess,
            late=excess,
            intervals=(0,),
        )
        delays.append(delay)
    return RankComparison(
        steps=len(delays[0].excess),
        seconds=43e-3,
        lost_seconds=0.0,
        delays=tuple(delays),
        waits=(),
        places=4,
    )


def test_one_hooked_step_shows_in_which_module_a_known_delay_is() -> None:
    """One module-timing step can show in which module the delay of the unprofiled steps is.

    The delay is in every third of 120 unprofiled steps, and in one of three module-timing steps. If
    two modules have it in this step, the module is unknown.
    """
    clean = shared(120, {(1, "forward"): every(3, 20e-3)})
    once = (0.0, 20e-3, 0.1e-3)
    noise = (0.2e-3, 1e-3, 0.0)
    named = first(given(clean, hooked=hooked_steps(("slow", once), ("other", noise))))
    assert ("slow", "forward", 40) == (named.module, named.phase, named.slow_steps)
    shared_by_two = first(given(clean, hooked=hooked_steps(("slow", once), ("other", once))))
    assert ("", "forward") == (shared_by_two.module, shared_by_two.phase)
    assert 40 == shared_by_two.slow_steps


@pytest.mark.parametrize(("phase", "module"), [("optimizer", ""), ("forward", "slow")])
def test_hooked_steps_do_not_overrule_unprofiled_ones(phase: str, module: str) -> None:
    """A delay that only module-timing steps have is not reported.

    In seven module-timing steps, rank 1 takes three times as long, but not in 60 unprofiled steps.
    """
    hooked = hooked_steps((module, (10e-3,) * 7))
    delay = replace(hooked.delays[0], phase=phase)
    found = given(shared(60, {}), hooked=replace(hooked, delays=(delay,)))
    assert () == lflops.stragglers(found).rows


def test_a_phase_whose_module_is_unknown_is_not_the_model_s_own() -> None:
    """If the module is unknown, the report does not say that the delay is outside the layers.

    Only module-timing steps can show this.
    """
    clean = shared(60, {(1, "forward"): every(1)})
    assert "in forward (module unknown), in 60 of 60 steps" in said(given(clean))
    own = hooked_steps(("", (10e-3, 10e-3, 10e-3)), ("slow", (0.2e-3, 0.0, 0.1e-3)))
    assert "in forward outside the layers, in 60 of 60 steps" in said(given(clean, hooked=own))


def test_the_end_of_backward_is_no_work_where_ranks_wait_in_its_modules_too() -> None:
    """If ranks also wait within modules, as with FSDP, the wait at the end of backward is no work.

    In every tenth step, the last collective takes 20 ms longer on rank 0.
    """

    def waiting(rank: int, step: int) -> float:
        is_longer = rank == 0 and step % 10 == 0
        return 20.5e-3 if is_longer else 0.5e-3

    clean = shared(60, {}, waiting=waiting)
    waits = WAITS | {ModulePhase("slow", "forward"), ModulePhase("slow", "backward")}
    assert () == lflops.stragglers(given(clean, waits=waits)).rows


REPORTED = Straggler(
    module="slow",
    phase="backward",
    modules=1,
    slow_rank=1,
    seconds_lost=20e-3,
    pattern="steady",
    slow_steps=70,
    steps=70,
    seconds=30e-3,
    usual=10e-3,
    until=70,
)


def ended_with(plants: Mapping[tuple[int, str], Plant], *flagged: Straggler) -> Profile:
    """Return a profile with the last comparison of a run whose log reported `flagged` earlier."""
    found = given(shared(106, plants))
    compared = found.unprofiled_comparison
    assert compared is not None
    return replace(found, unprofiled_comparison=replace(compared, flagged=flagged))


def test_what_the_log_reported_is_in_the_last_answer() -> None:
    """A straggler that the log reported earlier is also in the last comparison.

    Up to step 70, rank 1 was slow in the backward of a module. Then rank 0 is slow in the
    optimizer.
    """
    found = ended_with({(0, "optimizer"): every(1)}, REPORTED)
    earlier, current = lflops.stragglers(found).rows
    assert ("slow", "backward") == (earlier.module, earlier.phase)
    assert (1, 70) == (earlier.slow_rank, earlier.until)
    assert ("optimizer", 0, None) == (current.phase, current.slow_rank, current.until)
    expected = (
        "in the backward of slow, in 70 of 70 steps, up to step 70: this costs 20.0 ms per step"
    )
    assert expected in said(found)


def test_what_is_still_slow_has_the_module_that_the_log_knew() -> None:
    """If the reported rank is still slow, there is one row with the reported module.

    The cost is that of the last comparison.
    """
    row = first(ended_with({(1, "backward"): every(1)}, REPORTED))
    assert ("slow", "backward", None) == (row.module, row.phase, row.until)
    assert pytest.approx(10e-3, rel=0.05) == row.seconds_lost


def test_a_rank_that_was_slow_in_everything_is_not_named_twice() -> None:
    """If a rank was slow in everything before and is slow in data now, only data is reported."""
    everything = replace(REPORTED, module="", phase="all")
    assert "data" == first(ended_with({(1, "data"): every(1)}, everything)).phase


@pytest.mark.parametrize(("steps", "kept"), [(15, []), (16, [(1, "forward", 16)])])
def test_what_a_few_steps_show_is_not_kept(steps: int, kept: list[Any]) -> None:
    """A straggler that was found in fewer than 16 steps is not kept, because more steps follow.

    With thousands of ranks, 16 steps are all that a comparison has.
    """
    assert ENOUGH_TO_KEEP == most_steps(16_384)
    reported = ReportedStragglers()
    found = given(shared(steps, {(1, "forward"): every(1)}))
    reported.keep(found, lflops.stragglers(found))
    compared = found.unprofiled_comparison
    assert compared is not None
    later = reported.added_to(compared, found.run.stage)
    assert kept == [(each.slow_rank, each.phase, each.until) for each in later.flagged]


def test_macs_that_read_the_same_are_not_said_to_differ() -> None:
    """If the MACs of two ranks differ by 1, the report shows one value and no range."""
    found = given(shared(60, {}), macs=(427_820_001, 427_820_002))
    assert "855.64 M MACs in forward and backward" == dict(lines(analyze(found)))["all ranks"]

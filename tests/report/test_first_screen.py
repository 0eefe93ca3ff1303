"""Test the first screen of a run, made from a handmade ledger of a few steps and a window."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops import units
from lflops.analysis.analysis import analyze
from lflops.cli.main import main
from lflops.findings.finding import Finding
from lflops.findings.stalls import stalls_in, stalls_of
from lflops.hardware.chips import Hardware
from lflops.ledger.account import Ledger, SlowStep, Start, StepGroup, duration_class
from lflops.monitoring.outputs.loggers import log_run
from lflops.monitoring.outputs.paths import OutputPaths
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import Trace, TracedOperator
from lflops.report.first_screen.merged_findings import findings_of
from lflops.report.first_screen.screen import FirstScreen, first_screen
from lflops.report.first_screen.step_times import times_of, unlike_window, work_ratio
from lflops.report.first_screen.text import first_screen_rows, sparkline
from lflops.report.first_screen.window import window_summary
from lflops.report.ledger import has_losses
from lflops.report.payload.payload import encoded_run, payload, run_shown
from lflops.report.verdict import unseen_because
from tests.support.ledgers import write_resumed_run
from tests.support.profile_builders import cell
from tests.support.profile_pairs import clean, ran


def steps(*waits: float, mode: str = "unprofiled") -> list[StepGroup]:
    """Return steps with 0.2 s of forward, 0.1 s of backward and the given seconds of data wait."""
    return [
        StepGroup(
            first=number,
            last=number,
            spent={"data": wait, "forward": 0.2, "backward": 0.1},
            longest=wait + 0.3,
            mode=mode,  # type: ignore[arg-type]
        )
        for number, wait in enumerate(waits, 3)
    ]


def ledger(groups: Sequence[StepGroup], **seconds: float) -> Ledger:
    """Return the ledger of a run with these steps, and with other time by category."""
    trained = sum(group.seconds for group in groups)
    waited = sum(group.spent["data"] for group in groups)
    spent = {"training/data": waited, "training/forward": trained - waited, **seconds}
    total = sum(spent.values())
    start = Start(begin=1.7e9, seconds=total, first_step=0, last_step=len(groups), ended="finished")
    durations: dict[int, int] = {}
    for group in groups:
        if group.mode == "unprofiled":
            kind = duration_class(group.seconds)
            durations[kind] = durations.get(kind, 0) + 1
    return Ledger(
        seconds=spent,
        total=total,
        steps=len(groups),
        slow_steps=(),
        starts=(start,),
        spans=(),
        step_groups=tuple(groups),
        durations=durations,
    )


STALLS = [0.3, 0.0, 0.0] * 10
"""A data wait of 0.3 s in every third step: 0.1 s in the mean step of 0.4 s."""


def screen_of(profile: Profile | None, run: Ledger | None) -> FirstScreen:
    """Return the first screen of a window, a ledger, or both."""
    return first_screen(None if profile is None else window_summary(analyze(profile)), run)


def values(screen: FirstScreen) -> dict[str, float | None]:
    """Return the values of the figures by name."""
    return {fact.name: fact.value for fact in screen.figures}


def test_the_run_comes_before_the_window() -> None:
    """If there is a ledger, figures and phases are those of the whole run.

    The window has steps of 0.3 s without a stall. The run has a mean step of 0.4 s, of which a
    quarter is data wait.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.3))
    screen = screen_of(window, ledger(steps(*STALLS), start_up=12.0))
    assert screen.steps is not None
    assert 30 == screen.steps.number
    assert "run" == screen.steps.source
    assert pytest.approx(0.4) == values(screen)["step"]
    assert pytest.approx(0.5) == values(screen)["trained"]
    assert pytest.approx([0.1, 0.2, 0.1]) == [part.seconds for part in screen.phases]
    assert pytest.approx(1.0) == sum(part.share for part in screen.phases)
    assert pytest.approx(0.3, rel=0.006) == screen.steps.p50
    assert pytest.approx(0.6, rel=0.006) == screen.steps.p95


def test_a_loader_that_stalls_every_third_step_is_the_first_card() -> None:
    """The first card has the cost, the rhythm of the stalls, an action and a link to the steps.

    The cost is the mean over all steps. With fewer steps, the confidence is lower.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.3))
    card = screen_of(window, ledger(steps(*STALLS))).cards[0]
    assert "data" == card.cause
    assert "Data loading stalls every 3rd step" == card.title
    assert "run" == card.view
    assert pytest.approx(0.1) == card.seconds
    assert "−100 ms" == card.text
    assert "25.0 % of the step (100 ms) is spent waiting for data: 300 ms every 3rd step." == (
        card.sentence
    )
    assert "workers" in card.action
    assert card.is_issue
    assert "high" == card.confidence.level
    assert ("measured in all 30 unprofiled steps of the run",) == card.confidence.why
    with_fewer_steps = screen_of(window, ledger(steps(*STALLS[:27]))).cards[0]
    assert "data" == with_fewer_steps.cause
    assert "medium" == with_fewer_steps.confidence.level


@pytest.mark.parametrize(("waits", "is_issue"), [(STALLS, True), ([0.1] * 30, False)])
def test_regular_stalls_are_an_issue_on_a_busy_machine(waits: list[float], is_issue: bool) -> None:
    """Other programs do not delay a run in every third step, so the threshold does not rise.

    Other processes took half of the CPU time of the window: the threshold of 9 % rises to 36 %.
    Both runs wait for data in 25 % of their time.
    """
    timed = [
        replace(step, kind="module_timing", cpu_lost=0.1, cpu_user=0.1)
        for step in clean(*[0.3] * 3, forward=1.0)
    ]
    window = ran({"fc": 0.1}, steps=[*clean(*[0.3] * 9, forward=0.6, backward=0.3), *timed])
    assert 0.5 == window.cpu_lost_shares[0]
    cards = screen_of(window, ledger(steps(*waits))).cards
    (card,) = (each for each in cards if each.cause == "data")
    assert is_issue == card.is_issue


@pytest.mark.parametrize(("data", "is_issue"), [(0.3, True), (0.05, False)])
def test_a_data_wait_that_the_window_confirms_stays_an_issue(
    data: float, *, is_issue: bool
) -> None:
    """On a busy machine, the window is judged by its times without the delay of other programs.

    Other processes took half of the CPU time, so that the threshold for the run rises from 9 % to
    36 %. Waits of 0.1 s in steps of 0.4 s are 25 % of the run. This is an issue if data also take
    30 % of the window, but not if they take 5 %.
    """
    phases = {"data": data, "forward": 0.7 - data, "backward": 0.3}
    timed = []
    for step in clean(*[1.0] * 3, **phases):
        uncontended = {name: seconds / 2 for name, seconds in step.phases.items()}
        timed.append(
            replace(
                step,
                kind="module_timing",
                cpu_lost=0.1,
                cpu_user=0.1,
                uncontended_phases=uncontended,
            )
        )
    window = ran({"fc": 0.1}, steps=[*clean(*[1.0] * 9, **phases), *timed])
    (card,) = (
        card for card in screen_of(window, ledger(steps(*[0.1] * 30))).cards if card.cause == "data"
    )
    assert pytest.approx(0.1) == card.seconds
    assert is_issue == card.is_issue
    assert "workers" in card.action


def test_a_cost_outside_all_phases_was_measured_in_all_steps() -> None:
    """Confidence in such a cost is high, even if the window is too short to find issues in it."""
    groups = [replace(step, spent=step.spent | {"other": 0.2}) for step in steps(*[0.0] * 30)]
    groups = [replace(step, longest=0.5) for step in groups]
    window = ran({"fc": 0.1}, steps=clean(*[0.5] * 9, forward=0.4, backward=0.2, other=0.4))
    screen = screen_of(window, ledger(groups))
    card = screen.cards[0]
    assert "other" == card.cause
    assert pytest.approx(0.2) == card.seconds
    assert "high" == card.confidence.level
    assert ("measured in all 30 unprofiled steps of the run",) == card.confidence.why


@pytest.mark.parametrize(
    ("slow", "rhythm"),
    [
        ({5, 25, 45}, ": 2.40 s every 20th step, 60.0 ms in the other steps."),
        ({5, 26, 45}, ": 2.40 s in 3 of 60 steps, 60.0 ms in the other steps."),
        ({5, 25}, "."),
    ],
)
def test_the_rhythm_of_a_phase_is_from_the_steps_that_its_cost_is_from(
    slow: set[int], rhythm: str
) -> None:
    """The cost of a phase is the mean over all steps of the run, and so is how often it is long.

    One of the nine steps of the window is long, which is no measure of the run.
    """
    window_steps = clean(*[0.3] * 9, forward=0.5, backward=0.3, other=0.2)
    phases = {**window_steps[0].phases, "other": 2.4}
    window_steps[4] = replace(window_steps[4], seconds=sum(phases.values()), phases=phases)
    window = ran({"fc": 0.1}, steps=window_steps)
    groups = []
    for number, group in enumerate(steps(*[0.0] * 60)):
        other = 2.4 if number in slow else 0.06
        groups.append(replace(group, spent=group.spent | {"other": other}))
    alone = [each for each in window_summary(analyze(window)).findings if each.cause == "other"]
    assert alone[0].sentence.endswith(
        "preparation of batches: 2.40 s in 1 of 9 steps, 60.0 ms in the other steps."
    )
    found = findings_of(window_summary(analyze(window)), ledger(groups))
    (finding,) = (each for each in found if each.cause == "other")
    expected = (len(slow) * 2.4 + (60 - len(slow)) * 0.06) / 60
    assert pytest.approx(expected) == finding.seconds
    assert finding.sentence.endswith(f"checkpoints or the preparation of batches{rhythm}")


def cost(cause: str, share: float, *, issue: bool = False, overhead: bool = False) -> Finding:
    """Return a finding about a step of one second."""
    return Finding(
        cause=cause,
        sentence=cause,
        seconds=share,
        share=share,
        is_issue=issue,
        is_overhead=overhead,
    )


def test_cards_are_in_the_order_of_the_explanation() -> None:
    """Issues come first, then all other findings, each sorted by cost."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.5, backward=0.2, optimizer=0.3))
    summary = window_summary(analyze(window))
    sleep = cost("sleep", 0.02, issue=True, overhead=True)
    outside = cost("outside", 0.1, issue=True)
    other = replace(cost("clip", 0.08, overhead=True), fix="Clip less")
    smaller = replace(cost("copy", 0.05), fix="Copy less")
    given = replace(summary, findings=(smaller, sleep, other, outside))
    cards = first_screen(given, None).cards
    assert ["outside", "sleep", "clip", "copy"] == [card.cause for card in cards]


def test_profiled_steps_and_the_warm_up_are_not_counted() -> None:
    """Profiled steps and the warm-up, here of 9 s and 5 s, do not change the mean."""
    groups = [
        *steps(0.0, 0.0),
        *steps(8.7, 8.7, mode="profiled"),
        *steps(4.7, mode="warm_up"),
    ]
    screen = screen_of(None, ledger(groups))
    assert screen.steps is not None
    assert 2 == screen.steps.number
    assert pytest.approx(0.3) == screen.steps.mean


def test_without_a_ledger_the_window_stands_for_the_run() -> None:
    """Without a ledger, the figures are those of the window.

    Nine steps take 0.1 s and one takes 0.2 s. p95 of ten steps is the longest step.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.1] * 9, 0.2, forward=1.0))
    screen = screen_of(window, None)
    assert screen.steps is not None
    assert "window" == screen.steps.source
    assert pytest.approx(0.11) == screen.steps.mean
    assert 0.1 == screen.steps.p50
    assert 0.2 == screen.steps.p95
    assert "" == screen.trained


def test_recomputation_is_a_phase_and_the_phases_add_up() -> None:
    """Recompute is a separate phase, and the phases add up to the step.

    In the window, a third of backward is recompute, so of 0.1 s in the run it is 1/30 s.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.4))
    recomputing = replace(window_summary(analyze(window)), recomputed=1 / 3)
    screen = first_screen(recomputing, ledger(steps(0.0, 0.0)))
    shares = {part.name: part.seconds for part in screen.phases}
    assert pytest.approx(0.1 / 3) == shares["recompute"]
    assert pytest.approx(0.1 * 2 / 3) == shares["backward"]
    assert pytest.approx(0.3) == sum(shares.values())


CLIPPED = {"forward": 0.35, "backward": 0.15, "clip": 0.45}


@pytest.mark.parametrize(
    ("of_window", "expected"),
    [
        pytest.param(0.3, 0.06, id="like the run"),
        pytest.param(0.15, 0.06, id="half as long, with shorter sequences"),
        pytest.param(0.6, 0.06, id="twice as long, beside other programs"),
    ],
)
def test_a_cost_of_the_window_is_a_share_of_the_run_s_mean_step(
    of_window: float, expected: float
) -> None:
    """The seconds of a cost in the window become a share of the run's mean step of 0.3 s.

    The optimizer takes a fifth of the window's steps, so 60 ms of 0.3 s. If the window's steps are
    longer or shorter than the run's, the cost is scaled, because the modules probably have the same
    shares of all steps.
    """
    window = ran(
        {"fc": 0.1}, steps=clean(*[of_window] * 9, forward=0.5, backward=0.3, optimizer=0.2)
    )
    training = replace(window.run, kind="training", stage="train", window=0, step=9)
    summary = window_summary(analyze(replace(window, run=training)))
    found = findings_of(summary, ledger(steps(*[0.0] * 30)))
    (finding,) = (each for each in found if each.cause == "optimizer")
    assert pytest.approx(expected) == finding.seconds
    assert pytest.approx(expected / 0.3) == finding.share
    assert f"{expected / 0.3:.1%}".replace("%", " %") in finding.sentence


def test_the_times_of_operators_are_scaled_with_their_cost() -> None:
    """If the window's steps are longer than the run's, the times of operators are scaled, too.

    A step of the window takes 0.6 s, and a step of the run 0.3 s. `act` takes 0.4 s in the window,
    of which the operator takes 0.3 s: half of both in the run.
    """
    window = ran({"fc": 0.2, "act": 0.4}, macs={"act": 0}, steps=clean(*[0.6] * 9, forward=1.0))
    trace = Trace(
        files={},
        batches=1,
        operators=(
            TracedOperator(
                name="aten::tanh",
                calls=1,
                host_seconds=0.3,
                self_host_seconds=0.3,
                device_seconds=0.0,
                self_device_seconds=0.0,
            ),
        ),
    )
    tanh = cell("act", "tanh", "forward", bytes_moved=8)
    act = window.modules["act"]
    forward = replace(act.forward, self_calls=1)
    window = replace(
        window,
        run=replace(window.run, kind="training", stage="train", window=0, step=9),
        op_counts=(*window.op_counts, tanh),
        modules={**window.modules, "act": replace(act, forward=forward)},
        trace=trace,
    )
    found = findings_of(window_summary(analyze(window)), ledger(steps(*[0.0] * 30)))
    (finding,) = (each for each in found if each.cause == "no_products")
    assert pytest.approx(0.2) == finding.seconds
    assert finding.sentence.endswith("is spent in act (Linear) itself, in tanh (150 ms).")
    assert {"tanh": pytest.approx(0.15)} == finding.operators


def test_a_checkpoint_in_the_steps_of_a_window_does_not_reduce_the_cost_of_its_work() -> None:
    """If other work makes the window's steps longer, the cost of the optimizer is not scaled down.

    The window's steps take twice the run's mean step of 0.3 s, because half of them is time outside
    all phases. The other half takes as long as a step of the run.
    """
    window = ran(
        {"fc": 0.1},
        steps=clean(*[0.6] * 9, forward=0.3, backward=0.1, optimizer=0.1, other=0.5),
    )
    training = replace(window.run, kind="training", stage="train", window=0, step=9)
    summary = window_summary(analyze(replace(window, run=training)))
    spent = {"data": 0.0, "forward": 0.18, "backward": 0.06, "optimizer": 0.06}
    groups = [replace(group, spent=spent) for group in steps(*[0.0] * 30)]
    found = findings_of(summary, ledger(groups))
    (finding,) = (each for each in found if each.cause == "optimizer")
    assert pytest.approx(0.06) == finding.seconds


def test_clipping_in_the_run_is_no_second_cause() -> None:
    """The ledger's other time is divided into clipping and the rest, as in the window.

    In the ledger, other is 1 s of a step of 2 s. In the window, nine tenths of this time is
    clipping.
    """
    window = ran({"fc": 0.1}, steps=clean(*[1.0] * 9, **CLIPPED))
    spent = {"data": 0.0, "forward": 0.7, "backward": 0.3, "other": 1.0}
    groups = [replace(group, spent=spent) for group in steps(*[0.0] * 30)]
    screen = screen_of(window, ledger(groups))
    parts = {part.name: part.seconds for part in screen.phases}
    assert pytest.approx(0.9) == parts["clip"]
    assert pytest.approx(0.1) == parts["other"]
    costs = {card.cause: card.seconds for card in screen.cards}
    assert pytest.approx(0.9) == costs["clip"]
    assert pytest.approx(0.1) == costs["other"]


def test_one_slow_step_is_named_and_is_no_cause_of_all_the_others() -> None:
    """One slow step is named in a sentence, but it is not a card with an action.

    Thirty steps take 0.3 s, and one of them takes 2.4 s more outside all phases: 21.1 % of 11.4 s.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.4))
    groups = steps(*[0.0] * 30)
    groups[7] = replace(groups[7], spent=groups[7].spent | {"other": 2.4})
    slow = SlowStep(
        step=10, end=5.4, seconds=2.7, usual=0.3, cost=2.4, cause="unknown", phase="other"
    )
    run = replace(
        ledger(groups),
        slow_steps=(slow,),
        seconds={
            "training/forward": 6.0,
            "training/backward": 3.0,
            "training/data": 0.0,
            "slow/unknown": 2.4,
        },
    )
    window_findings = window_summary(analyze(window))
    found = findings_of(window_findings, run)
    (sentence,) = (each.sentence for each in found if each.cause == "other")
    assert sentence == (
        "21.1 % of the training loop's time was lost in step 10 alone, which took 2.70 s instead "
        "of 300 ms."
    )
    assert "other" not in [card.cause for card in first_screen(window_findings, run).cards]


def stopped(phase: str, cost: float, cause: str = "not_scheduled") -> Ledger:
    """Return a run of 30 steps of 0.3 s, of which step 10 took `cost` seconds longer in a phase."""
    groups = steps(*[0.0] * 30)
    spent = groups[7].spent
    groups[7] = replace(groups[7], spent=spent | {phase: spent.get(phase, 0.0) + cost})
    slow = SlowStep(
        step=10, end=5.4, seconds=0.3 + cost, usual=0.3, cost=cost, cause=cause, phase=phase
    )
    return replace(ledger(groups), slow_steps=(slow,))


@pytest.mark.parametrize(
    ("cause", "device_type", "expected"),
    [
        ("not_scheduled", "cpu", 1.0),
        ("not_scheduled", "cuda", 1.0),
        # This is no stop: backward takes 1 s longer in the mean step, and forward does not.
        ("larger_batch", "cpu", None),
    ],
)
def test_a_stop_of_the_process_does_not_make_the_work_longer(
    cause: str, device_type: str, expected: float | None
) -> None:
    """One of 30 steps takes 30 s longer in backward. The work of all other steps is as usual."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    window = replace(window, run=replace(window.run, device_type=device_type))
    summary = window_summary(analyze(window))
    run = stopped("backward", 30.0, cause)
    times = times_of(summary, run)
    assert times is not None
    ratio = work_ratio(summary, times)
    assert 1.0 == pytest.approx(ratio.factor)
    assert (expected is None) == (ratio.longer is not None)
    assert sum(times.phases.values()) == pytest.approx(39 / 30)
    assert (expected == 1.0) == (unlike_window(summary, run) == "")


def test_on_a_device_a_slow_callback_is_not_divided_among_the_passes() -> None:
    """A step of 0.3 s takes 3 s longer outside all phases: 0.1 s in the mean of 30 steps."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    window = replace(window, run=replace(window.run, device_type="cuda"))
    summary = window_summary(analyze(window))
    times = times_of(summary, stopped("other", 3.0, "unknown"))
    assert times is not None
    assert {"forward": 0.2, "backward": 0.1, "other": 0.1} == pytest.approx(times.phases)
    assert 1.0 == pytest.approx(work_ratio(summary, times).factor)


def test_on_a_device_inference_is_no_part_of_the_step() -> None:
    """The window generates for 0.7 s and trains for 0.3 s. The ledger's steps take 0.3 s."""
    window = ran({"fc": 0.1}, steps=clean(*[1.0] * 9, inference=0.7, forward=0.2, backward=0.1))
    window = replace(window, run=replace(window.run, device_type="cuda"))
    summary = window_summary(analyze(window))
    times = times_of(summary, ledger(steps(*[0.0] * 30), inference=21.0))
    assert times is not None
    assert {"forward": 0.2, "backward": 0.1} == pytest.approx(times.phases)
    assert 1.0 == pytest.approx(work_ratio(summary, times).factor)


def test_rare_work_of_callbacks_is_no_clipping() -> None:
    """The window clips for 0.03 s. The ledger has 0.3 s outside all phases in each step.

    Forward and backward take as long as in the window, and so does clipping.
    """
    window = ran(
        {"fc": 0.1},
        steps=clean(*[0.34] * 9, forward=0.2 / 0.34, backward=0.1 / 0.34, clip=0.03 / 0.34),
    )
    groups = [replace(group, spent=group.spent | {"other": 0.3}) for group in steps(*[0.0] * 30)]
    summary = window_summary(analyze(window))
    times = times_of(summary, ledger(groups))
    assert times is not None
    assert 0.03 == pytest.approx(times.phases["clip"])
    assert 0.27 == pytest.approx(times.phases["other"])
    assert 1.0 == pytest.approx(work_ratio(summary, times).factor)


def test_a_known_peak_gives_mfu_over_all_steps_of_the_run() -> None:
    """MFU refers to the mean step of the run.

    If the run waits for data so long that its mean step is twice that of the window, MFU is half of
    the window's.
    """
    chip = Hardware("chip", {"fp32": 1e4}, None)
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=1.0))
    window = replace(window, run=replace(window.run, kind="training", hardware=chip))
    alone = values(screen_of(window, None))
    of_run = values(screen_of(window, ledger(steps(*[0.3] * 9))))
    assert alone["MFU"] == pytest.approx(200 / 0.3 / 1e4)
    assert of_run["MFU"] == pytest.approx((alone["MFU"] or 0.0) / 2)
    assert of_run["step"] == pytest.approx(0.6)


def test_the_work_of_a_window_is_not_that_of_longer_steps() -> None:
    """If forward and backward take twice as long in the run, the rate is that of the window.

    The steps of the run may have longer sequences, for example. Their MACs are unknown.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.15] * 9, forward=1.0))
    window = replace(window, run=replace(window.run, kind="training"))
    screen = screen_of(window, ledger(steps(*[0.0] * 9)))
    assert values(screen)["achieved"] == pytest.approx(200 / 0.15)
    expected = (
        "without data wait and other, a step of the run takes 2.0 × as long as a step of the window, "
        "so the window may not be typical of the run"
    )
    assert expected in screen.confidence.why


def test_an_unknown_peak_shows_the_rate_and_the_line_that_measures_it() -> None:
    """Without a known peak, the screen shows the achieved rate and how to measure the peak.

    The rate is 2 x 100 MACs in 0.3 s.
    """
    screen = screen_of(ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=1.0)), None)
    assert "MFU" not in values(screen)
    assert values(screen)["achieved"] == pytest.approx(200 / 0.3)
    assert 'hardware="measure"' in screen.hint


def test_a_window_of_a_validation_is_no_part_of_the_training_run() -> None:
    """For a window of another stage, the training steps of the ledger are not used."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=1.0))
    validated = replace(window, run=replace(window.run, kind="training", stage="validate"))
    screen = screen_of(validated, ledger(steps(*STALLS)))
    assert "" == screen.trained
    assert pytest.approx(0.3) == values(screen)["step"]


def test_a_ledger_alone_has_times_and_says_that_it_knows_no_more() -> None:
    """A ledger without a window still shows the stalls, with low confidence."""
    screen = screen_of(None, ledger(steps(*STALLS)))
    assert "A run without a profiled window" == screen.title
    assert "low" == screen.confidence.level
    assert "Data loading stalls every 3rd step" == screen.cards[0].title


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.3, 0.0, 0.0] * 5, "every 3rd step"),
        ([0.0, 0.3] * 6, "every 2nd step"),
        ([0.001] * 30, ""),
        ([], ""),
        ([0.3, 0.0, 0.0, 0.0, 0.3, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.3], "in 4 of 12 steps"),
        ([0.3] + [0.0] * 20, ""),
        ([0.1, 0.2, 0.15] * 5, ""),
        (([0.3] + [0.0] * 10) * 4, "every 11th step"),
        ([0.3] * 6 + [0.0] * 14, "in 6 of 20 steps"),
    ],
)
def test_the_rhythm_of_stalls(seconds: list[float], expected: str) -> None:
    """Stalls need at least three long waits; waits that only vary are not stalls."""
    found = stalls_in(seconds)
    if found is None:
        assert expected == ""
    else:
        assert expected == found.often


def test_in_a_long_run_the_rate_of_stalls_is_a_share() -> None:
    """The times of 40 single steps are known, and 60 steps are one group. 4 of the 40 are stalls."""
    waits = [0.0] * 40
    for place in (3, 11, 30, 37):
        waits[place] = 0.3
    groups = steps(*waits)
    stalls = stalls_of(ledger(groups))
    assert stalls is not None
    assert "in 4 of 40 steps" == stalls.often
    joined = replace(groups[0], first=50, last=109, steps=60, spent={"data": 1.8, "forward": 12.0})
    stalls = stalls_of(ledger([*groups, joined]))
    assert stalls is not None
    assert "in about 10.0 % of the steps" == stalls.often


def test_the_page_and_the_terminal_have_the_same_values() -> None:
    """The page and the terminal show the same figures and cards."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.3))
    summary = window_summary(analyze(window))
    run = ledger(steps(*STALLS), start_up=12.0)
    screen = first_screen(summary, run)
    again: dict[str, Any] = json.decode(json.encode(run_shown(summary, run)))
    assert json.decode(json.encode(screen)) == again["screen"]
    text = "\n".join(f"{label} {said}" for label, said in first_screen_rows(screen, run))
    for fact in screen.figures:
        assert fact.text in text
    for card in screen.cards[:3]:
        time = card.text.removeprefix("−")
        saving = f"{card.title}: a fix saves at most {time} per step"
        cost = f"{card.title}: this takes {time} per step"
        assert (saving if card.is_issue else cost) in text


def test_the_server_reads_the_window_from_its_payload(tmp_path: Any) -> None:
    """The server of the tab makes the first screen from the payload of the window.

    Without a ledger in the folder, the steps are those of the window.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=1.0))
    found = json.decode(encoded_run(json.encode(payload(analyze(window))), tmp_path))
    assert found["ledger"] is None
    assert [0.3] * 9 == [each["longest"] for each in found["steps"]]
    assert json.decode(json.encode(screen_of(window, None))) == found["screen"]
    with pytest.raises(ValueError, match="lacks data for the summary of the run"):
        encoded_run(b"{}", tmp_path)


def test_bars_of_a_text_reach_from_0_to_the_largest_value() -> None:
    """Bars are proportional to values; the largest value has the full height."""
    assert "▁█▁▅" == sparkline([0.0, 1.0, 0.0, 0.5])
    assert "" == sparkline([0.0, 0.0])


def test_show_of_a_folder_begins_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lflops show` of a folder shows the run's numbers as text and as JSON.

    The run has 22 s in 20 steps, and 33 of its 60 s are training.
    """
    write_resumed_run(tmp_path)
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=1.0))
    of_training = replace(window.run, kind="training", stage="train", window=0, step=9)
    replace(window, run=of_training).save(tmp_path / "train-0-9.profile.json")
    assert 0 == main(["show", str(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("run Linear · 20 steps · 1 min 0 s")
    assert "step 1.10 s, mean of 20 unprofiled steps of the run" in text
    assert "step of the window 300 ms" in text
    assert 0 == main(["show", str(tmp_path), "--json"])
    screen = json.decode(capsys.readouterr().out)["first_screen"]
    # Apart from data wait, its steps take three times as long as those of the window, so the rate is
    # that of the window.
    assert pytest.approx([1.1, 200 / 0.3, 0.55]) == [fact["value"] for fact in screen["figures"]]
    assert pytest.approx(1.1) == sum(part["seconds"] for part in screen["phases"])


def test_inference_in_the_window_and_in_the_run_is_one_finding() -> None:
    """The window times inference of 50 ms in its steps, and the ledger has the same seconds."""
    window = ran({"fc": 0.2}, steps=clean(*[0.35] * 9, forward=0.2, inference=0.05, backward=0.1))
    window = replace(
        window, run=replace(window.run, kind="training", stage="train", window=0, step=9)
    )
    run = ledger(steps(*[0.0] * 30), inference=1.5)
    found = findings_of(window_summary(analyze(window)), run)
    assert 1 == [finding.cause for finding in found].count("inference")
    # The steps of the ledger have no inference, so no part of them is taken for it.
    times = times_of(window_summary(analyze(window)), run)
    assert times is not None
    assert {"data", "forward", "backward"} == times.phases.keys()


def of_phases(**spent: float) -> list[StepGroup]:
    """Return 30 unprofiled steps with these seconds of phases."""
    return [replace(group, spent={"data": 0.0, **spent}) for group in steps(*[0.0] * 30)]


def test_a_phase_that_alone_takes_longer_after_the_window_is_named() -> None:
    """Forward takes 0.5 s in the run and 0.2 s in the window, and backward 0.1 s in both.

    So no module is scaled: `fc` takes 0.15 s in the window, and this is a quarter of the run's mean
    step of 0.6 s.
    """
    window = ran({"fc": 0.15, "act": 0.05}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    run = ledger(of_phases(forward=0.5, backward=0.1))
    found = {
        finding.cause: finding for finding in findings_of(window_summary(analyze(window)), run)
    }
    longer = found["longer_phase"]
    assert 0.3 == pytest.approx(longer.seconds)
    assert 0.5 == pytest.approx(longer.share)
    assert not longer.is_issue
    assert (
        "in the profiled steps: forward takes 500 ms in the mean step of the run, and 200 ms"
        in (longer.sentence)
    )
    assert "grows" not in longer.sentence
    assert 0.15 == pytest.approx(found["busiest"].seconds)
    assert 0.25 == pytest.approx(found["busiest"].share)
    assert "forward takes 2.5 × as long in the run" in unlike_window(
        window_summary(analyze(window)), run
    )


def test_whole_phases_have_their_time_in_the_run() -> None:
    """If module times are unreliable, forward and backward have their times of the run.

    In the window, they take 0.2 and 0.1 s. In the run, backward takes longer than forward.
    """
    window = ran({"fc": 0.15}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    note = Note(code="time_scaled", subject="", values={"forward": 9.0})
    window = replace(window, notes=(note,), run=replace(window.run, kind="training"))
    groups = ledger(of_phases(forward=0.25, backward=0.35))
    found = {each.cause: each for each in findings_of(window_summary(analyze(window)), groups)}
    assert 0.25 == pytest.approx(found["all_forward"].seconds)
    assert 0.35 == pytest.approx(found["all_backward"].seconds)
    assert "58.3 % of the step (350 ms) is spent in backward" in found["all_backward"].sentence
    screen = first_screen(window_summary(analyze(window)), groups)
    shown = [(card.title, card.text) for card in screen.cards if card.cause.startswith("all_")]
    assert [("Backward", "350 ms"), ("Forward", "250 ms")] == shown


def test_a_phase_that_grows_during_the_run_is_described() -> None:
    """Forward takes 0.2 s in the first step and 30 ms more in each later one of 30 steps.

    The first quarter of the steps are eight: 0.2 to 0.41 s, the mean is 0.305 s. The last eight
    steps take 0.86 to 1.07 s.
    """
    window = ran({"fc": 0.2}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    groups = []
    for number, group in enumerate(of_phases(backward=0.1)):
        groups.append(replace(group, spent=group.spent | {"forward": 0.2 + 0.03 * number}))
    found = findings_of(window_summary(analyze(window)), ledger(groups))
    (longer,) = (each for each in found if each.cause == "longer_phase")
    assert longer.sentence.endswith(
        "This time grows from 305 ms in the first quarter of the steps to 965 ms in the last quarter."
    )


@pytest.mark.parametrize(
    ("first", "more", "advice"),
    [
        pytest.param(None, 0, "If the batches do not grow, look for lists", id="unknown"),
        pytest.param(100, 0, "Look for lists", id="the same batches"),
        pytest.param(100, 2, "Look for lists", id="slightly larger batches"),
        pytest.param(100, 15, None, id="larger batches"),
    ],
)
def test_a_phase_that_grows_with_the_batches_is_not_reported(
    first: int | None, more: int, advice: str | None
) -> None:
    """Forward takes 0.2 s in the first step and 30 ms more in each later one of 30 steps.

    It takes 3.2 times as long in the last quarter as in the first. With 15 more elements in each
    step, the last batches have 482 elements instead of 152, which is 3.2 times as many.
    """
    window = ran({"fc": 0.2}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    groups = []
    for number, group in enumerate(of_phases(backward=0.1)):
        spent = group.spent | {"forward": 0.2 + 0.03 * number}
        elements = None if first is None else first + more * number
        groups.append(replace(group, spent=spent, elements=elements))
    found = findings_of(window_summary(analyze(window)), ledger(groups))
    advised = [each.fix for each in found if each.cause == "longer_phase"]
    if advice is None:
        assert [] == advised
    else:
        (fix,) = advised
        assert fix.startswith(advice)


@pytest.mark.parametrize(
    "spent",
    [
        pytest.param({"forward": 0.4, "backward": 0.2}, id="larger batches"),
        pytest.param({"forward": 0.22, "backward": 0.1}, id="a little longer"),
        pytest.param({"forward": 0.2, "backward": 0.1, "other": 0.9}, id="other work"),
    ],
)
def test_steps_with_more_data_are_no_longer_phase(spent: dict[str, float]) -> None:
    """In the window, forward takes 0.2 s and backward 0.1 s."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    found = findings_of(window_summary(analyze(window)), ledger(of_phases(**spent)))
    assert "longer_phase" not in {finding.cause for finding in found}


def test_logging_in_each_step_is_the_first_finding_and_part_of_the_step() -> None:
    """The window has 0.3 s outside all phases. In the run, 0.28 s of it are logging.

    A step takes 0.6 s. The other 20 ms are 3 % of it, which is no issue.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.6] * 9, forward=1 / 3, backward=1 / 6, other=0.5))
    groups = of_phases(forward=0.2, backward=0.1, logging=0.28, other=0.02)
    screen = screen_of(window, ledger(groups, **{"training/forward": 9.6, "logging": 8.4}))
    assert screen.steps is not None
    assert 0.6 == pytest.approx(screen.steps.mean)
    assert "logging" == screen.cards[0].cause
    assert 0.28 == pytest.approx(screen.cards[0].seconds)
    assert screen.cards[0].is_issue
    assert "other" not in {card.cause for card in screen.cards if card.is_issue}
    parts = {part.name: part.seconds for part in screen.phases}
    assert 0.28 == pytest.approx(parts["logging"])


def test_an_issue_of_the_window_must_be_large_enough_in_the_run() -> None:
    """A fifth of the window's steps is outside all phases, and 5 % of the run's steps of 1 s."""
    window = ran({"fc": 0.1}, steps=clean(*[0.5] * 9, forward=0.5, backward=0.3, other=0.2))
    summary = window_summary(analyze(window))
    (alone,) = (each for each in summary.findings if each.cause == "other")
    assert alone.is_issue
    run = ledger(of_phases(forward=0.6, backward=0.35, other=0.05))
    (other,) = (each for each in findings_of(summary, run) if each.cause == "other")
    assert 0.05 == pytest.approx(other.seconds)
    assert not other.is_issue


def test_work_in_every_eighth_step_is_found_although_the_window_has_none() -> None:
    """In every eighth of 80 steps, 2 s are spent outside all phases: 0.25 s in the mean step of 0.55 s."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    groups = []
    slow = []
    for number, group in enumerate(steps(*[0.0] * 80)):
        other = 2.0 if number % 8 == 7 else 0.0
        groups.append(replace(group, spent=group.spent | {"other": other}))
        if other:
            slow.append(
                SlowStep(
                    step=group.first,
                    end=1.0,
                    seconds=2.3,
                    usual=0.3,
                    cost=2.0,
                    cause="unknown",
                    phase="other",
                )
            )
    run = ledger(groups, **{"training/forward": 24.0, "slow/unknown": 20.0})
    found = findings_of(window_summary(analyze(window)), replace(run, slow_steps=tuple(slow)))
    assert "other" == found[0].cause
    assert found[0].is_issue
    assert 0.25 == pytest.approx(found[0].seconds)
    assert found[0].sentence.endswith("preparation of batches: 2.00 s every 8th step.")


@pytest.mark.parametrize(("phase", "is_known"), [("data", True), ("other", False)])
def test_a_loader_that_stalls_is_no_reason_for_doubt(phase: str, *, is_known: bool) -> None:
    """Four of nine steps take twice as long. If they wait for data, this is measured.

    If anything else takes this time, other issues may be hidden.
    """
    window_steps = clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3)
    for number in (1, 3, 5, 7):
        phases = {**window_steps[number].phases, phase: 0.3}
        window_steps[number] = replace(window_steps[number], seconds=0.6, phases=phases)
    reason = unseen_because(analyze(ran({"fc": 0.1}, steps=window_steps)))
    assert is_known == (reason is None)
    assert reason in {None, "the step times vary too much"}


def test_a_stall_is_no_growth() -> None:
    """Forward takes 0.4 s in each of 30 steps, and one stall of 20 s in the last of them.

    The ledger lists the stall as a slow step, so forward does not grow.
    """
    window = ran({"fc": 0.2}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    groups = of_phases(forward=0.4, backward=0.1)
    groups[-1] = replace(groups[-1], spent=groups[-1].spent | {"forward": 20.4})
    slow = SlowStep(
        step=groups[-1].last,
        end=30.0,
        seconds=20.5,
        usual=0.5,
        cost=20.0,
        cause="unknown",
        phase="forward",
    )
    run = replace(ledger(groups), slow_steps=(slow,))
    found = findings_of(window_summary(analyze(window)), run)
    (longer,) = (each for each in found if each.cause == "longer_phase")
    assert 0.2 == pytest.approx(longer.seconds)
    assert "grows" not in longer.sentence


def test_one_slow_step_keeps_its_own_sentence() -> None:
    """Two steps are slow outside all phases: 20 s, and 1 s. Most of the time was lost in one step."""
    window = ran({"fc": 0.2}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    groups = of_phases(forward=0.2, backward=0.1)
    slow = []
    for at, cost in ((10, 20.0), (20, 1.0)):
        groups[at] = replace(groups[at], spent=groups[at].spent | {"other": cost})
        slow.append(
            SlowStep(
                step=groups[at].last,
                end=30.0,
                seconds=cost + 0.3,
                usual=0.3,
                cost=cost,
                cause="unknown",
                phase="other",
            )
        )
    run = ledger(groups, **{"training/forward": 9.0, "slow/unknown": 21.0})
    found = findings_of(window_summary(analyze(window)), replace(run, slow_steps=tuple(slow)))
    (other,) = (each for each in found if each.cause == "other")
    assert "was lost in step 13 alone" in other.sentence


def test_an_issue_of_the_window_that_is_small_in_the_run_is_left_out() -> None:
    """Data take 20 % of the window's steps, and 1 % of the run's steps of 1 s."""
    window = ran({"fc": 0.1}, steps=clean(*[0.5] * 9, forward=0.5, backward=0.3, data=0.2))
    summary = window_summary(analyze(window))
    assert "data" in {each.cause for each in summary.findings if each.is_issue}
    groups = [
        replace(group, spent={"data": 0.01, "forward": 0.6, "backward": 0.39})
        for group in steps(*[0.0] * 30)
    ]
    assert "data" not in {each.cause for each in findings_of(summary, ledger(groups))}


def test_rare_logging_is_not_taken_from_other_time_of_a_window() -> None:
    """On a device, every tenth step logs for 1 s, and the window has 0.1 s of other work.

    The run's mean step of 0.5 s has 0.1 s of logging. Its other 0.4 s are divided as in the window:
    0.2 s of forward, 0.1 s of backward and 0.1 s of other work.
    """
    window = ran({"fc": 0.1}, steps=clean(*[0.4] * 9, forward=0.5, backward=0.25, other=0.25))
    window = replace(window, run=replace(window.run, device_type="cuda"))
    groups = []
    for number, group in enumerate(steps(*[0.0] * 30)):
        logging = 1.0 if number % 10 == 9 else 0.0
        spent = {"data": 0.0, "forward": 0.3, "backward": 0.1, "logging": logging}
        groups.append(replace(group, spent=spent))
    times = times_of(window_summary(analyze(window)), ledger(groups))
    assert times is not None
    expected = {"forward": 0.2, "backward": 0.1, "other": 0.1, "logging": 0.1}
    assert expected == pytest.approx(times.phases)


def test_other_programs_are_no_longer_phase() -> None:
    """Forward takes 0.5 s in the run and 0.2 s in the window, but steps waited for a core."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=2 / 3, backward=1 / 3))
    waits = tuple(
        SlowStep(
            step=step,
            end=1.0,
            seconds=2.6,
            usual=0.6,
            cost=2.0,
            cause="not_scheduled",
            phase="forward",
        )
        for step in (5, 10, 15)
    )
    calm = ledger(of_phases(forward=0.5, backward=0.1))
    busy = ledger(of_phases(forward=0.5, backward=0.1), **{"slow/not_scheduled": 6.0})
    for run, expected in ((calm, True), (replace(busy, slow_steps=waits), False)):
        found = findings_of(window_summary(analyze(window)), run)
        assert expected == ("longer_phase" in {finding.cause for finding in found})


@pytest.mark.parametrize(
    ("before", "length", "end"),
    [
        ((5, 15, 25), 1, "between steps: 5.00 s every 10th step."),
        ((5, 12, 25), 1, "between steps: 5.00 s each time."),
        ((10, 30, 50), 4, "between steps: 5.00 s about every 80th step."),
        ((10, 30, 51), 4, "between steps: 5.00 s about every 82nd step."),
        ((10, 11, 12), 4, "between steps."),
        ((5,), 1, "between steps."),
    ],
)
def test_a_validation_is_described_by_its_duration_and_its_distance(
    before: tuple[int, ...], length: int, end: str
) -> None:
    """The sentence says how long each validation takes, and how many steps lie between two.

    The ledger has sixty groups of one step or of four steps. With four, the distance is known only
    about. Nothing is said about validations in neighbouring groups, because a group can have two.
    """
    groups = []
    for number, group in enumerate(steps(*[0.0] * 60)):
        spent = {name: length * seconds for name, seconds in group.spent.items()}
        between = {"validation": 5.0} if number in before else {}
        first = 3 + length * number
        last = first + length - 1
        groups.append(
            replace(group, first=first, last=last, steps=length, spent=spent, between=between)
        )
    run = ledger(groups, validation=5.0 * len(before))
    said = first_screen(None, run).steps.said  # type: ignore[union-attr]
    each = 5.0 * len(before) / (60 * length)
    assert said.endswith(f"; not included per step: {units.duration(each)} of validation")
    found = findings_of(None, run)
    (sentence,) = (each.sentence for each in found if each.cause == "validation")
    assert sentence.endswith(f"is spent on validation {end}")


@pytest.mark.parametrize(("wait", "is_within"), [(0.7, True), (0.5, False)])
def test_a_thread_that_mostly_delays_one_phase_is_reported_with_this_phase(
    wait: float, is_within: bool
) -> None:
    """Two findings about the same time would look like two savings.

    A step has 0.3 s of passes and 0.5 s of other time. If the training thread waits for 0.7 s, at
    least 0.4 s of the wait are in the other time: more than half. If it waits for 0.5 s, only
    0.2 s must be there.
    """
    groups = [replace(step, spent=step.spent | {"other": 0.5}) for step in steps(*[0.0] * 30)]
    window = ran({"fc": 0.1}, steps=clean(*[0.8] * 9, forward=0.25, backward=0.125, other=0.625))
    summary = window_summary(analyze(window))
    (other,) = (each for each in summary.findings if each.cause == "other")
    thread = replace(cost("thread", wait, issue=True), fix="Find the thread")
    both = replace(summary, findings=(replace(other, is_issue=True), thread))
    found = {each.cause: each for each in findings_of(both, ledger(groups))}
    assert is_within != ("thread" in found)
    assert is_within == ("During 700 ms of the step" in found["other"].sentence)
    assert is_within == ("gives work to a thread" in found["other"].fix)


def test_the_overview_does_not_refer_to_notes_below() -> None:
    """The log ends with the overview, so there are no notes below it."""
    window = ran({"fc": 0.1}, steps=clean(*[0.3] * 9, forward=0.6, backward=0.4))
    summary = window_summary(analyze(window))
    with_note = replace(summary, confidence=(*summary.confidence, "1 note below"))
    why = first_screen(with_note, ledger(steps(*STALLS))).confidence.why
    assert why
    assert not [text for text in why if "below" in text]


def test_a_run_with_an_issue_ends_with_a_summary() -> None:
    """Checkpoints of 2 s are 18 % of a short run, an issue, but no large loss of time."""
    said: list[str] = []
    run = ledger(steps(*[0.0] * 30), checkpoint_save=2.0)
    assert not has_losses(run)
    log_run(run, None, None, said.append)
    (text,) = said
    assert "Saving checkpoints: a fix saves at most 66.7 ms per step" in text
    quiet: list[str] = []
    log_run(ledger(steps(*[0.0] * 30)), None, None, quiet.append)
    assert [] == quiet


@pytest.mark.parametrize(("seconds", "is_said"), [(3.1, True), (2.9, False)])
def test_a_run_with_a_large_finding_ends_with_a_summary(seconds: float, is_said: bool) -> None:
    """Without a window, a slow optimizer is no issue. A quarter of the 12 s is worth a summary."""
    said: list[str] = []
    run = ledger(steps(*[0.0] * 30), **{"training/optimizer": seconds})
    log_run(replace(run, device="cpu"), None, None, said.append)
    assert is_said == any("Optimizer: this takes" in text for text in said)


@pytest.mark.parametrize("seconds", [3.1, 0.0], ids=["a summary", "one line"])
@pytest.mark.parametrize("only_on_request", [True, False])
def test_a_run_without_a_window_ends_with_advice_how_to_profile_one(
    seconds: float, only_on_request: bool, tmp_path: Path
) -> None:
    """The advice is given only if no window was scheduled. Otherwise the run was too short."""
    said: list[str] = []
    run = ledger(steps(*[0.0] * 30), **{"training/optimizer": seconds})
    paths = OutputPaths.of(None, tmp_path, 1)
    log_run(replace(run, device="cpu"), None, paths, said.append, only_on_request=only_on_request)
    (text,) = said
    assert only_on_request == text.endswith(
        "To profile a window, set LFLOPS=wait=5 and start the run with `lflops run`."
    )
    assert bool(seconds) == ("Optimizer: this takes" in text)


@pytest.mark.parametrize(("other", "is_issue"), [(0.25, True), (0.1, False)])
def test_much_time_outside_all_phases_is_an_issue_even_without_a_window(
    other: float, *, is_issue: bool
) -> None:
    """0.25 of 0.75 s are a third of the time, and 0.1 of 0.6 s are a sixth.

    The optimizer is described as a part of the same mean step.
    """
    groups = []
    for group in steps(*[0.0] * 30):
        groups.append(replace(group, spent=group.spent | {"other": other, "optimizer": 0.2}))
    seconds = {"training/other": 30 * other, "training/optimizer": 6.0, "training/forward": 9.0}
    run = replace(ledger(groups), seconds=seconds, total=sum(seconds.values()), device="cpu")
    found = {each.cause: each for each in findings_of(None, run)}
    assert is_issue == found["other"].is_issue
    assert "(200 ms) is spent in the steps of the optimizer." in found["optimizer"].sentence
    assert not found["optimizer"].is_issue
    screen = first_screen(None, run)
    card = next(each for each in screen.cards if each.cause == "other")
    assert "Time outside all phases" == card.title
    assert is_issue == (screen.nothing == "")

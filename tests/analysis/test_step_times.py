from typing import Any

import pytest

from lflops.analysis.step_times import StepTimes, step_times
from lflops.profile.profile import Profile
from lflops.profile.records import TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import profile, run


def stepped(*steps: Step, **facts: Any) -> Profile:
    """A profile in which nothing was counted."""
    return profile({"": {}}, [], run=run(kind="measure", **facts), steps=steps)


def step(seconds: float | None, **fields: Any) -> Step:
    """A clean step, unless said otherwise."""
    return Step(**({"index": 0, "kind": "unprofiled", "seconds": seconds, "phases": {}} | fields))


def test_a_step_is_the_median_of_the_clean_ones_with_their_quartiles() -> None:
    """Of 1, 2, 3, 4, 10 seconds the middle is 3, a quarter of the way is 2, three quarters 4."""
    found = step_times(stepped(*map(step, (10.0, 1.0, 4.0, 2.0, 3.0))))
    assert (5, TimingStats(median=3.0, low=2.0, high=4.0, n=5)) == (found.steps, found.seconds)


def test_quartiles_between_two_steps_are_interpolated() -> None:
    """Of 1, 2, 3, 4 the median is 2.5, the lower quartile 0.75 of the way from 1 to 2."""
    assert (
        TimingStats(median=2.5, low=1.75, high=3.25, n=4)
        == step_times(stepped(*map(step, (1.0, 2.0, 3.0, 4.0)))).seconds
    )


def test_one_step_has_no_width() -> None:
    """All three are that step."""
    assert TimingStats(median=2.0, low=2.0, high=2.0, n=1) == step_times(stepped(step(2.0))).seconds


@pytest.mark.parametrize(
    "disturbed",
    [
        {"kind": "module_timing"},
        {"kind": "traced"},
        {"kind": "counted"},
        {"seconds": None},
        *(
            {"marks": ("no_update", mark)}
            for mark in (
                "warmup",
                "recompiled",
                "new_shapes",
                "validation",
                "checkpoint",
                "background",
            )
        ),
    ],
)
def test_a_step_that_is_no_measure_of_the_others_is_left_out(disturbed: dict[str, Any]) -> None:
    """Two seconds, whatever the 9 seconds of the other step were spent on.

    A step without an update is a step.
    """
    given = stepped(step(**{"seconds": 9.0} | disturbed), step(2.0, marks=("no_update",)))
    assert (1, 2.0) == (step_times(given).steps, getattr(step_times(given).seconds, "median", None))


def test_without_a_clean_step_everything_is_unknown() -> None:
    """Nothing is 0."""
    unknown = StepTimes(
        steps=0,
        seconds=None,
        mean=None,
        phases={},
        samples_per_second=None,
        tokens_per_second=None,
        cpu_seconds=None,
    )
    assert unknown == step_times(stepped(step(2.0, kind="module_timing"), samples_per_step=4))


def test_each_phase_has_the_median_of_the_steps_that_tell_of_it() -> None:
    """The order is that of the first step; one of three steps has no backward."""
    steps = (
        step(3.0, phases={"forward": 1.0, "backward": 2.0}),
        step(5.0, phases={"forward": 1.5, "backward": 3.0}),
        step(2.0, phases={"forward": 2.0}),
    )
    found = step_times(stepped(*steps))
    assert [("forward", 1.5, 3), ("backward", 2.5, 2)] == [
        (name, phase.median, phase.n) for name, phase in found.spreads.items()
    ]
    assert {"forward": 1.5, "backward": 5 / 3} == found.phases


def test_parts_add_up_to_the_summed_steps() -> None:
    """A loader that is slow in every third step: 15 of 30 seconds, where its median is 1.

    The last 3 seconds are in no phase.
    """
    steps = [step(5.0, phases={"data": 1.0, "forward": 4.0})] * 2 + [
        step(20.0, phases={"data": 13.0, "forward": 4.0, "other": 0.0})
    ]
    found = step_times(stepped(*steps))
    assert (10.0, {"data": 5.0, "forward": 4.0, "other": 1.0}) == (found.mean, found.parts)
    assert [0.5, 0.4, 0.1] == [found.share(seconds) for seconds in found.parts.values()]


def test_what_is_within_forward_is_no_part_beside_it() -> None:
    """Where forward itself is unknown, prefill and decode are parts."""
    within = {"prefill": 1.0, "decode": 2.0}
    assert {"forward": 3.0} == step_times(
        stepped(step(3.0, phases=within | {"forward": 3.0}))
    ).parts
    assert within == step_times(stepped(step(3.0, phases=within))).parts


def test_without_phases_a_step_is_not_divided() -> None:
    """No part is known, not even the rest."""
    assert {} == step_times(stepped(step(3.0))).parts


def test_rates_are_of_all_steps_together() -> None:
    """24 samples in 0.25, 0.5 and 3.25 seconds: 6 a second; 900 tokens: 225."""
    steps = (
        step(0.25, samples=8, tokens=100),
        step(3.25, samples=8, tokens=600),
        step(0.5, samples=8, tokens=200),
    )
    found = step_times(stepped(*steps))
    assert (6.0, 225.0) == (found.samples_per_second, found.tokens_per_second)


def test_a_step_that_does_not_say_its_samples_has_those_of_the_run() -> None:
    """4 samples in half a second; nobody says how many tokens."""
    found = step_times(stepped(step(0.5), step(0.5), samples_per_step=4))
    assert (8.0, None) == (found.samples_per_second, found.tokens_per_second)


def test_cpu_time_is_that_of_user_and_system_together() -> None:
    """1 and 0.5 seconds, 2 and 0.5; of the third step one of the two is not known."""
    steps = (
        step(1.0, cpu_user=1.0, cpu_system=0.5),
        step(1.0, cpu_user=2.0, cpu_system=0.5),
        step(1.0, cpu_user=9.0),
    )
    assert (
        TimingStats(median=2.0, low=1.75, high=2.25, n=2) == step_times(stepped(*steps)).cpu_seconds
    )


def test_a_clock_that_stood_still_gives_no_rate() -> None:
    """Not an endless one."""
    found = step_times(stepped(step(0.0), samples_per_step=4))
    assert (TimingStats(median=0.0, low=0.0, high=0.0, n=1), None) == (
        found.seconds,
        found.samples_per_second,
    )

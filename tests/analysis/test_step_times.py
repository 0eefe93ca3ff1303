"""Test the times of unprofiled steps: medians, quartiles, phases and rates, worked out by hand."""

from typing import Any

import pytest

from lflops.analysis.step_times import StepTimes, step_times
from lflops.profile.profile import Profile
from lflops.profile.records import TimingStats
from lflops.profile.steps import Step
from tests.support.profile_builders import profile, run


def stepped(*steps: Step, **facts: Any) -> Profile:
    """Return a profile with these steps, in which nothing was counted."""
    return profile({"": {}}, [], run=run(kind="measure", **facts), steps=steps)


def step(seconds: float | None, **fields: Any) -> Step:
    """Return an unprofiled step without marks, unless `fields` say otherwise."""
    return Step(**({"index": 0, "kind": "unprofiled", "seconds": seconds, "phases": {}} | fields))


def test_a_step_is_the_median_of_the_clean_ones_with_their_quartiles() -> None:
    """For steps of 1, 2, 3, 4 and 10 s, the median is 3 s and the quartiles are 2 s and 4 s."""
    found = step_times(stepped(*map(step, (10.0, 1.0, 4.0, 2.0, 3.0))))
    assert (5, TimingStats(median=3.0, low=2.0, high=4.0, n=5)) == (found.steps, found.seconds)


def test_quartiles_between_two_steps_are_interpolated() -> None:
    """For steps of 1, 2, 3 and 4 s, the median is 2.5 s and the lower quartile 1.75 s."""
    assert (
        TimingStats(median=2.5, low=1.75, high=3.25, n=4)
        == step_times(stepped(*map(step, (1.0, 2.0, 3.0, 4.0)))).seconds
    )


def test_one_step_has_no_width() -> None:
    """The median and both quartiles of a single step are its time."""
    assert TimingStats(median=2.0, low=2.0, high=2.0, n=1) == step_times(stepped(step(2.0))).seconds


@pytest.mark.parametrize(
    "disturbed",
    [
        {"kind": "module_timing"},
        {"kind": "traced"},
        {"kind": "counted"},
        {"seconds": None},
        {"marks": ("no_update", "warmup")},
        {"marks": ("no_update", "recompiled")},
        {"marks": ("no_update", "new_shapes")},
        {"marks": ("no_update", "validation")},
        {"marks": ("no_update", "checkpoint")},
        {"marks": ("no_update", "background")},
    ],
)
def test_a_step_that_is_no_measure_of_the_others_is_left_out(disturbed: dict[str, Any]) -> None:
    """Disturbed steps of 9 s are left out, so only the step of 2 s counts.

    A step without an update of the optimizer is not disturbed.
    """
    given = stepped(step(**{"seconds": 9.0} | disturbed), step(2.0, marks=("no_update",)))
    found = step_times(given)
    assert found.seconds is not None
    assert (1, 2.0) == (found.steps, found.seconds.median)


def test_without_a_clean_step_everything_is_unknown() -> None:
    """All values are unknown, not 0."""
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
    """The median of a phase only has the steps with this phase; the means divide by all steps.

    One of the three steps has no backward. The phases have the order of the first step.
    """
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
    """The parts are sums over all steps, so a loader that is slow in every third step shows.

    It takes 15 of 30 s, although its median is 1 s. The last 3 s are in no phase, so they are
    `other`.
    """
    steps = [step(5.0, phases={"data": 1.0, "forward": 4.0})] * 2 + [
        step(20.0, phases={"data": 13.0, "forward": 4.0, "other": 0.0})
    ]
    found = step_times(stepped(*steps))
    assert (10.0, {"data": 5.0, "forward": 4.0, "other": 1.0}) == (found.mean, found.parts)
    assert [0.5, 0.4, 0.1] == [found.share(seconds) for seconds in found.parts.values()]


def test_what_is_within_forward_is_no_part_beside_it() -> None:
    """Prefill and decode are inside forward. They are parts only if forward itself is unknown."""
    within = {"prefill": 1.0, "decode": 2.0}
    assert {"forward": 3.0} == step_times(
        stepped(step(3.0, phases=within | {"forward": 3.0}))
    ).parts
    assert within == step_times(stepped(step(3.0, phases=within))).parts


def test_without_phases_a_step_is_not_divided() -> None:
    """Without phases there is no part, and also no `other`."""
    assert {} == step_times(stepped(step(3.0))).parts


def test_rates_are_of_all_steps_together() -> None:
    """Rates divide the sums: 24 samples in 4 s are 6 per second, and 900 tokens are 225."""
    steps = (
        step(0.25, samples=8, tokens=100),
        step(3.25, samples=8, tokens=600),
        step(0.5, samples=8, tokens=200),
    )
    found = step_times(stepped(*steps))
    assert (6.0, 225.0) == (found.samples_per_second, found.tokens_per_second)


def test_a_step_that_does_not_say_its_samples_has_those_of_the_run() -> None:
    """The run has 4 samples in each step of half a second. Its number of tokens is unknown."""
    found = step_times(stepped(step(0.5), step(0.5), samples_per_step=4))
    assert (8.0, None) == (found.samples_per_second, found.tokens_per_second)


def test_cpu_time_is_that_of_user_and_system_together() -> None:
    """CPU time is user plus system time: 1.5 s and 2.5 s in the first two steps.

    The third step is left out, because its system time is unknown.
    """
    steps = (
        step(1.0, cpu_user=1.0, cpu_system=0.5),
        step(1.0, cpu_user=2.0, cpu_system=0.5),
        step(1.0, cpu_user=9.0),
    )
    assert (
        TimingStats(median=2.0, low=1.75, high=2.25, n=2) == step_times(stepped(*steps)).cpu_seconds
    )


def test_a_clock_that_stood_still_gives_no_rate() -> None:
    """The rate is unknown, not infinite."""
    found = step_times(stepped(step(0.0), samples_per_step=4))
    assert (TimingStats(median=0.0, low=0.0, high=0.0, n=1), None) == (
        found.seconds,
        found.samples_per_second,
    )

"""Test which steps belong to a window, and how many more module-timing steps it requests.

A window requests more of them if its module-timing steps are too few to decide whether a module is
slow.
"""

from typing import Any

import pytest

from lflops.monitoring.window.step_timer import TimedStep
from lflops.monitoring.window.window import Window
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.timing.step_phases import BETWEEN
from tests.support.fake_clock import StillClock
from tests.support.profile_builders import profile, spread, work

END = 10

pytestmark = pytest.mark.usefixtures("samples_stacks")


def step(ordinal: int, *, hooked: bool) -> TimedStep:
    """Return a complete step, which is a module-timing step if `hooked` is set."""
    fields: dict[str, Any] = {
        "times_phases": True,
        "device_marks": ([], [], 0.0),
        "shapes": (),
        "cpu": None,
    }
    fields |= {"samples": None, "tokens": None}
    if hooked:
        fields |= {"kind": "module_timing", "module_timing": object()}
    return TimedStep(ordinal=ordinal, logged_step=ordinal, **fields)


def test_further_hooked_steps_are_waited_for() -> None:
    """A window is not ready until it has the module-timing steps that it has requested.

    It has three such steps and requests five more, then twice four more, up to the maximum of
    sixteen. The two unprofiled steps in the window do not count.
    """
    window = Window(0, 0)
    for ordinal in range(END):
        window.opened = ordinal >= 5
        window.add(step(ordinal, hooked=ordinal >= 7))
    window.end(END, END - 1)
    ordinal = END
    waited = []
    assert window.ready
    more = window.missing_timing_steps
    while more:
        waited.append(more)
        window.request(range(ordinal, ordinal + more), "module_timing")
        assert not window.ready
        for each in range(ordinal, ordinal + more):
            assert "module_timing" == window.requested_mode(each)
            window.add(step(each, hooked=True))
        ordinal += more
        assert window.ready
        assert None is window.requested_mode(ordinal)
        more = window.missing_timing_steps
    assert [5, 4, 4] == waited


def test_a_window_without_hooked_steps_wants_none() -> None:
    """A window requests no module-timing steps if it has none, because it times no modules."""
    window = Window(0, 0)
    window.add(step(0, hooked=False))
    assert not window.may_extend
    window.add(step(1, hooked=True))
    assert not window.may_extend
    window.opened = True
    window.add(step(2, hooked=True))
    assert window.may_extend


def costs(**phases: float) -> Profile:
    """Return the profile of a window whose unprofiled step has phases of the given milliseconds."""
    seconds = {name: took * 1e-3 for name, took in phases.items()}
    total = sum(seconds.values())
    unprofiled = Step(index=0, kind="unprofiled", seconds=total, phases=seconds)
    return profile({"": {}}, [], steps=(unprofiled,))


@pytest.mark.parametrize(
    ("phases", "steps"),
    [
        # 60 ms of the phase are wanted.
        ({"data": 10.0, "forward": 20.0}, 6),
        ({"data": 11.0, "forward": 20.0}, 6),
        ({"optimizer": 5.0, "data": 1.0, "forward": 20.0}, 12),
        # at least three steps, at most sixteen
        ({"other": 500.0, "forward": 20.0}, 3),
        ({"data": 1.0, "forward": 2.0}, 16),
        # 16 x 0.6 ms are too little for samples
        ({"data": 0.6, "forward": 2.0}, 0),
        # less than 9 % of the step
        ({"data": 8.9, "forward": 91.1}, 0),
        ({"data": 9.1, "forward": 90.9}, 7),
        # The time of layers has names.
        ({"forward": 50.0, "backward": 50.0}, 0),
    ],
)
def test_stacks_are_sampled_where_a_function_should_be_named(
    phases: dict[str, float], steps: int
) -> None:
    """The more time a phase outside the layers takes, the fewer steps are enough."""
    window = Window(0, 0)
    assert steps == window.missing_stack_steps(costs(**phases))
    window.request(range(1), "module_timing")
    assert steps == window.missing_stack_steps(costs(**phases))
    window.request(range(1, 2), "stack_sampling")
    assert 0 == window.missing_stack_steps(costs(**phases))


def test_stacks_are_sampled_for_time_in_forward_outside_the_layers() -> None:
    """The root's own forward takes 12 of 100 ms, so that five steps are wanted."""
    forward = Step(index=0, kind="unprofiled", seconds=0.1, phases={"forward": 0.1})
    rows = {"": {"forward": work(seconds=spread(0.1), self_seconds=spread(0.012))}}
    given = profile(rows, [], steps=(forward,))
    assert 5 == Window(0, 0).missing_stack_steps(given)


def test_a_window_without_typical_steps_samples_no_stacks() -> None:
    """If no step was unprofiled, the shares of the phases are unknown."""
    assert 0 == Window(0, 0).missing_stack_steps(profile({"": {}}, []))


def test_the_next_window_takes_no_step_that_is_hooked_for_the_last_one() -> None:
    """A window that waits for its warm-up does not add module-timing steps.

    The previous window has requested them.
    """
    following = Window(1, END)
    following.add(step(END, hooked=True))
    following.add(step(END + 1, hooked=False))
    assert [END + 1] == [each.ordinal for each in following._wait_steps]


def phases_of(step_seconds: float, before_optimizer: tuple[float, ...]) -> list[dict[str, float]]:
    """Return the phases of each step in the profile of a window.

    Each step takes `step_seconds`. The values of `before_optimizer` are the seconds between
    backward and the optimizer in each step. The phases on the host clock are the same.
    """
    window = Window(0, 0)
    window.opened = True
    for ordinal in range(len(before_optimizer)):
        window.add(step(ordinal, hooked=False))

    def of(timed: TimedStep) -> Step:
        took = before_optimizer[timed.ordinal]
        phases = {BETWEEN: took, "other": step_seconds - took}
        return Step(
            index=timed.ordinal,
            kind="unprofiled",
            seconds=step_seconds,
            phases=phases,
            host_phases=phases,
        )

    made, _ = window.profile(
        profile({"": {}}, ()), 3, (), read=of, clock=StillClock(), failed=False
    )
    assert all(each.phases == each.host_phases for each in made.steps)
    return [dict(each.phases) for each in made.steps]


def test_what_a_loop_does_before_its_optimizer_is_clip_if_it_is_long_in_most_steps() -> None:
    """The time between backward and the optimizer is `clip` if it is long in most steps.

    The limit is 5 % of the step, which is 1 s of 20 s. All steps of a window have the same name for
    this phase.
    """
    assert [
        {"clip": 2.0, "other": 18.0},
        {"clip": 2.0, "other": 18.0},
        {"clip": 0.5, "other": 19.5},
    ] == phases_of(20.0, (2.0, 2.0, 0.5))
    assert [{"other": 20.0}] * 3 == phases_of(20.0, (0.5, 0.5, 2.0))
    assert [{"other": 20.0}] * 2 == phases_of(20.0, (2.0, 0.5))


def test_the_moment_between_two_hooks_is_no_clip_however_short_the_step() -> None:
    """A time between backward and the optimizer below 200 µs is not `clip`, even in a short step.

    A quarter of a step of 2**-10 s (977 µs) is 244 µs, which is `clip`. A quarter of a step of half
    this length is 122 µs, which is less than clipping takes.
    """
    assert ["clip", "other"] == [*phases_of(2**-10, (2**-12,))[0]]
    assert ["other"] == [*phases_of(2**-11, (2**-13,))[0]]


def test_a_requested_counting_step_does_not_belong_to_the_next_window() -> None:
    """While the next window waits, it takes unprofiled steps, but no step of the previous window.

    A window of number 0 that has not opened is worth reporting only if it has a step.
    """
    following = Window(0, END)
    following.add(step(END, hooked=False)._replace(kind="counting"))
    assert not following.is_worth_reporting
    following.add(step(END + 1, hooked=False))
    assert following.is_worth_reporting

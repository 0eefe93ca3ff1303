"""Test the schedule of a run, also for runs that are too short for it.

A schedule means the same as `torch.profiler.schedule`, in steps of the optimizer.
"""

import itertools
import re
from typing import Any

import pytest
from torch.profiler import ProfilerAction, schedule as torchs_schedule

from lflops.errors import ScheduleError
from lflops.monitoring.schedule import Plan, Position, Schedule

PHASES = {
    ProfilerAction.NONE: {"wait", "over"},
    ProfilerAction.WARMUP: {"warmup", "count"},
    ProfilerAction.RECORD: {"module_timing"},
    ProfilerAction.RECORD_AND_SAVE: {"module_timing"},
}
"""The phases of lflops that correspond to each action of torch.profiler."""


LETTERS = {
    "wait": "-",
    "warmup": "u",
    "count": "c",
    "traced": "t",
    "module_timing": "h",
    "over": ".",
}


def phases(plan: Plan, steps: int) -> str:
    """Return one letter for the phase of each step."""
    return "".join(LETTERS[plan.place(step).phase] for step in range(steps))


@pytest.mark.parametrize(
    ("wait", "warmup", "active", "repeat", "skip_first"),
    list(itertools.product((0, 2), (1, 3), (1, 2), (0, 1, 3), (0, 4))),
)
def test_a_step_has_the_phase_that_torch_gives_it(
    wait: int, warmup: int, active: int, repeat: int, skip_first: int
) -> None:
    """A step's phase corresponds to torch's action, in the first 40 steps of each schedule."""
    arguments = {
        "wait": wait,
        "warmup": warmup,
        "active": active,
        "repeat": repeat,
        "skip_first": skip_first,
    }
    action_of = torchs_schedule(**arguments)
    plan = Plan.of(Schedule(**arguments))
    for step in range(40):
        assert plan.place(step).phase in PHASES[action_of(step)], f"step {step}"


def test_the_last_step_of_the_warmup_is_the_counted_one() -> None:
    """The counting step is the last warm-up step of each window.

    The schedule skips 3 steps and has two windows. Nothing follows them.
    """
    plan = Plan.of(Schedule(wait=2, warmup=2, active=1, repeat=2, skip_first=3))
    assert "-----uch--uch..." == phases(plan, 16)
    assert [
        Position("wait", 0),
        Position("count", 0),
        Position("count", 1),
        Position("over", 2),
    ] == [plan.place(step) for step in (0, 6, 11, 13)]


def test_no_end_of_windows_is_what_repeat_0_asks_for() -> None:
    """With `repeat=0`, windows have no end. A window has 3 steps, so step 3,000,000 begins one."""
    plan = Plan.of(Schedule(wait=1, warmup=1, active=1, repeat=0))
    assert Position("wait", 1_000_000) == plan.place(3_000_000)


def test_without_a_warmup_nothing_is_counted() -> None:
    """Without a warm-up, no step is counted, and modules are only timed."""
    assert "-hh-hh" == phases(Plan.of(Schedule(wait=1, warmup=0, active=2, repeat=0)), 6)


def test_batches_become_whole_steps() -> None:
    """With 4 batches in a step, each part of the schedule is rounded up to whole steps.

    The 5, 2, 3 and 1 batches become 2, 1, 1 and 1 steps.
    """
    plan = Plan.of(Schedule(wait=5, warmup=2, active=3, skip_first=1), accumulation=4)
    assert Plan(skip_first=1, wait=2, warmup=1, active=1, windows=1) == plan


# The schedule has skip_first=2, wait=5, warmup=2 and active=3, together 12 steps. The keys are the
# numbers of batches in the run, and the values are the phases that remain.
SHORT = {
    12: "-------uchhh",
    11: "------uchhh",
    10: "-----uchhh",
    6: "-uchhh",
    5: "uchhh",
    4: "uchh",
    3: "uch",
    2: "ch",
    1: "c",
    0: "c",
}


@pytest.mark.parametrize(("batches", "expected"), SHORT.items())
def test_a_short_run_is_counted_all_the_same(batches: int, expected: str) -> None:
    """In a short run, parts of the schedule are shortened, but the counting step stays.

    The skipped steps are removed first, then the wait, the active steps, and the other warm-up
    steps.
    """
    plan = Plan.of(Schedule(skip_first=2), batches=batches)
    assert expected == phases(plan, max(batches, 1))


def test_a_short_run_with_accumulation_is_measured_in_steps() -> None:
    """With 3 batches in a step, 6 batches are 2 steps and 7 batches are 3 steps.

    The last of the 3 steps has only 1 batch.
    """
    assert Plan(skip_first=0, wait=0, warmup=1, active=1, windows=1) == Plan.of(
        Schedule(), accumulation=3, batches=6
    )
    assert Plan(skip_first=0, wait=1, warmup=1, active=1, windows=1) == Plan.of(
        Schedule(), accumulation=3, batches=7
    )


@pytest.mark.parametrize(("repeat", "windows"), [(1, 1), (2, 2), (5, 3), (0, 3)])
def test_windows_that_would_not_be_finished_are_not_begun(repeat: int, windows: int) -> None:
    """After 1 skipped batch, a run of 33 batches has room for 3 windows of 10 batches."""
    assert windows == Plan.of(Schedule(repeat=repeat, skip_first=1), batches=33).windows


WRONG = [
    ({"wait": -1}, "wait=-1: pass a whole number, 0 or more"),
    ({"warmup": 1.5}, "warmup=1.5: pass a whole number, 0 or more"),
    ({"active": 0}, "active=0: pass a whole number, 1 or more"),
    ({"repeat": True}, "repeat=True: pass a whole number, 0 or more"),
    ({"skip_first": "2"}, "skip_first='2': pass a whole number, 0 or more"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_schedule_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument, its value and the accepted values."""
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule(**arguments)


def test_a_plan_knows_how_long_nothing_is_due() -> None:
    """`waits_until` returns the next step that is not a wait.

    Two steps are skipped and three are waits, so the first window begins at step 5. Inside a
    window, it returns the step itself. Between the two windows, three steps are waits. After the
    last window, it returns infinity.
    """
    plan = Plan.of(Schedule(wait=3, warmup=1, active=1, repeat=2, skip_first=2))
    assert [5] * 6 + [6, 10, 10, 10, 10, 11] == [plan.waits_until(step) for step in range(12)]
    assert float("inf") == plan.waits_until(12)

"""When what happens: the meaning of `torch.profiler.schedule`, in steps of the optimizer, and in runs too short for it."""

import itertools
import re
from typing import Any

import pytest
from torch.profiler import ProfilerAction, schedule as torchs_schedule

from lflops.errors import ScheduleError
from lflops.schedule import Plan, Position, Schedule

PHASES = {
    ProfilerAction.NONE: {"wait", "over"},
    ProfilerAction.WARMUP: {"warmup", "count"},
    ProfilerAction.RECORD: {"module_timing"},
    ProfilerAction.RECORD_AND_SAVE: {"module_timing"},
}


LETTERS = {
    "wait": "-",
    "warmup": "u",
    "count": "c",
    "traced": "t",
    "module_timing": "h",
    "over": ".",
}


def phases(plan: Plan, steps: int) -> str:
    """A letter for each step's phase."""
    return "".join(LETTERS[plan.place(step).phase] for step in range(steps))


@pytest.mark.parametrize(
    ("wait", "warmup", "active", "repeat", "skip_first"),
    list(itertools.product((0, 2), (1, 3), (1, 2), (0, 1, 3), (0, 4))),
)
def test_a_step_has_the_phase_that_torch_gives_it(
    wait: int, warmup: int, active: int, repeat: int, skip_first: int
) -> None:
    """For the first 40 steps of every small schedule."""
    arguments = {
        "wait": wait,
        "warmup": warmup,
        "active": active,
        "repeat": repeat,
        "skip_first": skip_first,
    }
    theirs, plan = torchs_schedule(**arguments), Plan.of(Schedule(**arguments))
    assert [] == [step for step in range(40) if plan.place(step).phase not in PHASES[theirs(step)]]


def test_the_last_step_of_the_warmup_is_the_counted_one() -> None:
    """Two windows, 3 steps skipped before them, then nothing."""
    plan = Plan.of(Schedule(wait=2, warmup=2, active=1, repeat=2, skip_first=3))
    assert "-----uch--uch..." == phases(plan, 16)
    assert [
        Position("wait", 0),
        Position("count", 0),
        Position("count", 1),
        Position("over", 2),
    ] == [plan.place(step) for step in (0, 6, 11, 13)]


def test_no_end_of_windows_is_what_repeat_0_asks_for() -> None:
    """Step 3,000,000 begins window 1,000,000."""
    assert Position("wait", 1_000_000) == Plan.of(
        Schedule(wait=1, warmup=1, active=1, repeat=0)
    ).place(3_000_000)


def test_without_a_warmup_nothing_is_counted() -> None:
    """A schedule for times alone."""
    assert "-hh-hh" == phases(Plan.of(Schedule(wait=1, warmup=0, active=2, repeat=0)), 6)


def test_batches_become_whole_steps() -> None:
    """5, 2, 3 and 1 batches, 4 to a step: 2, 1, 1 and 1 steps."""
    plan = Plan.of(Schedule(wait=5, warmup=2, active=3, skip_first=1), accumulation=4)
    assert Plan(skip_first=1, wait=2, warmup=1, active=1, windows=1) == plan


# Of skip_first=2, wait=5, warmup=2, active=3: 12 steps. What is left in a run of so many batches.
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
    """What is skipped goes first, then the waiting, active steps, warming up.

    The counted step stays.
    """
    plan = Plan.of(Schedule(skip_first=2), batches=batches)
    assert expected == phases(plan, max(batches, 1))


def test_a_short_run_with_accumulation_is_measured_in_steps() -> None:
    """7 batches, 3 to a step, are 3 steps, the last of them of 1 batch."""
    assert Plan(skip_first=0, wait=0, warmup=1, active=1, windows=1) == Plan.of(
        Schedule(), accumulation=3, batches=6
    )
    assert Plan(skip_first=0, wait=1, warmup=1, active=1, windows=1) == Plan.of(
        Schedule(), accumulation=3, batches=7
    )


@pytest.mark.parametrize(("repeat", "windows"), [(1, 1), (2, 2), (5, 3), (0, 3)])
def test_windows_that_would_not_be_finished_are_not_begun(repeat: int, windows: int) -> None:
    """In 33 batches there is room for 3 windows of 10, after the one that is skipped."""
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
    """The error names the argument, the value and what is taken."""
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule(**arguments)


def test_a_plan_knows_how_long_nothing_is_due() -> None:
    """Two skipped and three waited for.

    Within a window each step is due; between two windows three are not; in the end none is.
    """
    plan = Plan.of(Schedule(wait=3, warmup=1, active=1, repeat=2, skip_first=2))
    assert [5] * 6 + [6, 10, 10, 10, 10, 11] == [plan.waits_until(step) for step in range(12)]
    assert float("inf") == plan.waits_until(12)

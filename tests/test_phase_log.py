"""Test the log of a run's transitions, and the functions that read lists of its events."""

import gc
import threading
from typing import Any

import pytest

from lflops.phase_log import (
    DROP,
    ENTER,
    LEAVE,
    MANY,
    STEP_END,
    WAIT,
    WIDTH,
    PhaseLog,
    innermost,
)
from lflops.timing.step_phases import split_steps


class Kept:
    """A reader that stores all values that it receives."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def take(self, events: Any) -> None:
        self.values += events


def script(*events: tuple[Any, ...]) -> list[Any]:
    """Return the flat values of events. Values that an event omits are `None`."""
    values: list[Any] = []
    for event in events:
        values += (*event, None, None)[:WIDTH]
    return values


STEP = script(
    (10, ENTER, "data", "train"),
    (30, LEAVE),
    (40, ENTER, "optimizer", "train"),
    (50, ENTER, "forward", "train"),
    (70, LEAVE),
    (90, LEAVE),
)
"""Events of one step: the phase `forward` runs inside the phase `optimizer`."""


def test_a_phase_within_another_interrupts_it() -> None:
    """`innermost` yields only the innermost phase.

    The optimizer phase runs from 40 to 50 and from 70 to 90, with forward in between.
    """
    assert [
        (10, "data"),
        (30, ""),
        (40, "optimizer"),
        (50, "forward"),
        (70, "optimizer"),
        (90, ""),
    ] == list(innermost(STEP, "train", []))


@pytest.mark.parametrize("cut", range(len(STEP) // WIDTH + 1))
def test_a_log_may_be_read_in_parts(cut: int) -> None:
    """Reading the events in two parts gives the same result as reading all of them at once.

    The phases that run at the cut are carried over in `running`.
    """
    running: list[tuple[str, str]] = []
    read = [
        *innermost(STEP[: cut * WIDTH], "train", running),
        *innermost(STEP[cut * WIDTH :], "train", running),
    ]
    assert read == list(innermost(STEP, "train", []))
    assert [] == running


def test_a_stage_has_its_own_phases() -> None:
    """Only the phases of the requested stage are yielded.

    Here, validation runs inside a training step. The data wait from 20 to 30 belongs to validation.
    """
    values = script(
        (10, ENTER, "forward", "train"),
        (20, ENTER, "data", "validate"),
        (30, LEAVE),
        (40, LEAVE),
    )
    assert [(10, "forward"), (40, "")] == list(innermost(values, "train", []))
    assert [(20, "data"), (30, "")] == list(innermost(values, "validate", []))


def test_a_phase_that_an_exception_ends_has_no_measured_end() -> None:
    """After `DROP`, the moment is `None`, so the time of the phase lasts until the next mark.

    A wait belongs to the stage of the phase around it. The second wait is outside any phase, so it
    is not yielded.
    """
    values = script(
        (10, ENTER, "backward", "train"), (15, WAIT), (20, DROP), (25, WAIT), (30, LEAVE)
    )
    assert [(10, "backward"), (15, WAIT), (None, "")] == list(innermost(values, "train", []))


def test_steps_end_for_their_reader() -> None:
    """A reader sees only its own step ends, because two monitors may count steps differently."""
    first, second = object(), object()
    values = script((10, STEP_END, first), (20, STEP_END, second))
    assert [(20, STEP_END)] == list(innermost(values, "train", [], second))


def test_marks_are_split_at_the_ends_of_steps() -> None:
    """The marks are split into two whole steps, 0 to 10 and 10 to 30, and a step that began at 30.

    The mark at `None` is dropped.
    """
    steps, marks, phases = split_steps(
        [0, 4, 10, 10, 12, None, 30, 30],
        ["other", "data", STEP_END, "data", "forward", "other", STEP_END, "other"],
    )
    assert [([0, 4], ["other", "data"], 10), ([10, 12], ["data", "forward"], 30)] == steps
    assert ([30], ["other"]) == (marks, phases)


def test_each_reader_receives_every_event_once() -> None:
    """A reader receives each event between its connection and its disconnection exactly once."""
    log = PhaseLog(lambda: 0)
    first = Kept()
    second = Kept()
    log.append((1, ENTER, "before", "train"))
    log.connect(first)
    log.append((2, ENTER, "data", "train"))
    log.connect(second)
    log.connect(second)
    log.append((3, LEAVE, None, None))
    log.deliver()
    log.deliver()
    log.disconnect(first)
    log.append((4, LEAVE, None, None))
    log.disconnect(second)
    log.disconnect(second)
    log.append((5, LEAVE, None, None))
    assert script((2, ENTER, "data", "train"), (3, LEAVE)) == first.values
    assert script((3, LEAVE), (4, LEAVE)) == second.values
    assert [] == log.events


def test_events_keep_their_order_while_another_thread_delivers() -> None:
    """Ten thousand events arrive completely and in order."""
    log = PhaseLog()
    reader = Kept()
    is_over = threading.Event()
    log.connect(reader)

    def deliver() -> None:
        while not is_over.is_set():
            log.deliver()

    thread = threading.Thread(target=deliver)
    thread.start()
    for number in range(10_000):
        log.append((number, LEAVE, None, None))
    is_over.set()
    thread.join()
    log.deliver()
    assert [*range(10_000)] == reader.values[::WIDTH]


def test_events_are_nothing_that_python_collects() -> None:
    """Events do not add objects that the garbage collector tracks.

    Thousands of tuples would make the collector run during training. The last assertion shows that
    the collector tracks a tuple that contains a list.
    """
    log = PhaseLog()
    reader = Kept()
    log.connect(reader)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(MANY // WIDTH):
        log.append((log.clock(), ENTER, "data", "train"))
    assert len(gc.get_objects()) - before < 10
    tuples = [(log.clock(), ENTER, "data", [])]
    assert gc.is_tracked(tuples[0])

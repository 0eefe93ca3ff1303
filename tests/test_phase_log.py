"""The log of a run's transitions, and what is computed from lists of them."""

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
    """A reader that keeps what it receives."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def take(self, events: Any) -> None:
        self.values += events


def script(*events: tuple[Any, ...]) -> list[Any]:
    """Flat values of events; what an event leaves out is `None`."""
    return [value for event in events for value in (*event, None, None)[:WIDTH]]


STEP = script(
    (10, ENTER, "data", "train"),
    (30, LEAVE),
    (40, ENTER, "optimizer", "train"),
    (50, ENTER, "forward", "train"),
    (70, LEAVE),
    (90, LEAVE),
)


def test_a_phase_within_another_interrupts_it() -> None:
    """The optimizer runs from 40 to 50 and from 70 to 90, around forward."""
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
    """The phases that run at the cut are carried over."""
    running: list[tuple[str, str]] = []
    parts = [STEP[: cut * WIDTH], STEP[cut * WIDTH :]]
    read = [mark for part in parts for mark in innermost(part, "train", running)]
    assert read == list(innermost(STEP, "train", []))
    assert [] == running


def test_a_stage_has_its_own_phases() -> None:
    """A validation within a step of training: data from 20 to 30 is the validation's."""
    values = script(
        (10, ENTER, "forward", "train"),
        (20, ENTER, "data", "validate"),
        (30, LEAVE),
        (40, LEAVE),
    )
    assert [(10, "forward"), (40, "")] == list(innermost(values, "train", []))
    assert [(20, "data"), (30, "")] == list(innermost(values, "validate", []))


def test_a_phase_that_an_exception_ends_has_no_measured_end() -> None:
    """Its time lasts until the next mark. A wait belongs to the stage of the phase around it."""
    values = script(
        (10, ENTER, "backward", "train"), (15, WAIT), (20, DROP), (25, WAIT), (30, LEAVE)
    )
    assert [(10, "backward"), (15, WAIT), (None, "")] == list(innermost(values, "train", []))


def test_steps_end_for_their_reader() -> None:
    """Two monitors of one loop count their own steps."""
    first, second = object(), object()
    values = script((10, STEP_END, first), (20, STEP_END, second))
    assert [(20, STEP_END)] == list(innermost(values, "train", [], second))


def test_marks_are_split_at_the_ends_of_steps() -> None:
    """Two steps, 0 to 10 and 10 to 30, and one that has begun at 30; the mark at `None` is dropped."""
    steps, marks, phases = split_steps(
        [0, 4, 10, 10, 12, None, 30, 30],
        ["other", "data", STEP_END, "data", "forward", "other", STEP_END, "other"],
    )
    assert [([0, 4], ["other", "data"], 10), ([10, 12], ["data", "forward"], 30)] == steps
    assert ([30], ["other"]) == (marks, phases)


def test_each_reader_receives_every_event_once() -> None:
    """From the moment at which it was connected until it is disconnected."""
    log, first, second = PhaseLog(lambda: 0), Kept(), Kept()
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
    """Ten thousand events."""
    log, reader, is_over = PhaseLog(), Kept(), threading.Event()
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
    """Thousands of tuples would make its collector run."""
    log, reader = PhaseLog(), Kept()
    log.connect(reader)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(MANY // WIDTH):
        log.append((log.clock(), ENTER, "data", "train"))
    assert len(gc.get_objects()) - before < 10
    tuples = [(log.clock(), ENTER, "data", [])]
    assert gc.is_tracked(tuples[0])

"""Waits for a core by phase, from counters and a clock that the test advances."""

import pytest

from lflops.timing.phase_waits import ADJACENT, PhaseWaits
from tests.support.fake_clock import StillClock


class Thread:
    """A thread whose scheduler counters the test sets: nanoseconds on a core, and waiting."""

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock
        self.waited = 0
        self.readings = 0

    def run(self, seconds: float, *, waiting: float = 0.0) -> None:
        """Let time pass, in a part of which the thread waits for a core."""
        self.clock.advance(seconds)
        self.waited += round(1e9 * waiting)

    def read(self) -> bytes:
        """As `/proc/self/task/*/schedstat` has them."""
        self.readings += 1
        return b"0 %d 1" % self.waited


@pytest.fixture
def clock() -> StillClock:
    """At 0."""
    return StillClock()


@pytest.fixture
def thread(clock: StillClock) -> Thread:
    """Before its first wait."""
    return Thread(clock)


@pytest.fixture
def waits(clock: StillClock, thread: Thread) -> PhaseWaits:
    """Before the first phase."""
    return PhaseWaits(clock, thread.read)


def test_a_wait_belongs_to_the_phase_in_which_it_is(waits: PhaseWaits, thread: Thread) -> None:
    """2 ms in forward, 3 ms at the end of backward, 1 ms behind it in no phase."""
    waits.enter("forward")
    thread.run(10e-3, waiting=2e-3)
    waits.leave()
    thread.run(1e-3)
    waits.enter("backward")
    thread.run(5e-3)
    waits.wait()
    thread.run(5e-3, waiting=3e-3)
    waits.leave()
    thread.run(2e-3, waiting=1e-3)
    waits.enter("data")
    waits.end_step(7, 0.0, 23e-3)
    assert {"forward": 2e-3, "wait": 3e-3, "other": 1e-3} == waits.of_step(7)
    assert waits.of_step(8) is None


def test_each_step_has_its_own_waits(waits: PhaseWaits, thread: Thread) -> None:
    """1 ms and 4 ms in two steps of 10 ms; the time before the first step belongs to none."""
    for waiting in (9e-3, 1e-3, 4e-3):
        waits.enter("forward")
        thread.run(10e-3, waiting=waiting)
        waits.leave()
    waits.enter("data")
    waits.end_step(0, 10e-3, 20e-3)
    waits.end_step(1, 20e-3, 30e-3)
    assert [{"forward": 1e-3}, {"forward": 4e-3}] == [waits.of_step(0), waits.of_step(1)]


def test_a_phase_that_begins_where_another_ends_needs_no_reading_of_its_own(
    waits: PhaseWaits, thread: Thread
) -> None:
    """Three moments, five changes of phase."""
    waits.enter("data")
    thread.run(1.0)
    waits.leave()
    thread.run(ADJACENT / 2)
    waits.enter("forward")
    thread.run(1.0)
    waits.leave()
    waits.enter("backward")
    assert 3 == thread.readings


def test_a_phase_that_an_exception_ends_is_left_without_a_reading(
    waits: PhaseWaits, thread: Thread
) -> None:
    """The wait is that of the phase before the next change."""
    waits.enter("forward")
    thread.run(1.0)
    waits.drop()
    assert 1 == thread.readings
    thread.run(1.0, waiting=0.5)
    waits.enter("data")
    waits.end_step(0, 0.0, 3.0)
    assert {"forward": 0.5} == waits.of_step(0)


def test_without_counters_nothing_is_known(clock: StillClock) -> None:
    """As on a system that has none."""
    waits = PhaseWaits(clock, lambda: None)
    waits.enter("forward")
    clock.advance(1.0)
    waits.leave()
    clock.advance(1.0)
    waits.enter("data")
    waits.end_step(0, 0.0, 3.0)
    assert waits.of_step(0) is None

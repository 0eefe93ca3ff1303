"""Test `PhaseWaits`: waits for a core by phase. The test sets the counters and the clock."""

import pytest

from lflops.timing.phase_waits import ADJACENT, PhaseWaits
from tests.support.fake_clock import StillClock


class Thread:
    """A thread whose scheduler counters the test sets.

    Attributes:
        waited: Nanoseconds that the thread has waited for a core.
        readings: How often the counters have been read.
    """

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock
        self.waited = 0
        self.readings = 0

    def run(self, seconds: float, *, waiting: float = 0.0) -> None:
        """Advance the clock by `seconds`, of which the thread waits for a core for `waiting`."""
        self.clock.advance(seconds)
        self.waited += round(1e9 * waiting)

    def read(self) -> bytes:
        """Return the counters in the format of `/proc/self/task/*/schedstat`."""
        self.readings += 1
        return b"0 %d 1" % self.waited


@pytest.fixture
def clock() -> StillClock:
    """Return a clock at 0."""
    return StillClock()


@pytest.fixture
def thread(clock: StillClock) -> Thread:
    """Return a thread that has not waited yet."""
    return Thread(clock)


@pytest.fixture
def waits(clock: StillClock, thread: Thread) -> PhaseWaits:
    """Return a `PhaseWaits` before its first phase."""
    return PhaseWaits(clock, thread.read)


def test_a_wait_belongs_to_the_phase_in_which_it_is(waits: PhaseWaits, thread: Thread) -> None:
    """A wait belongs to the phase in which it happens.

    The thread waits for 2 ms in forward, for 3 ms at the end of backward, and for 1 ms after it,
    outside all phases.
    """
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
    """Each of two steps has its own wait, 1 ms and 4 ms.

    The wait of 9 ms before the first step belongs to no step.
    """
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
    """If a phase begins right after another phase ends, both changes share one reading.

    There are five changes of phase at three moments.
    """
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
    """If an exception ends a phase, the counters are not read.

    The wait until the next change belongs to this phase.
    """
    waits.enter("forward")
    thread.run(1.0)
    waits.drop()
    assert 1 == thread.readings
    thread.run(1.0, waiting=0.5)
    waits.enter("data")
    waits.end_step(0, 0.0, 3.0)
    assert {"forward": 0.5} == waits.of_step(0)


def test_without_counters_nothing_is_known(clock: StillClock) -> None:
    """Without counters, as on some systems, the waits of a step are unknown."""
    waits = PhaseWaits(clock, lambda: None)
    waits.enter("forward")
    clock.advance(1.0)
    waits.leave()
    clock.advance(1.0)
    waits.enter("data")
    waits.end_step(0, 0.0, 3.0)
    assert waits.of_step(0) is None

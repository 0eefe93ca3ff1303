"""Measure how long the training thread waits for a core in each phase of a step.

Ranks are compared by the time that they take in each phase. If the system gives a rank's core to
another thread, the phase takes longer, but the rank itself is not slow. So the comparison subtracts
the time that the thread waited for a core in each phase.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lflops.phase_log import WAIT
from lflops.timing.clock import Clock, ThreadSchedule
from lflops.timing.step_phases import OTHER

# Maximum time in seconds between two changes of phase that share one reading of the counters. A
# phase often ends where the next one begins, and a reading takes 2 to 4 µs.
ADJACENT = 20e-6
# Maximum number of steps whose waits are kept, and maximum number of changes of phase that belong
# to no ended step yet.
MOST_STEPS = 1_000
MOST_CHANGES = 20_000


class _Change(NamedTuple):
    """A change of phase: its moment, the phase that begins, and the scheduler counters."""

    moment: Any
    phase: str
    counters: bytes | None


class PhaseWaits:
    """Measures how long the training thread waits for a core in each phase.

    Whenever the phase changes, the thread's scheduler counters are read. They show how long the
    thread has waited for a core so far. An instance must be created on the training thread.

    Args:
        clock: The host clock that marks the steps.
        read: Reads the scheduler counters of the training thread.
    """

    def __init__(self, clock: Clock, read: Callable[[], bytes | None] | None = None) -> None:
        self._clock = clock
        self._read = ThreadSchedule().read if read is None else read
        self._running = [OTHER]
        self._changes: deque[_Change] = deque(maxlen=MOST_CHANGES)
        self._by_step: dict[int, Mapping[str, float] | None] = {}

    def enter(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        self._running.append(phase)
        self._record(phase)

    def leave(self) -> None:
        self.drop()
        self._record(self._running[-1])

    def drop(self) -> None:
        """End a phase because of an exception. The scheduler counters are not read in this case."""
        if len(self._running) > 1:
            self._running.pop()

    def wait(self) -> None:
        """Begin the wait for other ranks at the end of backward."""
        self._record(WAIT)

    def end_step(self, number: int, start: Any, end: Any) -> None:
        """Compute how long the thread waited for a core in each phase of the step `number`.

        `start` and `end` are the marks of the step. The result is stored for `of_step`. Steps must
        arrive in order.
        """
        self._by_step[number] = self._of_step(start, end)
        if len(self._by_step) > MOST_STEPS:
            del self._by_step[next(iter(self._by_step))]

    def of_step(self, number: int) -> Mapping[str, float] | None:
        """Return the seconds in which the thread waited for a core in each phase of a step.

        Phases without such waits are left out. The result is `None` if the step is not stored, or
        if the system has no scheduler counters.
        """
        return self._by_step.get(number)

    def _of_step(self, start: Any, end: Any) -> Mapping[str, float] | None:
        waits: dict[str, int] = {}
        changes = self._changes
        while len(changes) > 1 and changes[0].moment < start:
            changes.popleft()
        is_known = False
        waited_before = None
        while len(changes) > 1 and changes[0].moment < end:
            change = changes.popleft()
            if waited_before is None:
                waited_before = _waited(change.counters)
            waited = _waited(changes[0].counters)
            if waited is None or waited_before is None:
                return None
            is_known = True
            if waited > waited_before:
                waits[change.phase] = waits.get(change.phase, 0) + waited - waited_before
            waited_before = waited
        if not is_known:
            return None
        return {phase: nanoseconds / 1e9 for phase, nanoseconds in waits.items()}

    def _record(self, phase: str) -> None:
        moment = self._clock.mark()
        changes = self._changes
        if changes and self._clock.seconds(changes[-1].moment, moment) < ADJACENT:
            counters = changes[-1].counters
        else:
            counters = self._read()
        changes.append(_Change(moment, phase, counters))


def _waited(counters: bytes | None) -> int | None:
    """Return the nanoseconds that a thread has waited for a core, from its scheduler counters."""
    if not counters:
        return None
    return int(counters.split(None, 2)[1])

"""Turn the events of the phase log into marks of the time account.

A mark is a moment at which another category of time begins, or at which a step ends:

    marks    |start_up.......|data...|forward...|backward..|optimizer|other|step|lflops|data...

The time from a mark to the next mark belongs to the category that begins at the first of the two
marks. So the categories always add up to the whole time, and no time is lost if an interrupt
(Ctrl-C) comes between two marks.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from resource import RUSAGE_THREAD, getrusage
from typing import Any, NamedTuple

from lflops.phase_log import (
    BATCH,
    BEGIN,
    COUNTERS,
    DROP,
    ENTER,
    LEAVE,
    MOVE,
    PAST,
    REST,
    RUN,
    STEP_END,
    WAIT,
    WIDTH,
    events_in,
)

OTHER = "other"
"""The phase for the time of a step that is outside all other phases."""

START_UP = "start_up"
BETWEEN_EPOCHS = "between_epochs"
AFTER_RUN = "after_run"

TRAIN = "train"
"""The stage in which the ledger records the phases of steps: training, not validation or test."""

LONGEST = WIDTH << 18
"""Maximum length of the log that waits for the ledger's thread. An event has `WIDTH` values."""

IDLE = 2_000_000
"""Nanoseconds for which the training thread must be off its core until its counters are read again.

The counters are the scheduler counters and the result of `getrusage`. Until then, the last values
are used, because reading new values takes as long as logging ten events.
"""


def unknown() -> None:
    """Return `None`. This replaces the function that reads scheduler counters if there are none."""


class StepEnd(NamedTuple):
    """The mark for the end of a step. The category that was active before remains active.

    Attributes:
        step: Number of steps that the run has done: the step on the x-axis of loggers.
        ran: Nanoseconds that the training thread has run on a core since the thread began.
        schedule: Scheduler counters of the training thread, read at or shortly before the end of
            the step. `None` if the system has none.
        usage: Result of `getrusage` for the training thread, read together with `schedule`.
        shapes: Shapes of the tensors in the step's batch, if known.
        touched: Set if lflops counted, timed by module or traced the step, so that the duration of
            the step is not typical.
    """

    step: int
    ran: int
    schedule: bytes | None
    usage: Any
    shapes: Hashable
    touched: bool

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.step - 1


Mark = tuple[int, str | StepEnd]


class EventQueue:
    """Keeps the events of the phase log until the ledger's thread processes them."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque(maxlen=LONGEST)
        self.take = self._values.extend

    def pop(self) -> list[Any]:
        """Remove and return the values of all events."""
        pop = self._values.popleft
        return [pop() for _ in range(len(self._values))]


class CategoryMarks:
    """Turns events of the phase log into marks.

    Categories can be nested, such as `compilation` in `forward`. When the inner category ends, the
    outer category continues.
    """

    def __init__(self) -> None:
        # The running categories and phases, with the outermost first. A phase of a stage that the
        # ledger does not record is `None`.
        self._running: list[str | None] = []
        # The category of time outside all other categories.
        self._base = START_UP
        # The values of the events that are logged before the end of a step.
        self._counters: tuple[int, bytes | None, Any] = 0, None, None
        self._batch: tuple[Any, bool] = None, False

    def of(self, values: Sequence[Any], ledger: object = None) -> Iterator[Mark]:
        """Yield the marks for the given events.

        Args:
            values: The values of the events, as the phase log delivers them.
            ledger: The `LedgerWriter` for which the marks are made. An end of a step becomes a mark
                only if this ledger has logged it.
        """
        for moment, event, subject, detail in events_in(values):
            if event == COUNTERS:
                self._counters = moment, subject, detail
            elif event == BATCH:
                self._batch = subject, detail
            elif event == STEP_END:
                if subject is ledger:
                    yield moment, StepEnd(detail, *self._counters, *self._batch)
            elif event == PAST:
                # A mark in the past subtracts time from the category that was running until now.
                yield moment - detail, subject
                yield moment, self._current
            elif event == MOVE:
                phase, category = subject
                # The second mark is `detail` nanoseconds before the first, so the time between them
                # is negative: it is taken away from `phase`. It is then added to `category`.
                yield moment, phase
                yield moment - detail, category
                yield moment, self._current
            else:
                category = self._after(event, subject, detail)
                if category is not None:
                    yield moment, category

    def _after(self, event: str, subject: str, stage: str) -> str | None:
        """Return the category of the time after an event, or `None` if it does not change."""
        if event == ENTER:
            return self._after_enter(subject, stage)
        if event in {LEAVE, DROP}:
            is_counted = self._running and self._running.pop() is not None
            return self._current if is_counted else None
        if event == WAIT:
            if self._running and self._running[-1] is not None:
                return WAIT
            return None
        if event == REST:
            return self._change_rest(subject)
        if event == BEGIN:
            self._running.append(subject)
        elif subject in self._running:
            while self._running.pop() != subject:
                pass
        return self._current

    def _change_rest(self, category: str) -> str | None:
        """Handle a `REST` event: from now on, time outside all phases belongs to `category`.

        Returns the category if it begins now, or `None` if a phase or another category is running.
        """
        self._base = category
        if category == AFTER_RUN:
            self._running.clear()
        return None if any(self._running) else category

    def _after_enter(self, phase: str, stage: str) -> str | None:
        """Begin a phase, and return it, or `None` if the ledger does not record its stage.

        Time outside all phases is start-up at first. After the first phase of a training step has
        begun, it belongs to the steps, as their phase `other`.
        """
        is_counted = stage in {TRAIN, RUN}
        self._running.append(phase if is_counted else None)
        if stage == TRAIN:
            self._base = OTHER
        return phase if is_counted else None

    @property
    def _current(self) -> str:
        for category in reversed(self._running):
            if category is not None:
                return category
        return self._base


class StepCounters:
    """Reads the operating system's counters of the training thread at the end of each step.

    Attributes:
        last_end: The moment at which the last step ended, and the number of this step. `None`
            before the first step.
    """

    def __init__(self, clock: Callable[[], int], schedule: Callable[[], bytes | None]) -> None:
        """Create a reader of the counters.

        Args:
            clock: Returns the current moment in nanoseconds.
            schedule: Returns the scheduler counters of the calling thread.
        """
        self.last_end: tuple[int, int] | None = None
        self._clock = clock
        self._schedule = schedule
        # The scheduler counters and the result of `getrusage`, as they were last read.
        self._counted: tuple[bytes | None, Any] = None, None
        # The nanoseconds that the thread had been off its core at that time.
        self._idle = -1 << 62

    def close(self) -> None:
        """Stop reading the scheduler counters, which keep a file open."""
        self._schedule = unknown

    def read(self, step: int) -> tuple[int, bytes | None, Any]:
        """Read the counters of the calling thread at the end of a step.

        Returns the nanoseconds that the thread has run on a core, the scheduler counters, and the
        result of `getrusage`. The last two may be a short time old.

        Args:
            step: The number of the step that ends.
        """
        now = self._clock()
        ran = time.thread_time_ns()
        idle = now - ran
        # The counters are needed only if the thread was off its core.
        if idle - self._idle >= IDLE:
            self._counted = self._schedule(), getrusage(RUSAGE_THREAD)
            self._idle = idle
        self.last_end = now, step
        return ran, *self._counted

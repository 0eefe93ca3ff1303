"""Log the transitions between phases of a training run.

Each transition appends four values to the log. Everything else is computed from the values later,
by functions that a test can call with a plain list. For example:

    moment   event       subject     detail
    1000     ENTER       "data"      "train"      the phase `data` of a training step begins
    2500     LEAVE       None        None         the innermost phase ends
    2600     STEP_END    a reader    None         a step of this reader ends

A moment is an integer number of nanoseconds. The values are not packed into tuples, because
thousands of tuples would make Python's garbage collector run.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

ENTER = "enter"
"""A phase begins. Subject: its name. Detail: its stage."""

LEAVE = "leave"
"""The innermost phase ends."""

DROP = "drop"
"""The innermost phase ends because of an exception."""

WAIT = "wait"
"""Backward begins to wait for other ranks, after every node has run.

DDP waits at this point for the gradients of the other ranks. The wait is a part of backward.
"""

STEP_END = "step_end"
"""A step ends. Subject: the reader that counts the steps. Detail: the number of the step, if any."""

COUNTERS = "counters"
"""The thread's scheduler counters and resource usage, appended just before the end of a step.

The first value of this event is not a moment. It is the time that the thread has run on a core, in
nanoseconds.
"""

BATCH = "batch"
"""Facts about a step, appended just before its end.

Subject: the shapes of the batch. Detail: whether lflops affected the step.
"""

BEGIN = "begin"
"""A category of the run's time begins. Subject: its name."""

END = "end"
"""The innermost category with a given name ends, with everything inside it. Subject: the name."""

REST = "rest"
"""From now on, time outside all phases belongs to a category. Subject: its name."""

PAST = "past"
"""The time just before now belongs to a category. Subject: its name. Detail: nanoseconds."""

MOVE = "move"
"""The last part of a phase belongs to a category. Subject: both names. Detail: nanoseconds."""

WIDTH = 4
"""Number of values per event."""

RUN = "run"
"""Stage of phases that belong to no step, such as saving a checkpoint."""

MANY = WIDTH * 10_000
"""The log is delivered after this many values, even if no reader has requested it."""

Event = tuple[int, str, Any, Any]


class Reader(Protocol):
    """A reader of the log."""

    def take(self, events: Sequence[Any], /) -> None:
        """Handle the events since the last call, in order."""


class PhaseLog:
    """The log of one training loop.

    Attributes:
        clock: Function that returns the current moment in nanoseconds.
        events: Events that have not been delivered yet, as a flat list of values.
        append: Function, written in C, that appends the values of one or more events. If the log
            has no reader, the function drops the values.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.events: list[Any] = []
        self._readers: list[Reader] = []
        self._lock = threading.RLock()
        self._drop = deque[Any](maxlen=0).extend
        self.append = self._drop
        _LOGS.add(self)

    def connect(self, reader: Reader) -> None:
        """Deliver events to a reader from now on.

        Connecting a reader again does nothing.
        """
        with self._lock:
            self.disconnect(reader)
            self._readers.append(reader)
            self.append = self.events.extend

    def disconnect(self, reader: Reader) -> None:
        """Stop delivering events to a reader after it has received all events so far.

        Disconnecting a reader again does nothing.
        """
        with self._lock:
            self.deliver()
            self._readers = [each for each in self._readers if each is not reader]
            if not self._readers:
                self.append = self._drop

    def deliver(self) -> None:
        """Pass the events since the last delivery to all readers.

        Any thread may call this method.
        """
        with self._lock:
            events = self.events[:]
            del self.events[: len(events)]
            if events:
                for reader in self._readers:
                    reader.take(events)

    def unlock(self) -> None:
        """Replace the lock in a forked process, because a thread of the parent may hold it."""
        self._lock = threading.RLock()


_LOGS: WeakSet[PhaseLog] = WeakSet()


def _unlock_all() -> None:
    for log in _LOGS:
        log.unlock()


os.register_at_fork(after_in_child=_unlock_all)


def events_in(values: Sequence[Any]) -> Iterator[Event]:
    """Yield the events in a flat list of values."""
    remaining = iter(values)
    return zip(remaining, remaining, remaining, remaining, strict=True)


def innermost(
    values: Sequence[Any], stage: str, running: list[tuple[str, str]], reader: object = None
) -> Iterator[tuple[Any, str]]:
    """Yield the moments at which the innermost phase of a stage changes.

    Args:
        values: Events of the log.
        stage: The stage.
        running: The phases that run before the first event, each with its stage. The function
            updates this list to the phases that run after the last event.
        reader: Only step ends of this reader are included.

    Yields:
        A moment, and the innermost phase after it. The phase is "" if no phase runs, `WAIT` during
        a wait for other ranks, and `STEP_END` at the end of a step. The moment is `None` after an
        exception, because the end of the previous phase was not measured.
    """
    for moment, event, subject, detail in events_in(values):
        if event == ENTER:
            running.append((subject, detail))
            if detail == stage:
                yield moment, subject
        elif event in {LEAVE, DROP} and running:
            _, left = running.pop()
            if left == stage:
                yield (None if event == DROP else moment), last_phase(running, stage)
        elif event == WAIT and running and running[-1][1] == stage:
            yield moment, WAIT
        elif event == STEP_END and subject is reader:
            yield moment, STEP_END


def last_phase(running: Sequence[tuple[str, str]], stage: str) -> str:
    """Return the innermost running phase of a stage, or "" if no phase runs."""
    for phase, of_stage in reversed(running):
        if of_stage == stage:
            return phase
    return ""

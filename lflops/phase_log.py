"""Log the transitions between phases of a training run.

A phase is a part of a step, such as the wait for data or forward. Phases can be nested. Each
transition appends an event to the log: four values, from which everything else is computed later.
For example:

    moment   event       subject     detail
    1000     ENTER       "data"      "train"      the phase `data` of the stage `train` begins
    2500     LEAVE       None        None         the innermost phase ends
    2600     STEP_END    a reader    None         a step ends, as counted by this reader

A moment is an integer number of nanoseconds. The log is a flat list: the four values of an event
are not put into a tuple, because thousands of tuples would make Python's garbage collector run. The
constants below are the events. Their docstrings describe the subject and the detail, which are
`None` if they are not mentioned.

Some events assign time to a category of the ledger, which is the time account of the whole run.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

ENTER = "enter"
"""Event when a phase begins. The subject is the name of the phase, the detail is its stage."""

LEAVE = "leave"
"""Event when the innermost phase ends."""

DROP = "drop"
"""Event when the innermost phase ends because of an exception."""

WAIT = "wait"
"""Event when backward begins to wait for other ranks.

DDP does this after the last autograd node has run: it waits until the gradients of all ranks have
been reduced. The wait is a part of backward.
"""

STEP_END = "step_end"
"""Event when a step ends, as counted by one reader of the log, such as the ledger.

The subject is the reader, and the detail is the number of the step or `None`. Readers can count
steps differently, so each reader ignores the step ends of other readers.
"""

COUNTERS = "counters"
"""Event with counters of the training thread, just before a `STEP_END`.

The subject is the thread's scheduler counters, and the detail is its resource usage. The first
value of this event is not a moment, but the time that the thread has run on a core, in nanoseconds.
"""

BATCH = "batch"
"""Event that describes the batch of the step, just before a `STEP_END`.

The subject is the shapes of the batch, or `None` if they are unknown. The detail is true if lflops
counted, timed or traced the step.
"""

BEGIN = "begin"
"""Event when a category of the ledger begins, for example validation. The subject is its name."""

END = "end"
"""Event when a category of the ledger ends, and everything that began inside it.

The subject is the name of the category. If the category has begun several times, only the part
since the latest `BEGIN` ends.
"""

REST = "rest"
"""Event when the ledger category of the time outside all phases changes.

The subject is the name of the new category.
"""

PAST = "past"
"""Event that assigns the time just before it to a category of the ledger.

The subject is the name of the category, and the detail is the number of nanoseconds.
"""

MOVE = "move"
"""Event that moves time from a phase to a category of the ledger, for example to compilation.

The subject is a tuple: the name of the phase and the name of the category. The detail is the number
of nanoseconds to move.
"""

WIDTH = 4
"""Number of values of each event in the log."""

RUN = "run"
"""Stage of phases that belong to no step, such as saving a checkpoint."""

MANY = WIDTH * 10_000
"""If the log holds more values than this, they are delivered without a request of a reader."""

Event = tuple[int, str, Any, Any]


class Reader(Protocol):
    """An object that receives the events of a `PhaseLog`."""

    def take(self, events: Sequence[Any], /) -> None:
        """Handle the events since the last call, in order."""


class PhaseLog:
    """The log of the phase transitions in one training loop.

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

        Any thread can call this method.
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
    """Yield the events of a flat list, in which each event is four consecutive values."""
    remaining = iter(values)
    return zip(remaining, remaining, remaining, remaining, strict=True)


def innermost(
    values: Sequence[Any], stage: str, running: list[tuple[str, str]], reader: object = None
) -> Iterator[tuple[Any, str]]:
    """Yield the moments at which the innermost phase of a stage changes, or a step ends.

    Args:
        values: The values of events, as a flat list.
        stage: The stage, such as "train".
        running: The phases that run before the first event, each with its stage. The function
            updates this list to the phases that run after the last event.
        reader: Only those ends of steps are yielded that belong to this reader of the log.

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
                end = None if event == DROP else moment
                yield end, last_phase(running, stage)
        elif event == WAIT and running and running[-1][1] == stage:
            yield moment, WAIT
        elif event == STEP_END and subject is reader:
            yield moment, STEP_END


def last_phase(running: Sequence[tuple[str, str]], stage: str) -> str:
    """Return the innermost running phase of a stage, or "" if no phase of the stage runs."""
    for phase, of_stage in reversed(running):
        if of_stage == stage:
            return phase
    return ""

"""What a training tells its ledger: a mark with a moment whenever another category begins, and one at the end of each step.

    marks    |start_up.......|data...|forward...|backward..|optimizer|other|step|lflops|data...

The training only appends marks. A thread reads them, so that no step waits for an account or a file. Each moment belongs to the last
mark before it: the account adds up to the clock by construction, and an interrupt between two marks loses nothing.
"""

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from resource import RUSAGE_THREAD, getrusage
from typing import Any, NamedTuple

OTHER = "other"  # the phase of what is in no phase


def unknown() -> None:
    """What is not known of a thread."""


class StepEnd(NamedTuple):
    """A mark at the end of a step. It does not change the category."""

    step: int  # how many steps were done, as the loggers count
    touched: bool  # whether lflops counted, timed or traced the step
    shapes: Hashable  # those of its batch, where they are known
    usage: Any  # what the system has counted of the thread
    schedule: bytes | None  # when the thread ran and waited for a core, as the system counts it


class Recorder:
    """Appends the marks of one process; what begins within a category ends before it. `schedule` reads when its thread ran and waited."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, schedule: Callable[[], bytes | None] = unknown) -> None:
        self.marks: deque[tuple[int, str | StepEnd]] = deque()
        self.last_end: tuple[int, int] | None = None  # the moment at which the last step ended, and its number
        self._clock = clock
        self._schedule = schedule
        self._running: list[str] = []
        self._base = "start_up"

    def enter(self, category: str, _given: tuple[Any, ...] = ()) -> None:
        """A category or a phase begins, within the one that is running."""
        self._running.append(category)
        self.marks.append((self._clock(), category))

    def leave(self) -> None:
        if self._running:
            self._running.pop()
        self.marks.append((self._clock(), self._running[-1] if self._running else self._base))

    drop = leave

    def wait(self) -> None:
        """Backward goes on to wait for other ranks."""
        self.marks.append((self._clock(), "wait"))

    def leave_last(self, category: str) -> None:
        """The last one of this name ends, and all within it; if there is one."""
        if category in self._running:
            place = len(self._running) - 1 - self._running[::-1].index(category)
            del self._running[place + 1 :]
            self.leave()

    def note_past(self, category: str, seconds: float) -> None:
        """So many seconds before now belonged to this category, as is known only now."""
        now = self._clock()
        self.marks.extend([(now - int(seconds * 1e9), category), (now, self._base)])

    def rest(self, category: str) -> None:
        """From here on, time that is in no other category belongs to this one."""
        self._base = category
        if not self._running:
            self.marks.append((self._clock(), category))

    def stop(self) -> None:
        """All that is running ends, and what follows is after the run."""
        self._running.clear()
        self._schedule = unknown  # its file is open
        self.rest("after_run")

    def enter_phase(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """A phase of a training step begins: what is in no phase is from here on part of a step."""
        if self._base != OTHER:
            self.rest(OTHER)
        self._running.append(phase)
        self.marks.append((self._clock(), phase))

    def step_ends(self, step: int, *, touched: bool, shapes: Hashable = None) -> None:
        now = self._clock()
        self.marks.append((now, StepEnd(step, touched, shapes, getrusage(RUSAGE_THREAD), self._schedule())))
        self.last_end = now, step


class TrainPhases:
    """Listens to the phases of training steps for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.enter = recorder.enter_phase
        self.leave = self.drop = recorder.leave
        self.wait = recorder.wait


class Collections:
    """The moments at which Python's garbage collector begins and ends.

    Python discards an exception of a function in `gc.callbacks`, a Ctrl-C among them. So the callback is made of functions written in C,
    in which no signal is handled: `property.__get__` calls `next` with its first argument, and that appends the clock's time.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.moments: deque[int] = deque(maxlen=4096)  # begin, end, begin, end, …
        append = map(self.moments.append, iter(clock, None))
        self._callback: Any = property(partial(next, append)).__get__

    def start(self) -> None:
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """It can be called again."""
        gc.callbacks[:] = [each for each in gc.callbacks if each is not self._callback]


def process_age() -> float:
    """Seconds since this process began, to a hundredth, as Linux counts; since this file was loaded where it does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - as the process begins
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()

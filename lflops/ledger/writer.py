"""Keep the ledger (the time account) of this process and write it to a file.

The training run appends events to the phase log. A thread reads them once per second. Every three
seconds, it writes a row: the time account of the seconds since the previous row.

    writer = LedgerWriter(log)
    writer.start(folder)              # accounts for every second since the process began
    log.append(...)                   # the training run logs its phases
    writer.stop("finished")           # ends the thread; `after_run` lasts until the process ends

A step should run as little code of lflops as possible: between two steps, this code drops out of
the processor's caches, so each line is slow. In an auto-detected loop, the training thread does not
even log phases. It records the calls that log them in a `DeferredCalls`, and the ledger's thread
makes these calls.

No step waits until times are assigned to categories or until a file is written.
"""

import atexit
import gc
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lflops.files import read
from lflops.ledger.account import Ledger
from lflops.ledger.accountant import StepAccountant
from lflops.ledger.deferred import DeferredCalls
from lflops.ledger.ledger_file import ENDING, Head, Row, Segment, ledger_of
from lflops.ledger.marks import AFTER_RUN, CategoryMarks, EventQueue, StepCounters, unknown
from lflops.phase_log import BATCH, COUNTERS, REST, STEP_END, PhaseLog


class Collections:
    """Records the moments at which Python's garbage collector begins and ends.

    If a function in `gc.callbacks` raises an exception, Python discards the exception. A Ctrl-C
    during a callback that is written in Python would therefore be lost. Functions written in C
    handle no signals. Therefore the callback consists only of such functions: `property.__get__`
    calls `next`, which appends the time.

    Attributes:
        moments: Moments at which a collection began and ended, alternately, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.moments: deque[int] = deque(maxlen=4096)
        append = map(self.moments.append, iter(clock, None))
        self._callback: Any = property(partial(next, append)).__get__

    def start(self) -> None:
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Stop recording. A second call does nothing."""
        gc.callbacks[:] = [each for each in gc.callbacks if each is not self._callback]


def process_age() -> float:
    """Return the seconds since this process began.

    On Linux, the result is accurate to a hundredth of a second. On other systems, the function
    returns the seconds since this module was loaded.
    """
    try:
        _, _, after_name = read("/proc/self/stat").rpartition(b")")
        began = int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()


LOOK = 1.0
"""Seconds between two reads of the phase log."""

WRITE = 3.0
"""Seconds between two rows of the ledger."""

REQUEST_PERIOD = 0.1
"""Seconds between two checks whether the user has requested a window (a few steps to profile).

The ledger's thread checks this only in a run with one process. Otherwise, another thread does.
"""

AT_ONCE = 200
"""Maximum number of deferred calls that the ledger's thread makes without a pause."""

BREATH = 0.001
"""Seconds for which the ledger's thread pauses after `AT_ONCE` calls.

The training thread runs in this time. Without a pause, Python would switch to it only every 5 ms.
"""

LATE = 50_000_000
"""Delay in nanoseconds that shows that the process did not run for some time.

If the ledger's thread wakes up later than planned by more than this delay, the time from the
planned moment to the real moment is recorded as a freeze of the process.
"""

PATIENCE = 2.0
"""Maximum time that the training thread waits for the ledger's thread, in seconds.

The training thread waits at the end of a run.
"""


class LedgerWriter:
    """Keeps and writes the ledger of one run in this process.

    Args:
        log: The phase log of the training run.
        deferred: The calls that the training thread records and the ledger's thread makes.
        rank: Rank of the process.
        ranks: Number of ranks.
        retries: Function that returns how often the device's allocator has freed its cache and
            tried again.
        device: Function that returns the type of the device on which the model trains.
        schedule: Function that returns the scheduler counters of the calling thread.
        look_for_request: Function that checks whether the user has requested a window. It is called
            every `REQUEST_PERIOD` seconds.

    Attributes:
        error: The exception that ended the ledger before the end of the run.
        counters: Reads the operating system's counters of the training thread.
        is_first: Set for the first ledger of this process. Its account includes the time since the
            process began.
        knows_step: Function that returns whether the number of steps continues from its last value
            when a run is resumed. If not, the number of steps before this process is unknown.
    """

    def __init__(
        self,
        log: PhaseLog | None = None,
        deferred: DeferredCalls | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        retries: Callable[[], int] = lambda: 0,
        device: Callable[[], str] = str,
        schedule: Callable[[], bytes | None] = unknown,
        look_for_request: Callable[[], None] | None = None,
    ) -> None:
        global _latest  # noqa: PLW0603 - one process, one account
        self.error: Exception | None = None
        self.knows_step: Callable[[], bool] = lambda: True
        self._log = log or PhaseLog()
        self._deferred = deferred or DeferredCalls(self._log)
        # The real clock. The clock of the log returns, while a deferred call is made, the moment at
        # which this call was recorded.
        self._clock = self._deferred.clock
        self.counters = StepCounters(self._clock, schedule)
        self._queue = EventQueue()
        self._marks = CategoryMarks()
        self.is_first = _latest is None
        now = self._clock()
        begin = _begin_of_account(now)
        age = now - begin
        self._collections = Collections(self._clock)
        self._accountant = StepAccountant(begin, self._collections.moments, retries)
        head = Head(begin=time.time_ns() - age, rank=rank, ranks=ranks, pid=os.getpid())
        self._segment = Segment(head)
        self._look_for_request = look_for_request
        self._device = device
        self._ended: str | None = None
        # Reentrant, because an interrupt may come between acquiring and releasing it.
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lflops: the ledger", daemon=True)
        _latest = self

    def start(self, folder: Path | None) -> None:
        """Start recording.

        Args:
            folder: Folder of the ledger's file, or `None` to keep the ledger only in memory.
        """
        head = self._segment.head
        if folder is not None:
            milliseconds = head.begin // 1_000_000
            name = f"rank{head.rank}-{milliseconds}-{head.pid}{ENDING}"
            self._segment.path = folder / name
        self._log.connect(self._queue)
        self._collections.start()
        self._thread.start()

    def end_step(
        self,
        step: int,
        shapes: Hashable,
        *,
        touched: bool = False,
        counters: tuple[int, bytes | None, Any] | None = None,
    ) -> None:
        """Append the end of a step to the phase log.

        Args:
            step: Number of steps that the run has done: the step on the x-axis of loggers.
            shapes: The shapes of the batch, if they are known.
            touched: Whether lflops counted, timed or traced the step.
            counters: The result of `counters.read` when the step ended. By default, the step ends
                now, and the counters are read now.
        """
        ran, schedule, usage = counters or self.counters.read(step)
        now = self._log.clock()
        # fmt: off
        self._log.append((
            ran, COUNTERS, schedule, usage,
            now, BATCH, shapes, touched,
            now, STEP_END, self, step,
        ))
        # fmt: on

    def stop(self, ended: str) -> None:
        """End the run. The remaining time of the process belongs to the category `after_run`.

        A second call does no harm.

        Args:
            ended: "finished" or the class name of the exception that ended the run.
        """
        self._deferred.stop()
        self.error = self.error or self._deferred.error
        self._deferred.error = None
        self._log.append((self._log.clock(), REST, AFTER_RUN, None))
        self._log.disconnect(self._queue)
        self.counters.close()
        self._collections.stop()
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
        self._finish(ended)

    def end(self) -> int:
        """End the account, and return the moment up to which it covers the time.

        This is called when the process exits or another run begins.
        """
        if self.process == os.getpid():
            self._is_over.set()
            self._finish("exit")
        return self._accountant.until

    def _finish(self, ended: str) -> None:
        """Write the last row and close the file.

        If the ledger's thread hangs in the file system, the last row is not written, so that the
        program can continue.
        """
        if not self._lock.acquire(timeout=PATIENCE):
            self.error = TimeoutError(f"the file was not written within {PATIENCE:g} s")
            return
        try:
            self._ended = self._ended or ended
            self._write()
            self._segment.close()
        finally:
            self._lock.release()

    @property
    def process(self) -> int:
        """The id of the process that keeps this ledger."""
        return self._segment.head.pid

    def curves(self) -> dict[str, float]:
        """Return values for loggers to plot: the share of lost time, and the number of slow steps.

        The values cover the time up to the last row of the ledger, which is a few seconds old.
        """
        rows = self._segment.rows
        if not rows:
            return {}
        accountant = self._accountant
        return {
            "lost_share": accountant.lost / rows[-1].end,
            "slow_steps": accountant.slow_steps,
        }

    def ledger(self) -> Ledger:
        with self._lock:
            if self._ended is None:
                self._write()
            return ledger_of([self._segment])

    def step_after(self, seconds: float) -> int:
        """Predict the number of the first step that ends more than `seconds` from now.

        A requested window (a few steps to profile) opens at a predicted step, so that all ranks can
        be informed in time. The prediction assumes that steps take as long as the recent steps.
        Steps are numbered as in `end_step`. Returns 0 if no step has ended yet.
        """
        if self.counters.last_end is None:
            return 0
        at, done = self.counters.last_end
        usual = self._accountant.usual
        if not usual:
            return done + 2
        elapsed = (self._clock() - at) / 1e9
        ends = math.ceil((seconds - max(usual - elapsed, 0.0)) / usual)
        return done + 1 + max(ends, 0)

    def _run(self) -> None:
        written = self._clock()
        looked = written
        pause = LOOK if self._look_for_request is None else min(REQUEST_PERIOD, LOOK)
        while True:
            due = self._clock() + int(pause * 1e9)
            if self._is_over.wait(pause):
                return
            now = self._clock()
            if now - due > LATE:
                self._accountant.freezes.append((due, now))
            if self._look_for_request is not None:
                self._look_for_request()
            if now - looked < (LOOK - pause / 2) * 1e9:
                continue
            looked = now
            if not self._lock.acquire(timeout=LOOK):
                continue
            try:
                if self._is_over.is_set():
                    return
                self._read(BREATH)
                if now - written >= WRITE * 1e9 or not self._segment.rows:
                    written = now
                    self._write()
            except Exception as error:  # noqa: BLE001 - the training's thread reports it
                self.error = error
                return
            finally:
                self._lock.release()

    def _read(self, pause: float = 0.0) -> None:
        while True:
            self._deferred.run_calls(AT_ONCE)
            # Read the clock before the log, so that no later event is older than `now`.
            now = self._clock()
            next_note = self._deferred.next
            if next_note is not None:
                now = min(now, next_note)
            self._log.deliver()
            self._accountant.read(self._marks.of(self._queue.pop(), self), now)
            if next_note is None or (pause and self._is_over.wait(pause)):
                return

    def _write(self) -> None:
        """Add a row to the ledger for the time since the last row."""
        if self.error is not None:
            return
        self._read()
        accountant = self._accountant
        spent, slow = accountant.take()
        groups, durations = accountant.take_steps()
        row = Row(
            end=accountant.until - accountant.begin,
            spent=spent,
            open=accountant.open,
            step=accountant.steps,
            first=accountant.first_step if self.knows_step() else None,
            memory=_resident(),
            durations=durations,
            ended=self._ended,
            device=self._device(),
        )
        try:
            self._segment.open()
            self._segment.add(row, slow, groups)
        except OSError as error:
            self.error = error


_PAGE = os.sysconf("SC_PAGE_SIZE")

_latest: LedgerWriter | None = None
"""The newest ledger of this process. It covers the time until the next ledger begins."""


def _begin_of_account(now: int) -> int:
    """Return the moment at which the account of a new ledger begins.

    The first ledger of a process covers the time since the process began. If the run of the
    previous ledger has ended, a later ledger begins where the account of the previous ledger ends.
    Otherwise it begins now.
    """
    # A forked process begins a new account.
    if _latest is None or _latest.process != os.getpid():
        return now - int(process_age() * 1e9)
    # The previous ledger covers the time after its run up to now.
    has_ended = _latest._ended is not None  # noqa: SLF001
    return _latest.end() if has_ended else now


@atexit.register
def _end_at_exit() -> None:
    if _latest is not None:
        with suppress(OSError):
            _latest.end()


def _resident() -> int | None:
    """Return the resident memory of this process in bytes, or `None` if the system is not Linux."""
    try:
        pages = read("/proc/self/statm").split()[1]
        return int(pages) * _PAGE
    except (OSError, ValueError, IndexError):
        return None

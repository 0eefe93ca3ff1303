"""Keep the ledger of this process.

The training run appends marks; a thread reads them once per second and writes a line every three
seconds.

    keeper = LedgerWriter()
    keeper.start(folder)              # accounts for every second since the process began
    keeper.recorder.enter("data")     # the training run marks its phases
    keeper.stop("finished")           # ends the thread; `after_run` lasts until the process ends

A mark has a moment. One is made wherever another category begins, and at the end of each step:

    marks    |start_up.......|data...|forward...|backward..|optimizer|other|step|lflops|data...

Code and data that a step uses have left the processor's caches since the last step, so less code in
a step is better. An auto-detected loop makes no marks at all: it notes calls in a `DeferredCalls`,
and the thread makes them.

No step waits for an account or a file. Each moment belongs to the last mark before it: the account
adds up to the clock by construction, and an interrupt between two marks loses nothing.
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
from resource import RUSAGE_THREAD, getrusage
from typing import Any

from lflops.ledger.account import Ledger
from lflops.ledger.book import StepAccountant, StepEnd
from lflops.ledger.run import ENDING, Head, Row, Segment, ledger_of

OTHER = "other"
"""The phase of time in no phase."""

IDLE = 2_000_000
"""Nanoseconds off its core after which the scheduler counters of the training thread are read.

A read takes as long as ten marks.
"""

LONGEST = 1 << 21
"""Number of values that a `DeferredCalls` keeps if the thread does not play it.

They are the notes of about 40,000 steps.
"""


def unknown() -> None:
    """Stand in for counters that the system does not have."""


class DeferredCalls:
    """Calls of one training run, in order. While it does not run, calls are made immediately.

    Attributes:
        runs: Set while calls are noted for later.
        error: The exception that ended it.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.runs = False
        self.error: Exception | None = None
        self.clock = clock
        # For each note: its moment, the function, the number of arguments, the arguments. Tuples
        # would make Python's garbage collector run, because it tracks them.
        self._notes: deque[Any] = deque()
        self._lock = threading.RLock()
        # moment of the note that is being played
        self._moment: int | None = None
        # the thread that plays
        self._player: int | None = None

    def note(self, call: Callable[..., object], *given: Any) -> None:
        """Note a call for later.

        No argument may be a new object, or an object that the training run would free.
        """
        if not self.runs:
            call(*given)
            return
        if len(self._notes) > LONGEST:
            self._notes.clear()
        # One `extend` is atomic, also if other threads note.
        self._notes.extend((self.clock(), call, len(given), *given))

    def now(self) -> int:
        """Nanoseconds of the clock; while notes are played, the moment of the note."""
        return self.clock() if self._moment is None else self._moment

    @property
    def next(self) -> int | None:
        """The moment of the first note that was not played, or `None`."""
        return self._notes[0] if self._notes else None

    def play(self, most: int = LONGEST) -> None:
        """Make up to `most` of the noted calls. An exception ends it."""
        take = self._notes.popleft
        with self._lock:
            self._player = threading.get_ident()
            try:
                for _ in range(most):
                    if not self._notes:
                        break
                    self._moment = take()
                    call = take()
                    count = take()
                    call(*[take() for _ in range(count)])
            except Exception as error:  # noqa: BLE001 - the training thread reports it
                self.error = error.with_traceback(None)
                self.runs = False
                self._notes.clear()
            finally:
                self._moment = None
                self._player = None

    def raise_error(self) -> None:
        """Raise the exception that ended it, once."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def forget(self) -> None:
        """Start again in a forked process, which has no thread that plays."""
        self.runs = False
        self._lock = threading.RLock()
        self._notes.clear()

    def plays_here(self) -> bool:
        """Whether the calling thread is playing it."""
        return self._player == threading.get_ident()

    def stop(self) -> None:
        """Play all notes; further calls are made immediately."""
        if self.runs:
            with self._lock:
                self.play()
                self.runs = False


class Recorder:
    """Appends the marks of one process. A category that begins within another ends before it.

    Attributes:
        marks: Moments, each with the category that begins there or with a `StepEnd`.
        last_end: The moment at which the last step ended, and its number.
    """

    def __init__(self, tape: DeferredCalls, schedule: Callable[[], bytes | None] = unknown) -> None:
        """Create a recorder; `schedule` reads the scheduler counters of its thread."""
        self.marks: deque[tuple[int, str | StepEnd]] = deque(maxlen=LONGEST // 8)
        self.last_end: tuple[int, int] | None = None
        self._clock = tape.now
        # the clock also while notes are played
        self._clock_itself = tape.clock
        self._schedule = schedule
        self._running: list[str] = []
        # the category of time in no other category
        self._base = "start_up"
        # counters of the system when they were last read
        self._counted: tuple[bytes | None, Any] = None, None
        # nanoseconds that the thread had been off its core by then
        self._idle = -1 << 62

    def enter(self, category: str, _given: tuple[Any, ...] = ()) -> None:
        """Begin a category or a phase within the running one."""
        self._running.append(category)
        self.marks.append((self._clock(), category))

    def leave(self) -> None:
        if self._running:
            self._running.pop()
        self.marks.append((self._clock(), self._running[-1] if self._running else self._base))

    drop = leave

    def wait(self) -> None:
        """Mark where backward begins to wait for other ranks."""
        self.marks.append((self._clock(), "wait"))

    def leave_last(self, category: str) -> None:
        """End the innermost category of this name and everything within it, if it is running."""
        if category in self._running:
            place = len(self._running) - 1 - self._running[::-1].index(category)
            del self._running[place + 1 :]
            self.leave()

    def note_past(self, category: str, seconds: float) -> None:
        """Assign the last seconds to a category afterwards."""
        now = self._clock()
        self.marks.extend([(now - int(seconds * 1e9), category), (now, self._base)])

    def move(self, nanoseconds: int, phase: str, category: str) -> None:
        """Move nanoseconds of this step from a phase to a category afterwards."""
        now = self._clock()
        running = self._running[-1] if self._running else self._base
        self.marks.extend([(now, phase), (now - nanoseconds, category), (now, running)])

    def rest(self, category: str) -> None:
        """Assign time in no other category to this category from now on."""
        self._base = category
        if not self._running:
            self.marks.append((self._clock(), category))

    def stop(self) -> None:
        """End everything that is running; `after_run` begins."""
        self._running.clear()
        # The counters keep a file open.
        self._schedule = unknown
        self.rest("after_run")

    def enter_phase(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """Begin a phase of a training step. Time in no phase is from now on part of a step."""
        if self._base != OTHER:
            self.rest(OTHER)
        self._running.append(phase)
        self.marks.append((self._clock(), phase))

    def read(self, step: int) -> tuple[int, int, bytes | None, Any]:
        """Read the counters at the end of a step.

        Returns the number of the step, and the time on a core and the counters of the calling
        thread.
        """
        now = self._clock_itself()
        ran = time.thread_time_ns()
        idle = now - ran
        # A thread that ran all the time was not kept from its core.
        if idle - self._idle >= IDLE:
            self._counted = self._schedule(), getrusage(RUSAGE_THREAD)
            self._idle = idle
        self.last_end = now, step
        return step, ran, *self._counted

    def step_ends(
        self, read: tuple[int, int, bytes | None, Any], shapes: Hashable, *, touched: bool
    ) -> None:
        """Record a step's end with the counters from `read()`."""
        self.marks.append((self._clock(), StepEnd(*read, shapes, touched)))


class TrainPhases:
    """Passes the phases of training steps to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.enter = recorder.enter_phase
        self.leave = self.drop = recorder.leave
        self.wait = recorder.wait


class Collections:
    """Records the moments at which Python's garbage collector begins and ends.

    Python discards an exception of a function in `gc.callbacks`, including a Ctrl-C. So the
    callback consists of functions written in C, in which no signal is handled: `property.__get__`
    calls `next` with its first argument, which appends the time.

    Attributes:
        moments: Alternately the begin and the end of a collection.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.moments: deque[int] = deque(maxlen=4096)
        append = map(self.moments.append, iter(clock, None))
        self._callback: Any = property(partial(next, append)).__get__

    def start(self) -> None:
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Stop recording. It can be called more than once."""
        gc.callbacks[:] = [each for each in gc.callbacks if each is not self._callback]


def process_age() -> float:
    """Seconds since this process began, with Linux's resolution of a hundredth.

    On other systems, seconds since this module was loaded.
    """
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - as the process begins
            _, _, after_name = file.read().rpartition(b")")
        began = int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()


LOOK, WRITE = 1.0, 3.0
"""Seconds between two reads of the marks, and between two rows."""

HEAR = 0.1
"""Seconds between two checks for requests, if this process alone answers them."""

AT_ONCE = 200
"""Number of notes after which their marks are read.

Thousands of marks would make Python's garbage collector run.
"""

BREATH = 0.001
"""Seconds that the thread pauses after so many notes.

While it computes, Python lets the training thread run only every 5 ms.
"""

LATE = 50_000_000
"""Nanoseconds of delay from which on a read shows that no thread of the process ran."""

PATIENCE = 2.0
"""Maximum number of seconds that the end of a run waits for the thread."""


class LedgerWriter:
    """Keeps and writes the ledger of one run in this process.

    Args:
        rank: Rank of the process.
        ranks: Number of ranks.
        tape: Deferred calls of the training run, which the thread makes.
        retries: Returns how often the device's allocator has freed its cache and tried again.
        schedule: Reads the scheduler counters of the training thread.
        hear: Function that is called every `HEAR` seconds.

    Attributes:
        error: The exception that ended it before the end of the run.
        is_first: Set for the first ledger of this process, whose account begins with the process.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        tape: DeferredCalls | None = None,
        *,
        retries: Callable[[], int] = lambda: 0,
        schedule: Callable[[], bytes | None] = unknown,
        hear: Callable[[], None] | None = None,
    ) -> None:
        global _latest  # noqa: PLW0603 - one process, one account
        self.error: Exception | None = None
        self._tape = tape or DeferredCalls()
        self.recorder = Recorder(self._tape, schedule)
        self.is_first = _latest is None
        begin = _begin_of_account()
        age = time.perf_counter_ns() - begin
        self._collections = Collections()
        self._book = StepAccountant(begin, self._collections.moments, retries)
        head = Head(begin=time.time_ns() - age, rank=rank, ranks=ranks, pid=os.getpid())
        self._segment = Segment(head)
        self._hear = hear
        self._ended: str | None = None
        # Reentrant, because an interrupt may come between acquiring and releasing it.
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lflops: the ledger", daemon=True)
        _latest = self

    def start(self, folder: Path | None) -> None:
        """Start recording, and writing to a file in a folder if one is given."""
        head = self._segment.head
        if folder is not None:
            milliseconds = head.begin // 1_000_000
            name = f"rank{head.rank}-{milliseconds}-{head.pid}{ENDING}"
            self._segment.path = folder / name
        self._collections.start()
        self._thread.start()

    def stop(self, ended: str) -> None:
        """End the run and begin `after_run`. It can be called more than once.

        `ended` is "finished" or the class of an exception.
        """
        self._tape.stop()
        self.error = self.error or self._tape.error
        self._tape.error = None
        self.recorder.stop()
        self._collections.stop()
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
        self._finish(ended)

    def end(self) -> int:
        """End the account with the process, or before another run; return its last moment."""
        if self.process == os.getpid():
            self._is_over.set()
            self._finish("exit")
        return self._book.until

    def _finish(self, ended: str) -> None:
        """Write the rest.

        If the thread hangs in the file system, the rest is given up, so that the program can go on.
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
        return self._segment.head.pid

    def curves(self) -> dict[str, float]:
        """Figures of this start up to the last row, a few seconds ago."""
        rows = self._segment.rows
        if not rows:
            return {}
        return {"lost_share": self._book.lost / rows[-1].end, "slow_steps": self._book.slow_steps}

    def ledger(self) -> Ledger:
        with self._lock:
            if self._ended is None:
                self._write()
            return ledger_of([self._segment])

    def step_after(self, seconds: float) -> int:
        """Number of the first step that ends more than `seconds` from now, at the usual pace.

        Steps are numbered as the loggers count. 0 before any step.
        """
        if self.recorder.last_end is None:
            return 0
        at, done = self.recorder.last_end
        usual = self._book.usual
        if not usual:
            return done + 2
        elapsed = (time.perf_counter_ns() - at) / 1e9
        ends = math.ceil((seconds - max(usual - elapsed, 0.0)) / usual)
        return done + 1 + max(ends, 0)

    def _run(self) -> None:
        written = looked = time.perf_counter_ns()
        pause = LOOK if self._hear is None else min(HEAR, LOOK)
        while True:
            due = time.perf_counter_ns() + int(pause * 1e9)
            if self._is_over.wait(pause):
                return
            now = time.perf_counter_ns()
            if now - due > LATE:
                self._book.freezes.append((due, now))
            if self._hear is not None:
                self._hear()
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
            self._tape.play(AT_ONCE)
            # The order matters: no mark to come is older than `now`.
            now = time.perf_counter_ns()
            more = self._tape.next
            self._book.read(self.recorder.marks, now if more is None else min(now, more))
            if more is None or (pause and self._is_over.wait(pause)):
                return

    def _write(self) -> None:
        """Add a row for the time since the last row."""
        if self.error is not None:
            return
        self._read()
        book = self._book
        spent, slow = book.take()
        row = Row(
            end=book.until - book.begin,
            spent=spent,
            open=book.open,
            step=book.steps,
            first=book.first_step,
            memory=_resident(),
            ended=self._ended,
        )
        try:
            self._segment.open()
            self._segment.add(row, slow)
        except OSError as error:
            self.error = error


_PAGE = os.sysconf("SC_PAGE_SIZE")

_latest: LedgerWriter | None = None
"""The last ledger of this process. It accounts for the time until the next one begins."""


def _begin_of_account() -> int:
    """The moment from which no other ledger of this process accounts for the time."""
    now = time.perf_counter_ns()
    # A forked process begins its own account.
    if _latest is None or _latest.process != os.getpid():
        return now - int(process_age() * 1e9)
    # That ledger accounts for the time after its run.
    has_ended = _latest._ended is not None  # noqa: SLF001
    return _latest.end() if has_ended else now


@atexit.register
def _end_at_exit() -> None:
    if _latest is not None:
        with suppress(OSError):
            _latest.end()


def _resident() -> int | None:
    """Resident memory of this process in bytes, or `None` on systems other than Linux."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
        return int(pages) * _PAGE
    except (OSError, ValueError, IndexError):
        return None

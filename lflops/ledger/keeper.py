"""Keeps the ledger of this process.

The training appends marks, a thread reads them once a second and writes a line every three seconds.

    keeper = LedgerWriter()
    keeper.start(folder)              # the account has every second since the process began
    keeper.recorder.enter("data")     # the training marks what it does
    keeper.stop("finished")           # the thread ends; what follows is in `after_run`, which ends with the process

A mark has a moment, and is made whenever another category begins, and at the end of each step:

    marks    |start_up.......|data...|forward...|backward..|optimizer|other|step|lflops|data...

What a step touches has left the processor's caches since the last one, so the less code runs in it,
the better. A loop that is found by hooks does not even mark: it notes calls on a `DeferredCalls`, and the
thread makes them.

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

# the phase of what is in no phase
OTHER = "other"
# nanoseconds off its core after which it is asked what kept the training's thread; to ask takes as
# long as ten marks
IDLE = 2_000_000
LONGEST = (
    1 << 21
    # words of the tape that are kept, should the thread not read them: of some 40,000 steps
)


def unknown() -> None:
    """What is not known of a thread."""


class DeferredCalls:
    """The calls of one training, in their order. While it does not run, each is made at once."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.runs = False
        # what has ended it
        self.error: Exception | None = None
        self.clock = clock
        # Moment, function, how many values it is given, these. What Python's garbage collector
        # follows, as a tuple, would let it run.
        self._notes: deque[Any] = deque()
        self._lock = threading.RLock()
        # that of the note which is played
        self._moment: int | None = None
        # the thread that plays
        self._player: int | None = None

    def note(self, call: Callable[..., object], *given: Any) -> None:
        """Let a function be called with this.

        Nothing may be an object that is new, or that a training would free.
        """
        if self.runs:
            if len(self._notes) > LONGEST:
                self._notes.clear()
            self._notes.extend(
                (self.clock(), call, len(given), *given)
                # at once, also where other threads note
            )
        else:
            call(*given)

    def now(self) -> int:
        """Nanoseconds of the clock; while notes are played, as each was noted."""
        return self.clock() if self._moment is None else self._moment

    @property
    def next(self) -> int | None:
        """The moment of the first note that is not played; `None` if there is none."""
        return self._notes[0] if self._notes else None

    def play(self, most: int = LONGEST) -> None:
        """Make the calls that were noted until now, so many at most. An error ends it."""
        with self._lock:
            self._player = threading.get_ident()
            try:
                while self._notes and (most := most - 1) >= 0:
                    self._moment, call, given = (self._notes.popleft() for _ in range(3))
                    call(*[self._notes.popleft() for _ in range(given)])
            except Exception as error:  # noqa: BLE001 - the training's thread tells of it
                self.error, self.runs = error.with_traceback(None), False
                self._notes.clear()
            finally:
                self._moment = self._player = None

    def raise_error(self) -> None:
        """Raise what has ended it, if that was not raised before."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def forget(self) -> None:
        """Begin anew in a forked process, which has no thread that plays."""
        self.runs, self._lock = False, threading.RLock()
        self._notes.clear()

    def plays_here(self) -> bool:
        """Whether this thread plays it now."""
        return self._player == threading.get_ident()

    def stop(self) -> None:
        """Play it to its end. Calls are made at once from here on."""
        if self.runs:
            with self._lock:
                self.play()
                self.runs = False


class Recorder:
    """Appends the marks of one process; what begins within a category ends before it.

    `schedule` reads when its thread ran and waited.
    """

    def __init__(self, tape: DeferredCalls, schedule: Callable[[], bytes | None] = unknown) -> None:
        self.marks: deque[tuple[int, str | StepEnd]] = deque(maxlen=LONGEST // 8)
        self.last_end: tuple[int, int] | None = (
            # the moment at which the last step ended, and its number
            None
        )
        self._clock, self._clock_itself = tape.now, tape.clock
        self._schedule = schedule
        self._running: list[str] = []
        self._base = "start_up"
        # What the system had counted when it was last asked, and nanoseconds that the thread had
        # been off its core by then.
        self._counted: tuple[bytes | None, Any] = None, None
        self._idle = -1 << 62

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

    def move(self, nanoseconds: int, phase: str, category: str) -> None:
        """So many of this step's phase belonged to this category, as is known only now."""
        now = self._clock()
        self.marks.extend(
            [
                (now, phase),
                (now - nanoseconds, category),
                (now, self._running[-1] if self._running else self._base),
            ]
        )

    def rest(self, category: str) -> None:
        """From here on, time that is in no other category belongs to this one."""
        self._base = category
        if not self._running:
            self.marks.append((self._clock(), category))

    def stop(self) -> None:
        """All that is running ends, and what follows is after the run."""
        self._running.clear()
        # its file is open
        self._schedule = unknown
        self.rest("after_run")

    def enter_phase(self, phase: str, _given: tuple[Any, ...] = ()) -> None:
        """A phase of a training step begins: what is in no phase is from here on part of a step."""
        if self._base != OTHER:
            self.rest(OTHER)
        self._running.append(phase)
        self.marks.append((self._clock(), phase))

    def read(self, step: int) -> tuple[int, int, bytes | None, Any]:
        """What is known of a step only as it ends.

        Its number, and what the thread that makes it has run and waited until now.
        """
        now, ran = self._clock_itself(), time.thread_time_ns()
        if (
            now - ran - self._idle >= IDLE
            # a thread that has run all the time was not kept from it
        ):
            self._counted, self._idle = (self._schedule(), getrusage(RUSAGE_THREAD)), now - ran
        self.last_end = now, step
        return step, ran, *self._counted

    def step_ends(
        self, read: tuple[int, int, bytes | None, Any], shapes: Hashable, *, touched: bool
    ) -> None:
        """A step has ended of which that was read."""
        self.marks.append((self._clock(), StepEnd(*read, shapes, touched)))


class TrainPhases:
    """Listens to the phases of training steps for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.enter = recorder.enter_phase
        self.leave = self.drop = recorder.leave
        self.wait = recorder.wait


class Collections:
    """The moments at which Python's garbage collector begins and ends.

    Python discards an exception of a function in `gc.callbacks`, a Ctrl-C among them. So the
    callback is made of functions written in C, in which no signal is handled: `property.__get__`
    calls `next` with its first argument, and that appends the clock's time.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        # begin, end, begin, end, …
        self.moments: deque[int] = deque(maxlen=4096)
        append = map(self.moments.append, iter(clock, None))
        self._callback: Any = property(partial(next, append)).__get__

    def start(self) -> None:
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """It can be called again."""
        gc.callbacks[:] = [each for each in gc.callbacks if each is not self._callback]


def process_age() -> float:
    """Seconds since this process began, to a hundredth, as Linux counts.

    Since this file was loaded where it does not say.
    """
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - as the process begins
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()


# seconds between two looks at the marks, and between two rows
LOOK, WRITE = 1.0, 3.0
# seconds between two looks for requests, where this process alone answers them
HEAR = 0.1
# notes after which their marks are read. To hold thousands would let Python's garbage collector
# run,
AT_ONCE = 200
# and as long as the thread computes, Python lets the training's run every 5 ms alone: so it waits,
# for so many seconds
BREATH = 0.001
# nanoseconds that a look may be late. Later means that no thread of the process ran.
LATE = 50_000_000
# seconds that the end of a run waits for the thread, at most
PATIENCE = 2.0


class LedgerWriter:
    """The ledger of one run in this process."""

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        # calls of the training's that the thread makes
        tape: DeferredCalls | None = None,
        *,
        retries: Callable[[], int] = lambda: (
            0
            # how often the device's allocator has freed its cache and tried again, so far
        ),
        schedule: Callable[
            [], bytes | None
            # reads when the training's thread ran and waited for a core
        ] = unknown,
        # is called every `HEAR` seconds
        hear: Callable[[], None] | None = None,
    ) -> None:
        global _latest  # noqa: PLW0603 - one process, one account
        # what has ended it before its time
        self.error: Exception | None = None
        self._tape = tape or DeferredCalls()
        self.recorder = Recorder(self._tape, schedule)
        self.is_first = (
            _latest is None
            # of this process, so that its account begins with the process
        )
        begin, now = _begin_of_account(), time.perf_counter_ns()
        self._collections = Collections()
        self._book = StepAccountant(begin, self._collections.moments, retries)
        self._segment = Segment(
            Head(begin=time.time_ns() - (now - begin), rank=rank, ranks=ranks, pid=os.getpid())
        )
        self._hear = hear
        self._ended: str | None = None
        # an interrupt may come between taking it and giving it back
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lflops: the ledger", daemon=True)
        _latest = self

    def start(self, folder: Path | None) -> None:
        """Begin to listen, and to write to a file in this folder, if there is one."""
        head = self._segment.head
        if folder is not None:
            self._segment.path = (
                folder / f"rank{head.rank}-{head.begin // 1_000_000}-{head.pid}{ENDING}"
            )
        self._collections.start()
        self._thread.start()

    def stop(self, ended: str) -> None:
        """The run has ended.

        "finished", or the class of an exception. What follows is after it. It can be called again.
        """
        self._tape.stop()
        self.error, self._tape.error = self.error or self._tape.error, None
        self.recorder.stop()
        self._collections.stop()
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
        self._finish(ended)

    def end(self) -> int:
        """The process ends, or another run begins: the moment until which the account goes."""
        if self.process == os.getpid():
            self._is_over.set()
            self._finish("exit")
        return self._book.until

    def _finish(self, ended: str) -> None:
        """Write what is left.

        A file system that hangs in the thread does not hold the program: then the rest is given up.
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
        """Figures of this start until the last row, a few seconds ago; none before the first."""
        rows = self._segment.rows
        return (
            {"lost_share": self._book.lost / rows[-1].end, "slow_steps": self._book.slow_steps}
            if rows
            else {}
        )

    def ledger(self) -> Ledger:
        with self._lock:
            if self._ended is None:
                self._write()
            return ledger_of([self._segment])

    def step_after(self, seconds: float) -> int:
        """The first step, as the loggers count, that ends later than so many seconds from now, at the usual pace; 0 before any step."""
        if self.recorder.last_end is None:
            return 0
        at, done = self.recorder.last_end
        usual, elapsed = self._book.usual, (time.perf_counter_ns() - at) / 1e9
        ends = 1 if not usual else math.ceil((seconds - max(usual - elapsed, 0.0)) / usual)
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
            now, more = (
                time.perf_counter_ns(),
                self._tape.next,
                # in this order: no mark to come is older
            )
            self._book.read(self.recorder.marks, now if more is None else min(now, more))
            if more is None or (pause and self._is_over.wait(pause)):
                return

    def _write(self) -> None:
        """Add a row with all that happened since the last."""
        if self.error is not None:
            return
        self._read()
        book = self._book
        spent, slow = book.take()
        end, memory = book.until - book.begin, _resident()
        row = Row(
            end=end,
            spent=spent,
            open=book.open,
            step=book.steps,
            first=book.first_step,
            memory=memory,
            ended=self._ended,
        )
        try:
            self._segment.open()
            self._segment.add(row, slow)
        except OSError as error:
            self.error = error


_PAGE = os.sysconf("SC_PAGE_SIZE")
_latest: LedgerWriter | None = (
    # the last one of this process. It accounts for the time until the next one begins.
    None
)


def _begin_of_account() -> int:
    """The moment from which no other ledger of this process accounts for the time."""
    now = time.perf_counter_ns()
    # a fork begins anew
    if _latest is None or _latest.process != os.getpid():
        return now - int(process_age() * 1e9)
    return now if _latest._ended is None else _latest.end()  # noqa: SLF001 - the two are one


@atexit.register
def _end_at_exit() -> None:
    if _latest is not None:
        with suppress(OSError):
            _latest.end()


def _resident() -> int | None:
    """Bytes of this process in main memory, where Linux says so."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None

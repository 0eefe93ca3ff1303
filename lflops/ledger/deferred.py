"""Record function calls in the training thread, and make them later in the ledger's thread.

A recorded call is a note: the function, its arguments and the moment at which it was recorded.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from lflops.phase_log import PhaseLog

LONGEST = 1 << 21
"""Maximum length of the queue of recorded calls, in values. Each call has several values.

This is enough for the recorded calls of about 40,000 steps. If the queue is longer, all recorded
calls are dropped.
"""


class DeferredCalls:
    """A queue of calls that the training thread records and another thread makes.

    Calls are made in the order in which they were recorded. Before `start` and after `stop`, calls
    are not recorded but made immediately. While a recorded call runs, the clock of the phase log
    returns the moment at which the call was recorded.

    Attributes:
        runs: Whether calls are recorded now, and made later.
        append: Appends a recorded call to the queue as separate values: the moment, the function,
            the number of arguments, and the arguments. No argument may be a new object, or an
            object that the training run would otherwise free. The values are not stored in a tuple,
            because Python's garbage collector tracks tuples and would run more often.
        clock: Function that returns the moment for a recorded call.
        error: The exception that a recorded call has raised. After such an exception, calls are no
            longer recorded but made immediately.
    """

    def __init__(self, log: PhaseLog) -> None:
        self.runs = False
        self.error: Exception | None = None
        self.clock = log.clock
        self._log = log
        self._notes: deque[Any] = deque()
        # A call of `extend` is atomic, even if several threads record calls.
        self.append = self._notes.extend
        self._lock = threading.RLock()
        # While a recorded call runs: the moment at which it was recorded.
        self._moment: int | None = None
        # The id of the thread that makes the calls.
        self._player: int | None = None

    def start(self) -> None:
        """Record calls from now on instead of making them."""
        self._log.clock = self.now
        self.runs = True

    def note(self, call: Callable[..., object], *given: Any) -> None:
        """Record a call for later, or make it immediately if calls are not recorded.

        The attribute `append` explains which arguments are allowed.
        """
        if not self.runs:
            call(*given)
            return
        if len(self._notes) > LONGEST:
            self._notes.clear()
        self.append((self.clock(), call, len(given), *given))

    def now(self) -> int:
        """Return the current moment or, during a recorded call, the moment of its recording."""
        return self.clock() if self._moment is None else self._moment

    @property
    def next(self) -> int | None:
        """The moment at which the next waiting call was recorded, or `None` if no call waits."""
        return self._notes[0] if self._notes else None

    def run_calls(self, most: int = LONGEST) -> None:
        """Make up to `most` of the recorded calls.

        If a call raises an exception, all other waiting calls are dropped.
        """
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
                self._end()
                self._notes.clear()
            finally:
                self._moment = None
                self._player = None

    def raise_error(self) -> None:
        """Raise the exception of a recorded call, unless it has already been raised here."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def clear(self) -> None:
        """Drop all calls in a forked process, which has no thread to make them."""
        self._end()
        self._lock = threading.RLock()
        self._notes.clear()

    def runs_here(self) -> bool:
        """Return whether the calling thread is now making recorded calls in `run_calls`."""
        return self._player == threading.get_ident()

    def stop(self) -> None:
        """Make all recorded calls now, and make later calls immediately."""
        if self.runs:
            with self._lock:
                self.run_calls()
                self._end()

    def _end(self) -> None:
        self.runs = False
        self._log.clock = self.clock

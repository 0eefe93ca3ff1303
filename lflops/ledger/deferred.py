"""Note calls in the training thread, and make them later in the ledger's thread."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from lflops.phase_log import PhaseLog

LONGEST = 1 << 21
"""Maximum number of values that wait for the ledger's thread: the notes of about 40,000 steps.

If there are more, all of them are dropped.
"""


class DeferredCalls:
    """Calls of one training run, in order. Until `start`, calls are made immediately.

    While a noted call is made, the clock of the log returns the moment of the note.

    Attributes:
        runs: Set while calls are noted for later.
        append: Appends the values of a note: its moment, the function, the number of arguments, the
            arguments. No argument may be a new object, or an object that the training run would
            free. A note is not stored as a tuple, because the garbage collector tracks tuples and
            would run more often.
        clock: Returns the moment of a note.
        error: The exception of a deferred call. After it, calls are made immediately again.
    """

    def __init__(self, log: PhaseLog) -> None:
        self.runs = False
        self.error: Exception | None = None
        self.clock = log.clock
        self._log = log
        self._notes: deque[Any] = deque()
        # one call of `extend` is atomic, even if several threads add notes
        self.append = self._notes.extend
        self._lock = threading.RLock()
        # moment of the note that is being processed
        self._moment: int | None = None
        # the thread that makes the calls
        self._player: int | None = None

    def start(self) -> None:
        """Note calls from now on."""
        self._log.clock = self.now
        self.runs = True

    def note(self, call: Callable[..., object], *given: Any) -> None:
        """Note a call for later, with the arguments that `append` allows."""
        if not self.runs:
            call(*given)
            return
        if len(self._notes) > LONGEST:
            self._notes.clear()
        self.append((self.clock(), call, len(given), *given))

    def now(self) -> int:
        """Return the clock's nanoseconds or, while a noted call is made, the moment of the note."""
        return self.clock() if self._moment is None else self._moment

    @property
    def next(self) -> int | None:
        """The moment of the first note that has not been processed, or `None`."""
        return self._notes[0] if self._notes else None

    def play(self, most: int = LONGEST) -> None:
        """Make up to `most` of the noted calls.

        An exception in a call drops all other calls.
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
        """Raise the exception of a deferred call once, if there is one."""
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

    def plays_here(self) -> bool:
        """Return whether the calling thread is now making the calls that were noted for later."""
        return self._player == threading.get_ident()

    def stop(self) -> None:
        """Make all noted calls; further calls are made immediately."""
        if self.runs:
            with self._lock:
                self.play()
                self._end()

    def _end(self) -> None:
        self.runs = False
        self._log.clock = self.clock

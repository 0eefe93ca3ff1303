"""Windows that are asked for while a run goes on.

By its program, or by a file that `lflops window` leaves in its folder.

Several ranks meet at a step that the first one names. A thread of each takes part in that, on its
own connection, and no step waits:

    rank 0     hears of a request, and asks.....................names the last of these steps
    others     wait in the store...........answer with the first step that they can meet.....open the window after that one
"""

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lflops.ledger.run import REQUEST
from lflops.monitoring.inputs.messages import warn
from lflops.ranks.collect.store import poll, wait_for

# seconds between two looks of the first rank for a request. With `NOTICE` they are less than a step
# of 100 ms.
LISTEN = 0.06
# seconds after which each rank knows the step that was named
NOTICE = 0.03
ANSWER, STOP = (
    1.0,
    2.0,
    # seconds that the first rank waits for answers, and that the end of a run waits for the thread, at
    # most
)
# messages of the first rank; any other is the step that it names
ASKS, ENDS = "?", ""


class WindowRequests:
    """The requests of one run, on one rank. A `store` is what several ranks share."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: Any,
        folder: Path | None,
        can_open: Callable[[], bool] = lambda: True,
    ) -> None:
        # After how many steps, as the loggers count, the next window is to open; `None` where none
        # was asked for
        self.due: int | None = None
        self._rank, self._ranks = rank, ranks
        self._store = store
        self._file = (
            str(folder / REQUEST) if rank == 0 and folder is not None else ""
            # that the shell leaves
        )
        # whether none is open here. The first rank's is the last to be reported, so then all ranks
        # can meet
        self._can_open = can_open
        self._asked = False
        # the number of the first rank's last one
        self._message = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lflops: requests", daemon=True)
        self._step_after: Callable[[float], int] = lambda _: 0
        # What looks for a request of the shell; `None` where the thread here does so, or no file
        # can be left
        self.look_for_request = self._look if store is None and self._file else None

    def ask(self) -> None:
        """Ask for a window. A handler of a signal may call it, and any thread."""
        if self._store is None:
            self.due = 0
        elif not self._thread.is_alive():
            warn(
                "request_window: no window opens: the first rank has ended, or the store that the ranks share does not answer"
            )
        self._asked = True

    def start(self, step_after: Callable[[float], int]) -> None:
        """Begin to hear.

        `step_after` returns the first step, as the loggers count, that ends later than so many
        seconds from now.
        """
        self._step_after = step_after
        with suppress(OSError):
            os.unlink(self._file)  # noqa: PTH108 - one that an earlier run did not hear
        if self._store is not None:
            _LISTENING.add(self)
            self._thread.start()

    def stop(self) -> None:
        """Hear no more. Where the first rank stops, all do. It can be called again."""
        self._is_over.set()
        if self._thread.is_alive():
            try:
                # a store may hang
                threading.Thread(target=self._wake, daemon=True).start()
            except RuntimeError:
                # Python ends
                self._wake()
            self._thread.join(STOP)
        _LISTENING.discard(self)

    def _look(self) -> None:
        # which takes a tenth of an exception
        if self._file and os.access(self._file, os.F_OK):
            with suppress(OSError):
                os.unlink(self._file)  # noqa: PTH108 - many times a second
                self.ask()

    def _wake(self) -> None:
        """End this rank's wait, on the connection of other threads."""
        with suppress(Exception):
            self._store.set(_key(self._rank, self._message), ENDS)

    def _run(self) -> None:
        # the store is gone, and with it some rank
        with suppress(Exception):
            store = self._store.clone()
            if self._rank:
                self._follow(store)
                return
            while not self._is_over.wait(LISTEN):
                self._look()
                if self._asked and self.due is None and self._can_open():
                    self._asked = False
                    self._ask_ranks(store)
            self._send(store, ENDS)
            store.check(
                [ENDS]
                # is answered after the messages, without which no one would wake those who wait
            )

    def _ask_ranks(self, store: Any) -> None:
        self._send(store, ASKS)
        answers = [f"at/{_key(rank, self._message)}" for rank in range(1, self._ranks)]
        # a rank may have ended
        latest = time.monotonic() + ANSWER
        poll(
            lambda: store.check(answers),
            self._is_over.wait,
            lambda: self._is_over.is_set() or time.monotonic() > latest,
            0.01,
        )
        known = [int(store.get(each)) for each in answers if store.check([each])]
        self.due = max([self._step_after(NOTICE), *known])
        self._send(store, str(self.due))

    def _send(self, store: Any, message: str) -> None:
        self._message += 1
        for rank in range(1, self._ranks):
            store.set(_key(rank, self._message), message)

    def _follow(self, store: Any) -> None:
        for self._message in itertools.count(1):
            key = _key(self._rank, self._message)
            wait_for(store, key, self._is_over)
            message = ENDS if self._is_over.is_set() else store.get(key).decode()
            if message == ENDS:
                return
            if message == ASKS:
                store.set(f"at/{key}", str(self._step_after(NOTICE)))
            else:
                self.due = int(message)


_LISTENING: set[WindowRequests] = set()


@atexit.register
def _stop_at_exit() -> None:
    """A thread that waits in torch must not outlive Python."""
    for requests in tuple(_LISTENING):
        requests.stop()


def _key(rank: int, message: int) -> str:
    return f"window/{rank}/{message}"

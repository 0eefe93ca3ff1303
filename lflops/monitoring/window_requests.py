"""Handle requests for windows during a run. A window is a few consecutive steps to profile.

A request comes from the program, or from a file that `lflops window` writes to the run's folder.

With several ranks, all ranks must open the window after the same step. Each rank proposes the first
step after which it can open the window, and rank 0 chooses the last of these steps. For this, each
rank has a thread with its own connection to the ranks' store, so no step waits:

    rank 0         receives a request, asks the ranks.......chooses the last of the proposed steps
    other ranks    wait for the store.........propose a step.......................open the window
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lflops.ledger.ledger_file import REQUEST
from lflops.monitoring.inputs.messages import warn
from lflops.ranks.collect.store import poll, wait_for

LISTEN = 0.06
"""Seconds between two checks of rank 0 for a request.

`LISTEN` and `NOTICE` together are shorter than 100 ms. So a run with steps of 100 ms or longer can
open a requested window after the next step.
"""

NOTICE = 0.03
"""Seconds within which all ranks are assumed to receive the step that rank 0 chooses.

All ranks open the requested window after this step, so they must receive it before it ends.
"""

ANSWER = 1.0
"""Maximum number of seconds that rank 0 waits for the proposals of other ranks."""

STOP = 2.0
"""Maximum number of seconds that the end of a run waits for the thread of `WindowRequests`."""

ASKS = "?"
"""Message with which rank 0 asks each rank to propose a step.

The other messages of rank 0 are `ENDS` and the step after which all ranks open the window.
"""

ENDS = ""
"""Message that ends the thread of a rank, which then waits for no further message."""


class WindowRequests:
    """Receives the requests for windows during one run, and lets all ranks agree on a step.

    A window is a few consecutive steps that lflops profiles. Each rank creates one object of this
    class.

    Args:
        rank: The rank.
        ranks: The number of ranks.
        store: The store that the ranks share, or `None` if there is only one rank.
        folder: The folder in which `lflops window` leaves the file of a request.
        can_open: Returns whether this rank can open a window. If rank 0 can, all ranks can, because
            rank 0 is the last rank to finish a window.

    Attributes:
        due: The step, as counted by the loggers, after which the requested window opens. 0 means
            that it opens as soon as possible, and `None` that no window was requested.
        look_for_request: Checks for the file of a request. `None` if the thread of this class does
            this, or if there is no folder.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: Any,
        folder: Path | None,
        can_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self.due: int | None = None
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._file = str(folder / REQUEST) if rank == 0 and folder is not None else ""
        self._can_open = can_open
        self._asked = False
        # on rank 0, the number of its last message; on other ranks, the number of the message for
        # which the rank waits
        self._message = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lflops: requests", daemon=True)
        self._step_after: Callable[[float], int] = lambda _: 0
        self.look_for_request = self._look if store is None and self._file else None

    def ask(self) -> None:
        """Request a window. A signal handler and any thread may call it."""
        if self._store is None:
            self.due = 0
        elif not self._thread.is_alive():
            warn(
                "request_window: no window can open: either rank 0 has ended, or the key-value "
                "store of torch.distributed does not answer"
            )
        self._asked = True

    def start(self, step_after: Callable[[float], int]) -> None:
        """Start to accept requests.

        `step_after` is called with a number of seconds. It returns the number of the first step
        that ends after that time, as counted by the loggers.
        """
        self._step_after = step_after
        with suppress(OSError):
            # An earlier run may have left the file.
            os.unlink(self._file)  # noqa: PTH108 - as in `_look`
        if self._store is not None:
            _LISTENING.add(self)
            self._thread.start()

    def stop(self) -> None:
        """Accept no more requests.

        If rank 0 stops, all ranks stop. A second call does nothing.
        """
        self._is_over.set()
        if self._thread.is_alive():
            try:
                # The store may hang.
                threading.Thread(target=self._wake, daemon=True).start()
            except RuntimeError:
                # Python is shutting down.
                self._wake()
            self._thread.join(STOP)
        _LISTENING.discard(self)

    def _look(self) -> None:
        # `os.access` takes a tenth of the time of an `os.unlink` that raises an exception.
        if self._file and os.access(self._file, os.F_OK):
            with suppress(OSError):
                os.unlink(self._file)  # noqa: PTH108 - it runs many times a second
                self.ask()

    def _wake(self) -> None:
        """Send `ENDS` to this rank's thread, so that it stops waiting for a message.

        The thread's connection to the store is blocked while it waits. So the message is sent on
        the connection that other threads use.
        """
        with suppress(Exception):
            self._store.set(_key(self._rank, self._message), ENDS)

    def _run(self) -> None:
        # If the store is gone, a rank has ended.
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
            # The store answers this call after it has received all messages. Without the messages,
            # the waiting ranks would never wake up.
            store.check([ENDS])

    def _ask_ranks(self, store: Any) -> None:
        """On rank 0, collect the proposals of the other ranks, and send the chosen step to them."""
        self._send(store, ASKS)
        answers = [f"at/{_key(rank, self._message)}" for rank in range(1, self._ranks)]
        # A rank may have ended.
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
        """On ranks other than 0, answer the messages of rank 0 until the run ends."""
        while True:
            self._message += 1
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
    """Stop all threads when Python exits, because a thread that still waits in torch may crash."""
    for requests in tuple(_LISTENING):
        requests.stop()


def _key(rank: int, message: int) -> str:
    return f"window/{rank}/{message}"

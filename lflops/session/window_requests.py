"""Windows that are asked for while a run goes on: by its program, or by a file that `lflops window` leaves in its folder.

On several ranks the first one names a step that all can still meet, in the store that they share. The ledger's threads look there, so that
no step waits.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lflops.ledger.segment import REQUEST

AHEAD = 3.0  # seconds from the request to the step that all ranks meet at


class WindowRequests:
    """The requests of one run."""

    def __init__(self, rank: int, store: Any, folder: Path | None) -> None:
        # After how many steps, as the loggers count, the next window is to open; `None` where none was asked for
        self.due: int | None = None
        self._rank = rank
        self._store = store
        self._folder = folder
        self._asked = False
        self._number = 1

    def ask(self) -> None:
        """Ask for a window. A handler of a signal may call it, and any thread."""
        if self._store is None:
            self.due = 0
        self._asked = self._store is not None

    def look(self, steps: Callable[[], tuple[int, float]]) -> None:
        """Look for requests, on the ledger's thread. `steps` returns how many are done, and how many seconds one takes."""
        if self._rank == 0 and self._folder is not None:
            with suppress(FileNotFoundError):
                (self._folder / REQUEST).unlink()
                self.ask()
        if self._store is None:
            return
        key = f"window/{self._number}"
        if self._rank == 0 and self._asked:
            self._asked = False
            done, seconds = steps()
            self._store.set(key, str(done + 2 + math.ceil(AHEAD / max(seconds, 1e-3))))
        if self._store.check([key]):
            self._number += 1
            self.due = int(self._store.get(key))

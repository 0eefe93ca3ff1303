"""Write a progress line to stderr for a command that takes longer than a few seconds."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

FIRST_SECONDS = 3.0
"""Seconds until the first progress line. A shorter command writes none."""

TERMINAL_SECONDS = 0.5
FILE_SECONDS = 10.0
"""Seconds between two progress lines if stderr is a file.

On a terminal, the line is updated in place, every `TERMINAL_SECONDS` seconds.
"""


class ProgressLine:
    """A context manager that writes the running stage of a command and the elapsed seconds.

    A stage is a part of the command's work, such as "loading torch". A separate thread writes the
    line, so that it is updated even during a stage that reports no progress.

    Attributes:
        stage: Description of the running stage.
    """

    def __init__(
        self,
        stage: str,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        ended: threading.Event | None = None,
    ) -> None:
        self.stage = stage
        self._stream = stream or sys.stderr
        self._clock = clock
        self._begin = clock()
        self._ended = ended or threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def operators(self, done: int, _total: int | None) -> None:
        """Show how many operators have been estimated so far."""
        self.stage = f"estimating, {done:,} operators so far"

    def estimates(self, done: int) -> None:
        """Show how many estimates have been made for a plan so far."""
        self.stage = f"planning, {done:,} estimates so far"

    def line(self, seconds: float) -> str:
        """Return the text of the progress line after the given number of seconds."""
        return f"lflops: {self.stage} ({seconds:.0f} s)"

    def _write(self) -> None:
        is_terminal = self._stream.isatty()
        wait = FIRST_SECONDS
        width = 0
        while not self._ended.wait(wait):
            line = self.line(self._clock() - self._begin)
            wait = TERMINAL_SECONDS if is_terminal else FILE_SECONDS
            width = max(width, len(line))
            text = f"\r{line:<{width}}" if is_terminal else f"{line}\n"
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                # Stderr was closed, or the program that read it has ended.
                return
        if is_terminal and width:
            self._stream.write(f"\r{'':<{width}}\r")
            self._stream.flush()

"""Test the progress line of a command that takes long, with a clock that the test advances."""

import io
import threading

import pytest

from lflops.cli import progress
from lflops.cli.progress import FILE_SECONDS, TERMINAL_SECONDS, ProgressLine

FIRST_SECONDS = 3.0


@pytest.fixture(autouse=True)
def _first_line_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line is due after three seconds. In all other tests, it is never due."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", FIRST_SECONDS)


class Clock(threading.Event):
    """An event with a clock. A wait advances the clock at once; at the second `end`, it is set."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.seconds = 0.0
        self.end = end

    def wait(self, timeout: float | None = None) -> bool:
        """Advance the clock by the timeout, and return whether the end is reached."""
        self.seconds += timeout or 0.0
        return self.seconds >= self.end


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return true, as a terminal does."""
        return True


def written(stream: io.StringIO, end: float) -> str:
    """Return the text that is written during a command that takes `end` seconds."""
    clock = Clock(end)
    with ProgressLine("estimating", stream, clock=lambda: clock.seconds, ended=clock) as line:
        line.operators(1500, None)
        line._thread.join()
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_short_command_writes_nothing(stream: type[io.StringIO]) -> None:
    """A command that ends before the first line is due writes nothing."""
    assert written(stream(), FIRST_SECONDS) == ""


def test_a_file_gets_a_line_now_and_then() -> None:
    """A file gets a line after three seconds, and another one ten seconds later."""
    text = written(io.StringIO(), FIRST_SECONDS + FILE_SECONDS + 1)
    assert [line.rpartition(" (")[2] for line in text.splitlines()] == ["3 s)", "13 s)"]
    assert "1,500 operators" in text or "estimating" in text


def test_a_terminal_has_one_line_that_changes_and_goes() -> None:
    """On a terminal, each text replaces the one before it, and a blank line replaces the last."""
    text = written(Terminal(), FIRST_SECONDS + 2 * TERMINAL_SECONDS)
    first, second, blank, end = text.split("\r")[1:]
    assert "(3 s)" in first
    assert "(4 s)" in second
    assert blank.strip() == ""
    assert end == ""
    assert "\n" not in text

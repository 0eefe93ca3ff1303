"""Clocks for tests.

One clock stands still until the test advances it, and one advances by a second on each reading.
"""

import pytest

from lflops.monitoring import session
from lflops.monitoring.inputs import phases


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: "StillClock") -> None:
    """Replace the host's clock of all monitored runs."""
    for module in (session, phases):
        monkeypatch.setattr(module, "HostClock", lambda: clock)


class StillClock:
    """Its moments are numbers of seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def mark(self) -> float:
        """This moment."""
        return self.now

    def nanoseconds(self) -> int:
        """This moment as the host's clock marks it."""
        return round(self.mark() * 1e9)

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class TickingClock(StillClock):
    """Each moment that is marked is a second after the one before.

    Whatever ran took some time, however busy the machine is.
    """

    def mark(self) -> float:
        """This moment."""
        self.now += 1.0
        return self.now

"""Clocks for tests.

One clock stands still until the test advances it, and one advances by a second on each reading.
"""

import pytest

from lflops.monitoring import session
from lflops.monitoring.inputs import phases


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: "StillClock") -> None:
    """Replace the host clock of all monitored runs."""
    for module in (session, phases):
        monkeypatch.setattr(module, "HostClock", lambda: clock)


class StillClock:
    """A clock that only `advance` changes. Its moments are seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now += seconds

    def mark(self) -> float:
        """Return the current moment."""
        return self.now

    def nanoseconds(self) -> int:
        """Return the current moment in nanoseconds."""
        return round(self.mark() * 1e9)

    def settle(self) -> None:
        """No-op: this clock never waits for a device."""

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two moments."""
        return end - start


class TickingClock(StillClock):
    """A clock that advances by one second on each reading.

    So everything takes some time, and the times do not depend on how busy the machine is.
    """

    def mark(self) -> float:
        """Return the current moment, one second after the previous one."""
        self.now += 1.0
        return self.now

"""A clock that stands still until the test advances it."""


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

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

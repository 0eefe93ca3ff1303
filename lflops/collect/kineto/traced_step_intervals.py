"""When the recorded steps are: between two of them other things may happen, which are no part of either."""

import bisect
from collections.abc import Iterable
from math import inf

__all__ = ["StepIntervals"]


class StepIntervals:
    """Says of a moment in which step it is.

    Args:
        steps: Beginning and end of each, in their order.

    Attributes:
        number: How many there are.
    """

    def __init__(self, steps: Iterable[tuple[int, int]]) -> None:
        """Keep when each begins and ends."""
        self._changes = [moment for step in steps for moment in step]
        self.number = len(self._changes) // 2

    def __contains__(self, moment: int) -> bool:
        return bisect.bisect_right(self._changes, moment) % 2 == 1

    def index(self, moment: int) -> int:
        """Of the step that this is in."""
        return bisect.bisect_right(self._changes, moment) // 2

    def change(self, moment: int) -> float:
        """When it is over."""
        place = bisect.bisect_right(self._changes, moment)
        return self._changes[place] if place < len(self._changes) else inf

"""Find steps in which a phase takes much longer, and describe how often they occur."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lflops.findings.part_rule import BURST_RATIO
from lflops.ledger.account import Ledger

REGULAR_SHARE = 0.9
"""Stalls are reported as regular (`every 3rd step`) if most of them are equally far apart.

At least this share of the distances between one stall and the next must be the same.
"""


FEWEST_STALLS = 3
"""Minimum number of stalls to describe how often they occur."""


class Stalls(NamedTuple):
    """Long times of a phase, such as the data wait, in a run in which most of its times are short.

    Attributes:
        seconds: Mean duration of the long times.
        often: How often they occur, such as `every 3rd step` or `in 7 of 90 steps`.
        is_regular: Whether most of them are equally far apart.
    """

    seconds: float
    often: str
    is_regular: bool


def stalls_of(ledger: Ledger | None, phase: str = "data") -> Stalls | None:
    """Return the stalls of a run in a phase, or `None` if there are none."""
    if ledger is None:
        return None
    times = []
    for group in ledger.unprofiled:
        if group.steps == 1:
            times.append(group.spent.get(phase, 0.0))
    return stalls_in(times)


def stalls_in(times: Sequence[float]) -> Stalls | None:
    """Return the stalls, or `None` if the time is similar in all steps.

    `times` are the seconds of the phase in each step, in the order of the steps.
    """
    if not times:
        return None
    rising = sorted(times)
    # A single step may take much longer than all other steps.
    longest = rising[-2] if len(rising) > FEWEST_STALLS else rising[-1]
    long = []
    long_seconds = []
    for place, seconds in enumerate(times):
        if seconds > longest / 2:
            long.append(place)
            long_seconds.append(seconds)
    usual = rising[: len(rising) - len(long)]
    if len(long) < FEWEST_STALLS or len(usual) < len(long):
        return None
    if longest < BURST_RATIO * usual[len(usual) // 2]:
        return None
    distances = [after - before for before, after in pairwise(long)]
    usual_distance = sorted(distances)[len(distances) // 2]
    is_equal = distances.count(usual_distance) >= REGULAR_SHARE * len(distances)
    # Steps in a row are a slow part of the run, not a rhythm.
    is_regular = is_equal and usual_distance > 1
    often = f"in {len(long)} of {len(times)} steps"
    if is_regular:
        often = f"every {_ordinal(usual_distance)} step"
    return Stalls(sum(long_seconds) / len(long), often, is_regular)


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"

"""Find long waits for data among short waits, and describe how often they occur."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lflops.findings.part_rule import BURST_RATIO
from lflops.ledger.account import Ledger

REGULAR_SHARE = 0.9
"""Long waits are reported as regular (`every 3rd step`) if most of them are equally far apart.

At least this share of the distances between one long wait and the next must be the same.
"""


FEWEST_STALLS = 3
"""Minimum number of long waits to describe how often they occur."""


class Stalls(NamedTuple):
    """Long waits for data in a run in which most waits are short.

    Attributes:
        seconds: Mean duration of the long waits.
        often: How often they occur, such as `every 3rd step` or `in 7 of 90 steps`.
        is_regular: Whether most of them are equally far apart.
    """

    seconds: float
    often: str
    is_regular: bool


def stalls_of(ledger: Ledger | None) -> Stalls | None:
    """Return the long waits for data of a run, or `None` if there are none."""
    if ledger is None:
        return None
    waits = []
    for group in ledger.unprofiled:
        if group.steps == 1:
            waits.append(group.spent.get("data", 0.0))
    return stalls_in(waits)


def stalls_in(waits: Sequence[float]) -> Stalls | None:
    """Return the long waits, or `None` if the time is similar in all steps.

    `waits` are the seconds of waiting in each step, in the order of the steps.
    """
    if not waits:
        return None
    rising = sorted(waits)
    # A single step may have a much longer wait than all other steps.
    longest = rising[-2] if len(rising) > FEWEST_STALLS else rising[-1]
    long = []
    long_seconds = []
    for place, wait in enumerate(waits):
        if wait > longest / 2:
            long.append(place)
            long_seconds.append(wait)
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
    often = f"in {len(long)} of {len(waits)} steps"
    if is_regular:
        often = f"every {_ordinal(usual_distance)} step"
    return Stalls(sum(long_seconds) / len(long), often, is_regular)


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"

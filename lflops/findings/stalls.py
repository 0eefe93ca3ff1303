"""Find stalls and pauses, and describe how often they occur.

A stall is a step in which a phase, such as the data wait, takes much longer than in most steps. A
pause is work between two steps, such as a validation.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lflops import units
from lflops.findings.part_rule import BURST_RATIO
from lflops.ledger.account import Ledger

REGULAR_SHARE = 0.9
"""Share of the distances between consecutive stalls that must be equal for stalls to be regular.

If stalls are regular, the text says `every 3rd step`, for example.
"""


FEWEST_STALLS = 3
"""Minimum number of stalls in a run. Fewer stalls are ignored."""


class Stalls(NamedTuple):
    """The steps of a run in which a phase, such as the data wait, takes much longer than usual.

    Attributes:
        seconds: Mean time of the phase in these steps.
        often: How often these steps occur, such as `every 3rd step` or `in 7 of 90 steps`.
        is_regular: Whether most of these steps are equally far apart.
        share: The number of these steps as a share of all steps.
        usual: Mean time of the phase in all other steps, or `None` if it is unknown.
    """

    seconds: float
    often: str
    is_regular: bool
    share: float
    usual: float | None


def stalls_of(ledger: Ledger | None, phase: str = "data") -> Stalls | None:
    """Return the stalls of a phase in a run, or `None` if there are none or no ledger is passed."""
    if ledger is None:
        return None
    times = []
    joined = 0
    for group in ledger.unprofiled:
        if group.steps == 1:
            times.append(group.spent.get(phase, 0.0))
        else:
            joined += group.steps
    stalls = stalls_in(times)
    if stalls is None or not joined:
        return stalls
    stalls = stalls._replace(usual=None)
    if stalls.is_regular:
        return stalls
    # In a long run, the ledger has the times of single steps only for some of the steps.
    return stalls._replace(often=f"in about {units.percent(stalls.share)} of the steps")


def stalls_in(times: Sequence[float]) -> Stalls | None:
    """Return the stalls among the times of a phase, or `None` if there are no stalls.

    `times` has the seconds of the phase in each step, in the order of the steps.
    """
    if not times:
        return None
    rising = sorted(times)
    # The longest time is left out, because a single step can take much longer than all others.
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
    # Stalls in consecutive steps are a slow section of the run, not a regular pattern.
    is_regular = is_equal and usual_distance > 1
    often = f"in {len(long)} of {len(times)} steps"
    if is_regular:
        often = f"every {_ordinal(usual_distance)} step"
    share = len(long) / len(times)
    mean = sum(long_seconds) / len(long)
    in_others = (sum(times) - sum(long_seconds)) / len(usual)
    return Stalls(mean, often, is_regular, share, in_others)


FEWEST_PAUSES = 2
"""Minimum number of pauses in a run of which the text says how often they occur."""


class Pauses(NamedTuple):
    """The pauses of a run in which the same work is done between two steps.

    Attributes:
        total: Seconds of all pauses that the ledger lists with their steps.
        seconds: Mean duration of a pause.
        often: How often they occur, such as `every 10th step`. Empty if they are not regular.
    """

    total: float
    seconds: float
    often: str


def pauses_of(ledger: Ledger, category: str) -> Pauses | None:
    """Return the pauses of a category, such as validation, or `None` if there are fewer than two.

    In a long run, the ledger joins neighbouring steps in groups. If pauses are in neighbouring
    groups, a group may have several of them, so the result is `None`.
    """
    steps = []
    durations = []
    largest = max((group.steps for group in ledger.step_groups), default=0)
    for group in ledger.step_groups:
        seconds = group.between.get(category, 0.0)
        if seconds > 0:
            steps.append(group.first)
            durations.append(seconds)
    distances = [after - before for before, after in pairwise(steps)]
    if len(steps) < FEWEST_PAUSES or (largest > 1 and min(distances) < 2 * largest):
        return None
    usual = round((steps[-1] - steps[0]) / len(distances))
    tolerance = 0 if largest == 1 else largest
    near = [each for each in distances if abs(each - usual) <= tolerance]
    often = ""
    if usual > 1 and len(near) >= REGULAR_SHARE * len(distances):
        number = f"{_ordinal(usual)} step"
        often = f"every {number}" if largest == 1 else f"about every {number}"
    total = sum(durations)
    return Pauses(total, total / len(durations), often)


def _ordinal(number: int) -> str:
    if number % 100 in {11, 12, 13}:
        return f"{number}th"
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"

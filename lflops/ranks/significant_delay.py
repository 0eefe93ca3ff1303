"""Decide whether a rank takes longer than the other ranks by more than noise.

The excess of a rank is the time that it takes longer than the other ranks in one place (a module in
a phase), for each step. An excess is *steady* if it is present in nearly every step, and
*intermittent* if it is far larger in some steps than in the rest.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.records import LARGE_EXCESS_RATIO, RankComparison, RankDelay
from lflops.profile.series import robust_deviation

# Ratio of the standard error of a median to the standard error of a mean.
OF_MEDIAN = 1.2533

# Smallest excess that counts as present in a step, as a share of the median excess.
PRESENT = 0.3
# Smallest share of the steps in which a steady excess is present.
NEARLY_ALL = 0.8
# Number of standard errors by which the median of a steady excess must exceed 0.
SIGMAS = 4.0
# Number of standard deviations of the other ranks by which a steady excess must exceed the expected
# maximum of all ranks. With many ranks, this maximum is well above 0 by chance alone.
SIGMAS_OF_RANKS = 4.0

# Smallest and largest share of the steps in which an intermittent straggler is slow.
LEAST_BURSTS = 0.01
MOST_BURSTS = 0.9
# Smallest number of steps in which an intermittent straggler is slow. One step fewer is enough if
# the excess in each of these steps is larger than LARGE_BURST of a step.
FEWEST_BURSTS = 3
LARGE_BURST = 0.1
# Smallest ratio of the smallest excess in slow steps to the largest excess in other steps.
FAR_ABOVE = 2.0
# Smallest ratio of the smallest excess in slow steps to the median excess in slow steps.
EVEN = 0.4
# Smallest excess in a slow step, as a share of the step.
LEAST_BURST = 0.01
# Number of intermittent stragglers that chance alone may produce in a run, over all ranks and
# places. A straggler is flagged only if chance would produce fewer.
BY_CHANCE = 0.01
# Smallest time of a place, as a share of a step, that is used to compute the probability that a
# delay occurs by chance. A shorter place counts as this share.
LEAST_EXPOSED = 0.02


class SignificantDelay(Struct, frozen=True, kw_only=True):
    """A delay of a rank that is more than noise.

    Attributes:
        delay: The delay. It has the rank's excess over the other ranks in each step.
        pattern: `steady` if the excess is present in nearly every step, `intermittent` if it is
            present in some steps.
        seconds: Cost per step. For a steady excess, it is the median over the steps, so that a
            single disturbance of the machine has no effect. For an intermittent excess, it is the
            median over the slow steps, spread over all steps.
        slow_steps: Number of steps in which the excess is present.
    """

    delay: RankDelay
    pattern: Literal["steady", "intermittent"]
    seconds: float
    slow_steps: int


def step_costs(delay: RankDelay) -> list[float]:
    """Return the cost of a delay in each step: the extra time that makes the other ranks wait.

    If the rank is faster than usual or early in a step, the value is negative.
    """
    return [min(step) for step in zip(delay.excess, delay.late, strict=True)]


def steps_at_least(seconds: Sequence[float], limit: float) -> int:
    """Return the number of steps in which a time is at least `limit`."""
    return sum(each >= limit for each in seconds)


def significant(delay: RankDelay, compared: RankComparison, ranks: int) -> SignificantDelay | None:
    """Return the pattern and the cost of a delay, or `None` if the delay may be noise.

    The more `ranks` a run has, the longer the delay must be, because in a large run some rank is
    always slow by chance.
    """
    if _is_steady(delay, ranks):
        return SignificantDelay(
            delay=delay,
            pattern="steady",
            seconds=statistics.median(step_costs(delay)),
            slow_steps=_steps_present(delay.excess),
        )
    # Once the last rank has joined a collective, the collective's threads compete for the
    # processor, so single slow steps prove nothing.
    if delay.begins_collective:
        return None
    slow = _far_excesses(delay.excess, compared.seconds)
    if not slow:
        return None
    tries = ranks * max(compared.places, 1)
    if tries * _probability_by_chance(delay, slow, compared, ranks) >= BY_CHANCE:
        return None
    costs_when_slow = []
    for cost, excess in zip(step_costs(delay), delay.excess, strict=True):
        if excess >= slow[-1]:
            costs_when_slow.append(cost)
    return SignificantDelay(
        delay=delay,
        pattern="intermittent",
        seconds=len(slow) * statistics.median(costs_when_slow) / len(delay.excess),
        slow_steps=len(slow),
    )


def _steps_present(excess: Sequence[float]) -> int:
    return steps_at_least(excess, PRESENT * statistics.median(excess))


def _is_steady(delay: RankDelay, ranks: int) -> bool:
    excess = delay.excess
    median = statistics.median(excess)
    if median <= 0 or _steps_present(excess) < NEARLY_ALL * len(excess):
        return False
    standard_error = OF_MEDIAN * robust_deviation(excess) / math.sqrt(len(excess))
    if median < SIGMAS * standard_error:
        return False
    if delay.noise is None:
        return True
    largest_by_chance = math.sqrt(2 * math.log(ranks))
    return median >= (SIGMAS_OF_RANKS + largest_by_chance) * delay.noise


def _far_excesses(excess: Sequence[float], step_seconds: float) -> list[float]:
    """Divide the steps into slow steps and other steps, and return the excesses in the slow steps.

    The excesses in slow steps are far above the excesses in all other steps, and close to each
    other. The largest excess comes first. Returns an empty list if the steps cannot be divided in
    this way.
    """
    ordered = sorted(excess, reverse=True)
    most = math.floor(MOST_BURSTS * len(ordered))
    fewest = max(FEWEST_BURSTS, math.ceil(LEAST_BURSTS * len(ordered)))
    for number in range(most, fewest - 2, -1):
        slow = ordered[:number]
        rest = ordered[number:]
        usual = max(rest[0], statistics.median(map(abs, rest)))
        least = (LEAST_BURST if number >= fewest else LARGE_BURST) * step_seconds
        if slow[-1] > max(FAR_ABOVE * usual, EVEN * statistics.median(slow), least):
            return slow
    return []


def _probability_by_chance(
    delay: RankDelay, slow: Sequence[float], compared: RankComparison, ranks: int
) -> float:
    """Return the probability that at least as many slow steps occur by chance as in a delay.

    `slow` has the excesses of the delay in its slow steps, largest first. Consecutive slow steps
    count as one slow step.
    """
    steps = len(delay.excess)
    smallest = slow[-1]
    others_slow = steps_at_least(delay.largest_of_others, smallest)
    rate_of_others = others_slow / (steps * max(ranks - 1, 1))
    rate = min(max(_large_excess_rate(delay, smallest, compared), rate_of_others), 1.0)
    begins = 0
    before = 0.0
    for now in delay.excess:
        begins += before < smallest <= now
        before = now
    return _binomial_tail(steps, begins, rate)


def _large_excess_rate(delay: RankDelay, smallest: float, compared: RankComparison) -> float:
    """Return the probability that an excess of at least `smallest` occurs in a step by chance.

    The probability is estimated from the number of such excesses in other places (modules in a
    phase). It is proportional to the time that ranks usually spend in the place of `delay`.
    """
    if not compared.large_excess_seconds:
        return 0.0
    for number, count in enumerate(compared.large_excesses):
        size = compared.seconds * LARGE_EXCESS_RATIO**number
        if size <= smallest:
            here = steps_at_least(delay.excess, size)
            elsewhere = max(count - here, 0)
            exposed = max(delay.usual, LEAST_EXPOSED * compared.seconds)
            return (elsewhere + 0.5) / compared.large_excess_seconds * exposed
    return 0.0


def _binomial_tail(trials: int, least: int, rate: float) -> float:
    """Return the probability of `least` or more successes in `trials` trials.

    `rate` is the probability of success in one trial.
    """
    probability = 0.0
    for successes in range(least, trials + 1):
        failures = trials - successes
        probability += math.comb(trials, successes) * rate**successes * (1 - rate) ** failures
    return probability

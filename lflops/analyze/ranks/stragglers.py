"""The judgement that a rank is a straggler: its excess is more than noise, steady or in bursts."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.records import RankComparison, RankExcess

ROBUST = 1.4826  # median absolute deviations to a standard deviation
OF_MEDIAN = 1.2533  # standard errors of a mean to that of a median
NEARLY_ALL = 0.8  # of the steps: in so many a steady excess is there
THERE = 0.3  # of the median: an excess of so much is there
SIGMAS = 4.0  # standard errors that a steady excess is beyond 0
SIGMAS_OF_RANKS = 4.0  # standard deviations of the other ranks beyond the largest that so many ranks reach by chance
LEAST_BURSTS, MOST_BURSTS = 0.01, 0.9  # of the steps: the share in which bursts come

FEWEST_BURSTS = 3

FAR_ABOVE = 2.0  # times the largest excess in the other steps, and their median difference in either direction
BY_CHANCE = 0.01  # bursts that a run may have by chance, over all ranks and places
LEAST_EXPOSED = 0.02  # of the step: a shorter place is hit by chance as often as one of this length
JOLT_RATIO = 2**-0.5  # each size of `RankComparison.jolts` to the one before
LEAST_BURST = 0.01  # of the step: what is smaller is no burst
EVEN = 0.4  # of the median burst: the smallest one has at least so much


class Verdict(Struct, frozen=True, kw_only=True):
    """An excess that is more than noise."""

    pattern: Literal["steady", "burst"]  # `steady` is in nearly every step, `burst` in some of them
    seconds: float  # what it costs a step: the median of a steady one, so that one slow step of the machine is not its fault; else the mean
    steps: int  # in how many steps it is there


def costs(excess: RankExcess) -> list[float]:
    """What of the excess makes the rank late, step by step; negative where there is none."""
    return [min(each) for each in zip(excess.excess, excess.late, strict=True)]


def judge(excess: RankExcess, compared: RankComparison, ranks: int) -> Verdict | None:
    """The verdict; `None` where the excess can be noise: the slowest of many `ranks` is slow by chance."""
    lost = costs(excess)
    if _is_steady(excess, ranks):
        there = sum(each >= THERE * statistics.median(excess.excess) for each in excess.excess)
        return Verdict(pattern="steady", seconds=statistics.median(lost), steps=there)
    if excess.begins_collective:  # its threads take the processor when the last rank has come
        return None
    bursts = _bursts(excess.excess, least=LEAST_BURST * compared.seconds)
    if not bursts or _by_chance(excess, bursts, compared, ranks) * ranks * max(compared.places, 1) >= BY_CHANCE:
        return None
    costly = [cost for cost, seconds in zip(lost, excess.excess, strict=True) if seconds >= bursts[-1]]
    return Verdict(pattern="burst", seconds=len(bursts) * statistics.median(costly) / len(lost), steps=len(bursts))


def _is_steady(excess: RankExcess, ranks: int) -> bool:
    median = statistics.median(excess.excess)
    if median <= 0 or sum(each >= THERE * median for each in excess.excess) < NEARLY_ALL * len(excess.excess):
        return False
    deviation = ROBUST * statistics.median(abs(each - median) for each in excess.excess)
    if median < SIGMAS * OF_MEDIAN * deviation / math.sqrt(len(excess.excess)):
        return False
    return excess.noise is None or median >= (SIGMAS_OF_RANKS + math.sqrt(2 * math.log(ranks))) * excess.noise


def _bursts(seconds: Sequence[float], *, least: float) -> Sequence[float]:
    """The excesses that are far above the others and near each other, in falling order; none where there are no such."""
    ordered = sorted(seconds, reverse=True)
    fewest = max(FEWEST_BURSTS, math.ceil(LEAST_BURSTS * len(seconds)))
    for number in range(math.floor(MOST_BURSTS * len(seconds)), fewest - 1, -1):
        bursts, rest = ordered[:number], ordered[number:]
        usual = max(rest[0], statistics.median(map(abs, rest)))
        if bursts[-1] > max(FAR_ABOVE * usual, EVEN * statistics.median(bursts), least):
            return bursts
    return ()


def _by_chance(excess: RankExcess, bursts: Sequence[float], compared: RankComparison, ranks: int) -> float:
    """The probability of so many bursts in one place, from how often ranks are so late elsewhere, and other ranks here.

    A place is hit in proportion to its time. Bursts in a row are one.
    """
    smallest, steps = bursts[-1], len(excess.excess)
    larger = [number for number in range(len(compared.jolts)) if compared.seconds * JOLT_RATIO**number <= smallest]
    rate = 0.0
    if larger and compared.jolted_seconds:
        size = compared.seconds * JOLT_RATIO ** larger[0]
        elsewhere = max(compared.jolts[larger[0]] - sum(each >= size for each in excess.excess), 0)
        rate = (elsewhere + 0.5) / compared.jolted_seconds * max(excess.usual, LEAST_EXPOSED * compared.seconds)
    here = sum(each >= smallest for each in excess.largest_of_others) / (steps * max(ranks - 1, 1))
    rate = min(max(rate, here), 1.0)
    begins = sum(now >= smallest and before < smallest for before, now in itertools.pairwise((0.0, *excess.excess)))
    return sum(math.comb(steps, k) * rate**k * (1 - rate) ** (steps - k) for k in range(begins, steps + 1))

"""Is a change of a time news? What a slower machine does to all modules is taken out first, and what noise can do is allowed for.

How sure a median is comes from the quartiles around it. Were the steps' times normal, their quartiles would be 1.349 standard deviations
apart, and the error of the median of n steps 1.2533 / sqrt(n) standard deviations: 0.93 x (high - low) / sqrt(n) together. The quartiles
of few steps lie closer together than those of many would, about as (n - 1) / n: of the 0.93 x (high - low) x sqrt(n) / (n - 1) that is
used here, one step tells nothing. Times of several phases are added up with their errors, as if all were late at once.

What is common to all modules is the median of their ratios: of the large ones, the largest that have 90 % of the time together, as those
of the small ones vary most.

A ratio of two medians has both errors, relative, as the root of the sum of their squares. It gets no smaller than that of the typical
module, as a few steps can agree by chance, and no smaller than how far the ratios of the modules scatter around their median (1.4826 x
their median distance from it, a standard deviation were they normal): whatever differs between two runs of the same code is in there, and
no step of either run could have told. Both are those of the large modules for a large one, those of the small for a small one. To that
comes the error of the common ratio, 1.2533 / sqrt(modules) of such an error. The interval reaches so many errors either way that of all the
times judged together one is outside by noise alone in one comparison of a thousand.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.records import Spread

__all__ = ["NEWS", "CommonFactor", "Judge", "Timed", "Timing", "Verdict", "error_of", "judge_of", "judge_of_steps", "timed", "uncompared"]

LEAST_CHANGE = 0.03
"""Of a time, for it to be news: two runs of the same code place their tensors differently in memory, which is worth some per cent."""
LEAST_SHARE = 0.005
"""Of a step: what is gained or lost below that is no news."""
LARGE = 0.9
"""Of the time, for the modules that have a say in how fast the whole run is."""
LEAST_MODULES = 3
"""With fewer, a slower module cannot be told from a slower machine."""
LEAST_IN_COMMON = 1 / 3
"""Of all modules' time, that the compared ones have: a few layers that two models happen to share say nothing of the whole run."""
CHANCE = 0.001
"""Of two runs of the same code, that any interval misses."""

Verdict = Literal["slower", "faster", "same"]
NEWS: frozenset[Verdict | None] = frozenset({"slower", "faster"})


class CommonFactor(Struct, frozen=True, kw_only=True):
    """What happened to all modules alike.

    Attributes:
        ratio: The median of after / before, over modules that did the same work.
        modules: How many of them had a say.
        error: Of the ratio, relative.
    """

    ratio: float
    modules: int
    error: float


class Timing(Struct, frozen=True, kw_only=True):
    """A time before and after, in seconds. `None` is unknown, or not judged.

    Attributes:
        before: The median.
        after: The median.
        ratio: after / before.
        per_mac: The ratio of the seconds a MAC, where the MACs differ.
        beyond: The ratio over that of the whole run. Of a step it is the ratio itself.
        low: Where `beyond` may lie, at least.
        high: Where it may lie, at most.
        lost: Seconds beyond the whole run; below 0 they were won.
        verdict: `same` where it is within the noise, or too small to matter, or for what is inclusive explained by what is below.
    """

    before: float | None
    after: float | None
    ratio: float | None = None
    per_mac: float | None = None
    beyond: float | None = None
    low: float | None = None
    high: float | None = None
    lost: float | None = None
    verdict: Verdict | None = None


class Timed(NamedTuple):
    """Median seconds and the relative error of them; no error where there is none to know."""

    seconds: float
    error: float | None


class Judge(NamedTuple):
    """What all judgements of two runs rest on.

    Attributes:
        whole: What is taken out; `None` is nothing.
        large: Seconds, before, from which on a time is a large one.
        least_error: Of the ratio of a large time.
        least_error_of_small: Of that of a small one.
        reach: Of an interval, in errors.
        step: Seconds, before, that a change is seen against.
    """

    whole: CommonFactor | None
    large: float
    least_error: float
    least_error_of_small: float
    reach: float
    step: float

    def timing(self, before: Timed | None, after: Timed | None, explained: float = 0.0) -> Timing:
        """Judge a time, if both sides of it and their errors are known.

        Args:
            before: In the first run.
            after: In the second.
            explained: Seconds of the change that are told of elsewhere.
        """
        given = uncompared(before, after)
        error = _error_of_ratio(before, after)
        if not given.before or not given.after or not given.ratio or error is None:
            return given
        whole, of_whole = (self.whole.ratio, self.whole.error) if self.whole else (1.0, 0.0)
        least_error = self.least_error if given.before >= self.large else self.least_error_of_small
        beyond, error = given.ratio / whole, math.hypot(max(error, least_error), of_whole)
        lost = given.after - given.before * whole
        left = (lost - explained) / (given.before * whole)
        is_news = (
            abs(left) >= LEAST_CHANGE
            and abs(left) * given.before >= LEAST_SHARE * self.step
            and (left <= -1 or abs(math.log1p(left)) > self.reach * error)
        )
        return replace(
            given,
            beyond=beyond,
            low=beyond * math.exp(-self.reach * error),
            high=beyond * math.exp(self.reach * error),
            lost=lost,
            verdict="same" if not is_news else "slower" if left > 0 else "faster",
        )


def timed(spreads: Collection[Spread | None]) -> Timed | None:
    """The time of several parts together; `None` where one of them is unknown, or there is none."""
    known = [spread for spread in spreads if spread is not None]
    seconds = sum(spread.median for spread in known)
    if not known or len(known) < len(spreads):
        return None
    if not seconds or min(spread.n for spread in known) < 2:
        return Timed(seconds, None)
    return Timed(seconds, sum(error_of(each) for each in known) / seconds)


def error_of(spread: Spread) -> float:
    """Seconds that the median of several steps may be wrong by."""
    return 0.93 * (spread.high - spread.low) * math.sqrt(spread.n) / (spread.n - 1)


def uncompared(before: Timed | None, after: Timed | None, macs: float | None = None) -> Timing:
    """Two times side by side, without a judgement; `macs` is the ratio of their MACs."""
    first, second = (None if each is None else each.seconds for each in (before, after))
    ratio = None if not first or second is None else second / first
    return Timing(before=first, after=second, ratio=ratio, per_mac=ratio / macs if ratio is not None and macs and macs != 1 else None)


def judge_of(pairs: Sequence[tuple[Timed, Timed]], *, step: float, times: int) -> Judge | None:
    """Find out what happened to the whole run; `None` where too few modules, or too little of its time, can be compared.

    Args:
        pairs: Each module's own time before and after, of those that did the same work.
        step: Seconds of all modules before.
        times: How many will be judged.
    """
    known = [
        _Ratio(before.seconds, math.log(after.seconds / before.seconds), error)
        for before, after in pairs
        if (error := _error_of_ratio(before, after)) is not None
    ]
    if len(known) < LEAST_MODULES or sum(each.seconds for each in known) < LEAST_IN_COMMON * step:
        return None
    known.sort(reverse=True)
    sums = list(accumulate(each.seconds for each in known))
    number = max(sum(below < LARGE * sums[-1] for below in (0.0, *sums)), LEAST_MODULES)
    large, small = known[:number], known[number:]
    common, least_error = _typical(large)
    of_small = max(least_error, _typical(small)[1]) if small else least_error
    whole = CommonFactor(ratio=math.exp(common), modules=number, error=1.2533 * least_error / math.sqrt(number))
    return Judge(whole, large[-1].seconds, least_error, of_small, _reach(times), step)


def judge_of_steps(modules: Judge | None, step: Spread | None, *, times: int) -> Judge:
    """A judge of what the steps' clock tells, with what the modules told."""
    seconds = step.median if step else 0.0
    return modules._replace(reach=_reach(times), step=seconds) if modules else Judge(None, 0.0, 0.0, 0.0, _reach(times), seconds)


class _Ratio(NamedTuple):
    """Of a module's times: its seconds before, the logarithm, and the relative error."""

    seconds: float
    logarithm: float
    error: float


def _typical(ratios: Sequence[_Ratio]) -> tuple[float, float]:
    """The median of the logarithms, and the least error of any of them."""
    middle = statistics.median(each.logarithm for each in ratios)
    scatter = 1.4826 * statistics.median(abs(each.logarithm - middle) for each in ratios)
    return middle, max(scatter, statistics.median(each.error for each in ratios))


def _reach(times: int) -> float:
    """How many errors an interval has to reach, if so many times are judged together."""
    return statistics.NormalDist().inv_cdf(1 - CHANCE / (2 * max(times, 1)))


def _error_of_ratio(before: Timed | None, after: Timed | None) -> float | None:
    """Relative; `None` where it is not known, as of a time of 0."""
    if before is None or after is None or before.error is None or after.error is None:
        return None
    return math.hypot(before.error, after.error)

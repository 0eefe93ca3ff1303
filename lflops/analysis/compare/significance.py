"""Is a change of a time more than noise?

What a slower machine does to all modules is taken out before a module is judged.

The error of a median comes from the quartiles. If the steps' times are normal, the quartiles are
1.349 standard deviations from each other. The error of the median of n steps is then 1.2533 /
sqrt(n) standard deviations, or 0.93 x (high - low) / sqrt(n). The quartiles of few steps are closer
together than those of many, about as (n - 1) / n. So 0.93 x (high - low) x sqrt(n) / (n - 1) is
used here, and one step gives no error. The times of several phases are added up, and so are their
errors, as if they were fully correlated.

The common factor is the median ratio of the large modules: the largest that have 90 % of the time
together. Ratios of small modules vary too much.

The error of a ratio of two medians is the root of the sum of the squares of both relative errors.
It has two lower bounds. The first is the error of the typical module, as a few steps can agree by
chance. The second is the scatter of the modules' ratios around their median: 1.4826 x the median
absolute deviation, which is a standard deviation if they are normal. It contains the differences
between two runs of the same code that no step of either run shows. Large modules have the bounds of
the large ones, small modules those of the small ones. The error of the common factor, 1.2533 /
sqrt(modules) of such a bound, is added as a square. The interval is so wide that in one comparison
of a thousand, noise alone puts any of the judged times outside.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.records import TimingStats
from lflops.profile.series import sum_known

LEAST_CHANGE = 0.03
"""The least change of a time.

Two runs of the same code place their tensors differently in memory, which is worth some per cent.
"""
# the least change of a time as a share of the step
LEAST_SHARE = 0.005
# the share of the time that the large modules have together: their ratios make the common factor
LARGE = 0.9
LEAST_MODULES = (
    # with fewer modules, a slower module cannot be distinguished from a slower machine
    3
)
LEAST_IN_COMMON = (
    1 / 3
    # the least share of the modules' time in modules with the same work. A few shared layers say
    # nothing about a run.
)
# the widest interval that says anything: from half of the ratio to twice of it
WIDEST = 2.0
CHANCE = (
    # the probability that any interval misses, in a comparison of two runs of the same code
    0.001
)

LOST_COUNTS = 3.0
"""Threads wait for the one that lost its CPU.

So a step is longer by up to this power of what a lost share makes of the CPU time.
"""

Verdict = Literal["slower", "faster", "same"]
Doubt = Literal["busy", "few_steps", "varied"]
"""Why a time is not judged.

Other processes had the CPU, fewer than two steps were timed, or they vary too much.
"""
CHANGED: frozenset[Verdict | None] = frozenset(
    {"slower", "faster"}
    # the verdicts of a time that changed by more than noise
)


class CommonFactor(Struct, frozen=True, kw_only=True):
    """How much slower or faster the whole run is."""

    # the median of after / before, over large modules that did the same work
    ratio: float
    # how many these are
    modules: int
    # the relative error of the ratio
    error: float


class Timing(Struct, frozen=True, kw_only=True):
    """A time before and after, in seconds. `None` is unknown, or not judged."""

    # the median
    before: float | None
    # the median
    after: float | None
    # after / before
    ratio: float | None = None
    # the ratio of the seconds a MAC, where the MACs differ
    per_mac: float | None = None
    beyond: float | None = (
        # the ratio over that of the whole run. Of a step it is the ratio itself.
        None
    )
    # the lower end of the interval of `beyond`
    low: float | None = None
    # its upper end
    high: float | None = None
    # Seconds lost beyond the whole run; a gain is negative. Of other work it is known only where it
    # is more than noise.
    lost: float | None = None
    # `same` where the change is within the noise, too small to matter, or, of an inclusive time,
    # explained by modules below. `None` also where no one can tell. Then there is no interval.
    verdict: Verdict | None = None
    # why no one can tell
    doubt: Doubt | None = None


class Measured(NamedTuple):
    """A median in seconds and its error in seconds.

    `None` where fewer than two steps were timed.
    """

    seconds: float
    error: float | None


class Judge(NamedTuple):
    """What the times of two runs are judged by."""

    # the common factor that is taken out; `None` is nothing
    whole: CommonFactor | None
    # seconds before: a time of at least these is a large one
    large: float
    # the lower bound of the error of a large time's ratio
    least_error: float
    # the same of a small one
    least_error_of_small: float
    # half the width of an interval, in errors
    reach: float
    # seconds before of the step, which changes are shares of
    step: float
    lost: tuple[float, float] = (
        0.0,
        0.0,
        # the shares of the CPU's time that other processes took, before and after
    )

    def timing(
        self, before: Measured | None, after: Measured | None, explained: float = 0.0
    ) -> Timing:
        """Judge a time, if both sides and their errors are known.

        `explained` are the seconds of the change that modules below explain.
        """
        given = unjudged(before, after)
        error = _error_of_ratio(before, after)
        if not given.before or not given.after or not given.ratio or error is None:
            return replace(given, doubt="few_steps") if given.ratio else given
        whole, of_whole = (self.whole.ratio, self.whole.error) if self.whole else (1.0, 0.0)
        least_error = self.least_error if given.before >= self.large else self.least_error_of_small
        beyond, error = given.ratio / whole, math.hypot(max(error, least_error), of_whole)
        lost = given.after - given.before * whole
        left = (lost - explained) / (given.before * whole)
        is_changed = (
            abs(left) >= LEAST_CHANGE
            and abs(left) * given.before >= LEAST_SHARE * self.step
            and (left <= -1 or abs(math.log1p(left)) > self.reach * error)
        )
        if not is_changed and self.reach * error > math.log(WIDEST):
            return replace(given, beyond=beyond, doubt="varied")
        if is_changed and self.explains(1 + left):
            return replace(given, beyond=beyond, doubt="busy")
        return replace(
            given,
            beyond=beyond,
            low=beyond * math.exp(-self.reach * error),
            high=beyond * math.exp(self.reach * error),
            lost=lost,
            verdict="same" if not is_changed else "slower" if left > 0 else "faster",
        )

    def explains(self, ratio: float) -> bool:
        """Whether what other processes took of the CPU may be why a time has this ratio."""
        return (
            ratio <= slowed_by(self.lost[1]) if ratio > 1 else ratio * slowed_by(self.lost[0]) >= 1
        )

    def cost(self, before: Measured | None, after: Measured | None, macs: float | None) -> Timing:
        """Two times of different work, without a verdict; `macs` is the ratio of their MACs."""
        given = unjudged(before, after, macs)
        if before is None or after is None or before.error is None or after.error is None:
            return given
        whole, of_whole = (self.whole.ratio, self.whole.error) if self.whole else (1.0, 0.0)
        floor = self.least_error if before.seconds >= self.large else self.least_error_of_small
        expected = before.seconds * whole
        error = math.hypot(
            max(before.error * whole, floor * expected),
            max(after.error, floor * after.seconds),
            of_whole * expected,
        )
        lost = after.seconds - expected
        return replace(
            given,
            lost=lost if abs(lost) > max(self.reach * error, LEAST_SHARE * self.step) else None,
        )


def slowed_by(lost: float) -> float:
    """The most that a step is longer by, as a ratio, where other processes took this share of the CPU time."""
    return (1 - lost) ** -LOST_COUNTS if lost < 1 else math.inf


def measured(spread: TimingStats | None) -> Measured | None:
    """The median over several steps, with its error."""
    return None if spread is None else Measured(spread.median, spread.error)


def total(parts: Sequence[tuple[float | None, float | None]]) -> Measured | None:
    """The sum of several times, seconds and errors.

    `None` where one of them is unknown, or there is none.
    """
    if not parts:
        return None
    seconds, error = (sum_known(each) for each in zip(*parts, strict=True))
    return None if seconds is None else Measured(seconds, error)


def unjudged(before: Measured | None, after: Measured | None, macs: float | None = None) -> Timing:
    """Two times without a verdict; `macs` is the ratio of their MACs."""
    first, second = (None if each is None else each.seconds for each in (before, after))
    ratio = None if not first or second is None else second / first
    return Timing(
        before=first,
        after=second,
        ratio=ratio,
        per_mac=ratio / macs if ratio is not None and macs and macs != 1 else None,
    )


def judge_of(
    pairs: Iterable[tuple[Measured, Measured]],
    *,
    modules: float,
    step: float,
    times: int,
    lost: tuple[float, float] = (0.0, 0.0),
) -> Judge | None:
    """Compute the common factor and the errors.

    `None` where too few modules, or too little of the time, can be compared.

    `pairs` are each module's own time before and after, of those that did the same work; `modules`
    and `step` are seconds before, of all modules and of the step. So many `times` will be judged.
    """
    known = [
        _Ratio(before.seconds, math.log(after.seconds / before.seconds), error)
        for before, after in pairs
        if (error := _error_of_ratio(before, after)) is not None
    ]
    if (
        len(known) < LEAST_MODULES
        or sum(each.seconds for each in known) < LEAST_IN_COMMON * modules
    ):
        return None
    known.sort(reverse=True)
    sums = list(accumulate(each.seconds for each in known))
    number = max(sum(below < LARGE * sums[-1] for below in (0.0, *sums)), LEAST_MODULES)
    large, small = known[:number], known[number:]
    common, least_error = _typical(large)
    of_small = max(least_error, _typical(small)[1]) if small else least_error
    whole = CommonFactor(
        ratio=math.exp(common), modules=number, error=1.2533 * least_error / math.sqrt(number)
    )
    return Judge(whole, large[-1].seconds, least_error, of_small, _reach(times), step, lost)


def judge_of_steps(
    modules: Judge | None,
    step: Measured | None,
    *,
    times: int,
    lost: tuple[float, float] = (0.0, 0.0),
) -> Judge:
    """A judge of the step's and its phases' times, by the modules' common factor and errors."""
    seconds = step.seconds if step else 0.0
    judge = modules or Judge(None, 0.0, 0.0, 0.0, 0.0, 0.0)
    return judge._replace(reach=_reach(times), step=seconds, lost=lost)


class _Ratio(NamedTuple):
    """The ratio of a module's times: seconds before, its logarithm, its relative error."""

    seconds: float
    logarithm: float
    error: float


def _typical(ratios: Sequence[_Ratio]) -> tuple[float, float]:
    """The median of the logarithms, and the lower bound of their errors."""
    middle = statistics.median(each.logarithm for each in ratios)
    scatter = 1.4826 * statistics.median(abs(each.logarithm - middle) for each in ratios)
    return middle, max(scatter, statistics.median(each.error for each in ratios))


def _reach(times: int) -> float:
    """Half the width of an interval in errors, if so many times are judged together."""
    return statistics.NormalDist().inv_cdf(1 - CHANCE / (2 * max(times, 1)))


def _error_of_ratio(before: Measured | None, after: Measured | None) -> float | None:
    if (
        before is None
        or after is None
        or before.error is None
        or after.error is None
        or not (before.seconds and after.seconds)
    ):
        return None
    return math.hypot(before.error / before.seconds, after.error / after.seconds)

"""Decide whether a change in a time is more than noise.

A slower machine slows down all modules. This common factor is divided out before a module is
judged.

The error of a median comes from the quartiles. If the times of the steps are normally distributed,
the quartiles are 1.349 standard deviations apart. The error of the median of n steps is then 1.2533
/ sqrt(n) standard deviations, or 0.93 x (high - low) / sqrt(n). With few steps, the quartiles are
closer together, by a factor of about (n - 1) / n. So 0.93 x (high - low) x sqrt(n) / (n - 1) is
used here, and a single step has no error. The times of several phases are added up, and so are
their errors, as if they were fully correlated.

The common factor is the median ratio of the large modules, which are the largest modules that
together have 90 % of the time. Ratios of small modules vary too much.

The error of a ratio of two medians is the root of the sum of the squares of both relative errors.
It has two lower bounds. The first is the error of the typical module, because a few steps can agree
by chance. The second is the scatter of the modules' ratios around their median: 1.4826 x the median
absolute deviation, which is a standard deviation if the ratios are normally distributed. This
scatter includes differences between two runs of the same code, which the steps of a single run do
not show. Large and small modules have separate bounds. The error of the common factor is the bound
of the large modules times 1.2533 / sqrt(modules), and its square is added. The intervals are so
wide that noise alone puts a judged time outside its interval in only one of a thousand comparisons.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.profile.records import TimingStats
from lflops.profile.series import robust_deviation, sum_known

LEAST_CHANGE = 0.03
"""A time counts as changed only if it changes by at least this share of itself.

Two runs of the same code place their tensors differently in memory, and this changes times by a few
per cent.
"""

LEAST_SHARE = 0.005
"""A time counts as changed only if it changes by at least this share of the step."""

LARGE = 0.9
"""The large modules together have this share of the time.

The common factor is computed from their ratios.
"""

LEAST_MODULES = 3
"""Minimum number of modules to compare. With fewer, a slower module looks like a slower machine."""

LEAST_IN_COMMON = 1 / 3
"""Runs are judged if modules with the same work have at least this share of all modules' time.

A few shared layers are not enough to judge a run.
"""

WIDEST = 2.0
"""Widest useful interval: from half of the ratio to twice the ratio."""

CHANCE = 0.001
"""Probability that any interval of a comparison is wrong if both runs have the same code."""

LOST_COUNTS = 3.0
"""Exponent for the delay of a step by other processes.

Other threads wait for the thread that lost its CPU. If lost CPU time lengthens CPU work by a
factor, it may lengthen a step by up to this power of the factor.
"""

Verdict = Literal["slower", "faster", "same"]

CHANGED: frozenset[Verdict | None] = frozenset({"slower", "faster"})
"""Verdicts of a time that changed by more than noise."""

Caveat = Literal["busy", "few_steps", "varied"]
"""Reasons why a time is not judged.

Other processes had the CPU, fewer than two steps were timed, or the steps vary too much.
"""


class CommonFactor(Struct, frozen=True, kw_only=True):
    """Factor by which the whole run is slower or faster.

    Attributes:
        ratio: Median of after / before, over large modules that did the same work.
        modules: Number of these modules.
        error: Relative error of the ratio.
    """

    ratio: float
    modules: int
    error: float


class Timing(Struct, frozen=True, kw_only=True):
    """A time in two runs, in seconds. `None` means unknown, or not judged.

    Attributes:
        before: Median in the first run.
        after: Median in the second run.
        ratio: after / before.
        per_mac: Ratio of the seconds per MAC, if the MACs differ.
        beyond: The ratio divided by the common factor. For a step it is the ratio itself.
        low: Lower end of the interval of `beyond`.
        high: Upper end of the interval of `beyond`.
        lost: Seconds lost beyond the common factor; a gain is negative. For different work, `None`
            unless it is more than noise.
        verdict: `same` if the change is within the noise, too small to matter, or, for an inclusive
            time, explained by submodules. `None`, without an interval, if there is no verdict.
        caveat: Reason why there is no verdict.
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
    caveat: Caveat | None = None


class Measured(NamedTuple):
    """A median and its error in seconds; the error of a single step is `None`."""

    seconds: float
    error: float | None


class Judge(NamedTuple):
    """Compares times of two runs, with the common factor and the errors of these runs.

    Attributes:
        whole: The common factor to divide out; `None` if there is no common factor.
        large: A module is large if it takes at least this many seconds in the first run.
        least_error: Lower bound of the error of a large time's ratio.
        least_error_of_small: Lower bound of the error of a small time's ratio.
        reach: Half the width of an interval, as a multiple of the error.
        step: Seconds of the step in the first run, which changes are compared with.
        lost: Shares of the CPU time that other processes took, in the first and the second run.
    """

    whole: CommonFactor | None
    large: float
    least_error: float
    least_error_of_small: float
    reach: float
    step: float
    lost: tuple[float, float] = (0.0, 0.0)

    def timing(
        self, before: Measured | None, after: Measured | None, explained: float = 0.0
    ) -> Timing:
        """Compare two times, with a verdict if both times and their errors are known.

        `explained` is the part of the change in seconds that submodules explain.
        """
        given = unjudged(before, after)
        error = _error_of_ratio(before, after)
        if not given.before or not given.after or not given.ratio:
            return given
        if error is None:
            return replace(given, caveat="few_steps")
        whole, error_of_whole = self._common_factor()
        expected = given.before * whole
        beyond = given.ratio / whole
        error = math.hypot(max(error, self._least_error(given.before)), error_of_whole)
        lost = given.after - expected
        unexplained = (lost - explained) / expected
        if not self._is_changed(unexplained, given.before, error):
            if self.reach * error > math.log(WIDEST):
                return replace(given, beyond=beyond, caveat="varied")
            verdict: Verdict = "same"
        elif self.explains(1 + unexplained):
            return replace(given, beyond=beyond, caveat="busy")
        elif unexplained > 0:
            verdict = "slower"
        else:
            verdict = "faster"
        return replace(
            given,
            beyond=beyond,
            low=beyond * math.exp(-self.reach * error),
            high=beyond * math.exp(self.reach * error),
            lost=lost,
            verdict=verdict,
        )

    def explains(self, ratio: float) -> bool:
        """Return whether CPU time lost to other processes may explain the ratio of two times."""
        before, after = self.lost
        if ratio > 1:
            return ratio <= slowed_by(after)
        return ratio * slowed_by(before) >= 1

    def cost(self, before: Measured | None, after: Measured | None, macs: float | None) -> Timing:
        """Compare two times of different work, without a verdict.

        `macs` is the ratio of their MACs.
        """
        given = unjudged(before, after, macs)
        if before is None or after is None or before.error is None or after.error is None:
            return given
        whole, error_of_whole = self._common_factor()
        least_error = self._least_error(before.seconds)
        expected = before.seconds * whole
        error = math.hypot(
            max(before.error * whole, least_error * expected),
            max(after.error, least_error * after.seconds),
            error_of_whole * expected,
        )
        lost = after.seconds - expected
        if abs(lost) <= max(self.reach * error, LEAST_SHARE * self.step):
            return given
        return replace(given, lost=lost)

    def _common_factor(self) -> tuple[float, float]:
        """The ratio and the error of the common factor; 1 and 0 without a common factor."""
        if self.whole is None:
            return 1.0, 0.0
        return self.whole.ratio, self.whole.error

    def _least_error(self, seconds: float) -> float:
        if seconds >= self.large:
            return self.least_error
        return self.least_error_of_small

    def _is_changed(self, change: float, seconds: float, error: float) -> bool:
        """Return whether a relative change is large enough to matter, and beyond the noise."""
        if abs(change) < LEAST_CHANGE or abs(change) * seconds < LEAST_SHARE * self.step:
            return False
        return change <= -1 or abs(math.log1p(change)) > self.reach * error


def slowed_by(lost: float) -> float:
    """Largest factor by which a step may become longer if other processes take the share `lost`."""
    if lost >= 1:
        return math.inf
    return math.pow(1 - lost, -LOST_COUNTS)


def measured(spread: TimingStats | None) -> Measured | None:
    """The median over several steps, with its error."""
    if spread is None:
        return None
    return Measured(spread.median, spread.error)


def total(parts: Sequence[tuple[float | None, float | None]]) -> Measured | None:
    """Sum several times, as pairs of seconds and error.

    Returns `None` if a time is unknown, or if there are no times.
    """
    if not parts:
        return None
    seconds = sum_known(seconds for seconds, _ in parts)
    if seconds is None:
        return None
    return Measured(seconds, sum_known(error for _, error in parts))


def unjudged(before: Measured | None, after: Measured | None, macs: float | None = None) -> Timing:
    """Return two times without a verdict.

    `macs` is the ratio of their MACs.
    """
    ratio = None
    per_mac = None
    if before is not None and after is not None and before.seconds:
        ratio = after.seconds / before.seconds
        if macs and macs != 1:
            per_mac = ratio / macs
    return Timing(before=_seconds(before), after=_seconds(after), ratio=ratio, per_mac=per_mac)


def _seconds(measured: Measured | None) -> float | None:
    if measured is None:
        return None
    return measured.seconds


def judge_of(
    pairs: Iterable[tuple[Measured, Measured]],
    *,
    modules: float,
    step: float,
    times: int,
    lost: tuple[float, float] = (0.0, 0.0),
) -> Judge | None:
    """Compute the common factor and the errors of two runs.

    Args:
        pairs: Self times in the first and the second run, for each module that did the same work in
            both runs.
        modules: Seconds of all modules in the first run.
        step: Seconds of the step in the first run.
        times: How many values will be judged.
        lost: Shares of the CPU time that other processes took, in the first and the second run.

    Returns:
        The `Judge`, or `None` if the modules that can be compared are too few, or have too little
        of the time.
    """
    known = []
    for before, after in pairs:
        error = _error_of_ratio(before, after)
        if error is not None:
            known.append(_Ratio(before.seconds, math.log(after.seconds / before.seconds), error))
    seconds = sum(ratio.seconds for ratio in known)
    if len(known) < LEAST_MODULES or seconds < LEAST_IN_COMMON * modules:
        return None
    known.sort(reverse=True)
    number = _number_of_large(known)
    common, least_error = _typical(known[:number])
    least_error_of_small = least_error
    if number < len(known):
        least_error_of_small = max(least_error, _typical(known[number:])[1])
    whole = CommonFactor(
        ratio=math.exp(common), modules=number, error=1.2533 * least_error / math.sqrt(number)
    )
    large = known[number - 1].seconds
    return Judge(whole, large, least_error, least_error_of_small, _reach(times), step, lost)


def judge_of_steps(
    modules: Judge | None,
    step: Measured | None,
    *,
    times: int,
    lost: tuple[float, float] = (0.0, 0.0),
) -> Judge:
    """Make a `Judge` for the times of the step and its phases.

    It uses the common factor and the errors of the `Judge` for modules.
    """
    judge = modules or Judge(None, 0.0, 0.0, 0.0, 0.0, 0.0)
    return judge._replace(reach=_reach(times), step=step.seconds if step else 0.0, lost=lost)


class _Ratio(NamedTuple):
    """The ratio of a module's times: seconds before, logarithm of the ratio, relative error."""

    seconds: float
    logarithm: float
    error: float


def _number_of_large(longest_first: Sequence[_Ratio]) -> int:
    """Number of the largest modules that have `LARGE` of the time, but at least `LEAST_MODULES`."""
    all_seconds = sum(ratio.seconds for ratio in longest_first)
    seconds = 0.0
    number = 0
    for ratio in longest_first:
        if seconds >= LARGE * all_seconds:
            break
        seconds += ratio.seconds
        number += 1
    return max(number, LEAST_MODULES)


def _typical(ratios: Sequence[_Ratio]) -> tuple[float, float]:
    """The median of the logarithms, and the lower bound of their errors."""
    logarithms = [ratio.logarithm for ratio in ratios]
    error = statistics.median(ratio.error for ratio in ratios)
    return statistics.median(logarithms), max(robust_deviation(logarithms), error)


def _reach(times: int) -> float:
    """Half the width of an interval, as a multiple of the error, if `times` values are judged."""
    return statistics.NormalDist().inv_cdf(1 - CHANCE / (2 * max(times, 1)))


def _error_of_ratio(before: Measured | None, after: Measured | None) -> float | None:
    if before is None or not before.seconds or before.error is None:
        return None
    if after is None or not after.seconds or after.error is None:
        return None
    return math.hypot(before.error / before.seconds, after.error / after.seconds)

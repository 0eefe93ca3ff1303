"""Decide whether a change in a time is more than noise.

A slower machine slows down all modules by about the same factor, which is called the common factor.
The times of modules are divided by this factor before they are judged. The ratio of a module is its
time in the second run divided by its time in the first run.

Errors of times: The error of a median is computed from the quartiles. If the times of the steps are
normally distributed, the quartiles are 1.349 standard deviations apart. The error of the median of
n steps is then 1.2533 / sqrt(n) standard deviations, or 0.93 x (high - low) / sqrt(n). With few
steps, the quartiles are closer together, by a factor of about (n - 1) / n. So 0.93 x (high - low) x
sqrt(n) / (n - 1) is used here, and a single step has no error. If the times of several phases are
added up, their errors are added up too, as if they were fully correlated.

Common factor: This is the median ratio of the large modules, which are the modules that take
longest and together have 90 % of the time. The ratios of small modules vary too much.

Errors of ratios: The error of a ratio of two medians is the root of the sum of the squares of both
relative errors. This error has two lower bounds. The first is the median error over the modules,
because a few steps of one module can agree by chance. The second is the scatter of the modules'
ratios around their median: 1.4826 x the median absolute deviation, which is a standard deviation if
the ratios are normally distributed. The scatter includes differences between two runs of the same
code, which do not show in the steps of a single run. Large and small modules have separate bounds.
The error of the common factor is the bound of the large modules times 1.2533 / sqrt(modules). The
square of this error is added to the square of the error of each ratio.

Intervals: The confidence intervals are so wide that noise alone causes a wrong verdict in only one
of a thousand comparisons.
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
"""Smallest share by which a time must become longer or shorter to count as changed.

Two runs of the same code place their tensors differently in memory, and this changes times by a few
per cent.
"""

LEAST_SHARE = 0.005
"""Smallest change of a time that counts as changed, as a share of the step."""

LARGE = 0.9
"""Share of the time of all modules that the large modules together take.

The large modules are the modules that take longest. The common factor, by which the whole machine
became slower or faster, is computed from them.
"""

LEAST_MODULES = 3
"""Minimum number of modules from which the speed of the whole machine can be compared.

With fewer modules, a slower module cannot be distinguished from a slower machine.
"""

LEAST_IN_COMMON = 1 / 3
"""Module times are judged only if comparable modules take this share of the time of all modules.

A module is comparable if it does the same work in both runs. From these modules, lflops computes
the common factor, by which the whole machine became slower or faster. A small part of the model is
not enough for this.
"""

WIDEST = 2.0
"""Maximum factor between a measured ratio and each end of its confidence interval.

The interval can extend from half of the ratio to twice the ratio. If it is wider, and the time did
not clearly change, the time gets the caveat `varied` instead of the verdict `same`.
"""

CHANCE = 0.001
"""Probability that a comparison of two runs of the same code has a wrong verdict."""

LOST_COUNTS = 3.0
"""Exponent in the estimate of how much longer a step takes if other processes use the CPU.

If other processes take half of the CPU time, a thread takes 2 times as long. But other threads
might wait for this thread, so the step can take up to 2 ** 3 = 8 times as long.
"""

Verdict = Literal["slower", "faster", "same"]

CHANGED: frozenset[Verdict | None] = frozenset({"slower", "faster"})
"""The verdicts on times that changed by more than noise."""

Caveat = Literal["busy", "few_steps", "varied"]
"""Reasons why a time is not judged.

* `busy`: other processes used the CPU.
* `few_steps`: fewer than two steps were timed.
* `varied`: the steps vary too much.
"""


class CommonFactor(Struct, frozen=True, kw_only=True):
    """The factor by which all modules are slower or faster, for example on a slower machine.

    Attributes:
        ratio: The factor. It is the median of after / before over the large modules that did the
            same work. The large modules are the modules that take longest.
        modules: Number of these large modules.
        error: Relative error of the ratio.
    """

    ratio: float
    modules: int
    error: float


class Timing(Struct, frozen=True, kw_only=True):
    """A time in two runs, in seconds, and the verdict on its change.

    A value is `None` if it is unknown, or if the time was not judged.

    Attributes:
        before: Median in the first run.
        after: Median in the second run.
        ratio: after / before.
        per_mac: Ratio of the seconds per MAC, if the number of MACs changed.
        beyond: The ratio divided by the common factor, by which all modules became slower or
            faster. For a step, the ratio itself.
        low: Lower end of the confidence interval of `beyond`.
        high: Upper end of the confidence interval of `beyond`.
        lost: Seconds by which the time became longer, apart from the common factor. Negative if it
            became shorter. If the module does different work, it is `None` unless the change is
            more than noise.
        verdict: `slower`, `faster` or `same`. It is `same` if the change is within the noise or too
            small to matter. An inclusive time is also `same` if submodules explain the change.
            `None` if there is no verdict. Then there is no confidence interval either.
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
    """A median in seconds, and its standard error. The error of a single step is `None`."""

    seconds: float
    error: float | None


class Judge(NamedTuple):
    """Compares the times of two runs and decides whether a change is more than noise.

    Attributes:
        whole: The common factor, by which all modules became slower or faster. Times are divided by
            it. `None` if there is no common factor.
        large: Seconds that a module must take in the first run to count as large.
        least_error: Lower bound on the error of the ratio of a large module's times.
        least_error_of_small: Lower bound on the error of the ratio of a small module's times.
        reach: Half the width of a confidence interval, as a multiple of the error.
        step: Duration of the step in the first run, in seconds. Changes that are much shorter than
            the step do not matter.
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
        """Compare two times of the same work. The result has a verdict if their errors are known.

        Args:
            before: The time in the first run.
            after: The time in the second run.
            explained: Seconds of the change that changes of submodules already explain.
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
        """Return whether other processes alone might have changed a time by this ratio.

        Other processes take CPU time away, and can take a different share of it in each run.
        """
        before, after = self.lost
        if ratio > 1:
            return ratio <= slowed_by(after)
        return ratio * slowed_by(before) >= 1

    def cost(self, before: Measured | None, after: Measured | None, macs: float | None) -> Timing:
        """Compare the times of a module that does different work in the two runs.

        The result has no verdict. Its field `lost` is set only if the change is more than noise.
        `macs` is the ratio of the module's MACs in the second and the first run.
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
        """Return the common factor and its error. Without a common factor, they are 1 and 0."""
        if self.whole is None:
            return 1.0, 0.0
        return self.whole.ratio, self.whole.error

    def _least_error(self, seconds: float) -> float:
        if seconds >= self.large:
            return self.least_error
        return self.least_error_of_small

    def _is_changed(self, change: float, seconds: float, error: float) -> bool:
        """Return whether a relative change is large enough to matter, and more than noise.

        Args:
            change: The change, relative to the expected time.
            seconds: The time in the first run.
            error: The relative error of the change.
        """
        if abs(change) < LEAST_CHANGE or abs(change) * seconds < LEAST_SHARE * self.step:
            return False
        return change <= -1 or abs(math.log1p(change)) > self.reach * error


def slowed_by(lost: float) -> float:
    """Return the largest factor by which a step can become longer because of other processes.

    `lost` is the share of the CPU time that other processes take.
    """
    if lost >= 1:
        return math.inf
    return math.pow(1 - lost, -LOST_COUNTS)


def measured(spread: TimingStats | None) -> Measured | None:
    """Return the median over several steps with its error, or `None` if there is no median."""
    if spread is None:
        return None
    return Measured(spread.median, spread.error)


def total(parts: Sequence[tuple[float | None, float | None]]) -> Measured | None:
    """Add up several times. Each time is a pair of seconds and their error.

    Return `None` if a time is unknown, or if there are no times.
    """
    if not parts:
        return None
    all_seconds, errors = zip(*parts, strict=True)
    seconds = sum_known(all_seconds)
    if seconds is None:
        return None
    return Measured(seconds, sum_known(errors))


def unjudged(before: Measured | None, after: Measured | None, macs: float | None = None) -> Timing:
    """Return two times and their ratio without a verdict.

    `macs` is the ratio of the MACs in the second and the first run, or `None` if it is unknown.
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
    """Make a `Judge` for the module times of two runs.

    The `Judge` has the common factor, by which all modules became slower or faster, and the lower
    bounds on the errors of ratios.

    Args:
        pairs: Self times in the first and the second run, for each module that did the same work in
            both runs.
        modules: Seconds of all modules in the first run.
        step: Seconds of the step in the first run.
        times: Number of measured times that will be judged. The higher this number, the wider each
            confidence interval must be.
        lost: Shares of the CPU time that other processes took, in the first and the second run.

    Returns:
        The `Judge`, or `None` if too few modules can be compared, or if they have too small a share
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

    Args:
        modules: The `Judge` for module times. The factor by which all modules changed, and the
            errors of measurement, are taken from it. If it is `None`, there is no such factor.
        step: The time of the step in the first run.
        times: Number of measured times that will be judged.
        lost: Shares of the CPU time that other processes took, in the first and the second run.
    """
    judge = modules or Judge(None, 0.0, 0.0, 0.0, 0.0, 0.0)
    return judge._replace(reach=_reach(times), step=step.seconds if step else 0.0, lost=lost)


class _Ratio(NamedTuple):
    """The ratio of a module's times in two runs.

    Attributes:
        seconds: The time in the first run.
        logarithm: Logarithm of the ratio.
        error: Relative error of the ratio.
    """

    seconds: float
    logarithm: float
    error: float


def _number_of_large(longest_first: Sequence[_Ratio]) -> int:
    """Return the number of large modules, which together take the share `LARGE` of the time.

    The number is at least `LEAST_MODULES`.
    """
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
    """Return the logarithm of the median ratio, and the lower bound on the error of a ratio."""
    logarithms = [ratio.logarithm for ratio in ratios]
    error = statistics.median(ratio.error for ratio in ratios)
    return statistics.median(logarithms), max(robust_deviation(logarithms), error)


def _reach(times: int) -> float:
    """Return half the width of a confidence interval, as a multiple of the error.

    `times` is the number of measured times that will be judged.
    """
    return statistics.NormalDist().inv_cdf(1 - CHANCE / (2 * max(times, 1)))


def _error_of_ratio(before: Measured | None, after: Measured | None) -> float | None:
    if before is None or not before.seconds or before.error is None:
        return None
    if after is None or not after.seconds or after.error is None:
        return None
    return math.hypot(before.error / before.seconds, after.error / after.seconds)

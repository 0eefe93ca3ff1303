"""Define a finding, which is one reason for the time of a step or a run, and sort findings."""

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Literal

from msgspec import Struct

from lflops.profile.module_names import plain


class Finding(Struct, frozen=True, kw_only=True):
    """One reason why a step or a run takes as long as it does, in words.

    Attributes:
        cause: Name of the rule that found the reason.
        sentence: A sentence that names the reason and its cost.
        title: A few words for the reason and its place. Empty if they are the usual words for the
            cause, followed by the module or the place.
        module: Name of the module in which the time is spent, or the pattern of several modules,
            such as `layers.*.mlp`. Empty for the root, or if the time is in no particular module.
        place: The code in which most of the time is spent: the hook of a callback, or a function of
            the user with its line, such as `collate (train.py:28)`. Empty if it is unknown.
        rank: The slow rank, or `None` if the finding is not about one rank.
        phase: The phase in which this rank is slow. Empty without a slow rank.
        seconds: The cost in seconds per step, or `None` if unknown.
        share: The cost as a share of the step. If `of` is "run", a share of the time from the end
            of start-up to the end of training.
        of: "step" if the finding is about a typical step. "run" if it is about the whole run,
            including the time between steps.
        fix: Advice on how to reduce the cost. Empty if there is no general advice.
        is_issue: Whether users should fix this. If not, the finding only shows where the time goes,
            and any training run spends time there.
        is_overhead: Whether the model computes nothing in the time that the finding is about. Such
            a finding comes before issues that cost less, even if it is not an issue.
        is_lower_bound: Whether the true cost may be higher than `seconds`.
        operators: Seconds per step of each operator that the sentence lists with its time, keyed by
            operator.
        right: How reliable the rule was in CPU training runs with known issues: a pair
            `(right, total)`. The rule's finding was reported first in `total` runs, and in `right`
            of these runs it named the known issue. `None` if not measured.
    """

    cause: str
    sentence: str
    title: str = ""
    module: str = ""
    place: str = ""
    rank: int | None = None
    phase: str = ""
    seconds: float | None = None
    share: float | None = None
    of: Literal["step", "run"] = "step"
    fix: str = ""
    is_issue: bool = False
    is_overhead: bool = False
    is_lower_bound: bool = False
    operators: Mapping[str, float] = {}
    right: tuple[int, int] | None = None

    @property
    def track_record(self) -> str:
        """A sentence about how reliable the finding is, from the function `track_record`.

        It is empty if this was not measured.
        """
        return "" if self.right is None else track_record(*self.right)


def mostly_in(place: str) -> str:
    """Return the end of a sentence that names a place, such as `, mostly in collate (train.py:8)`.

    Returns the empty string if there is no place.
    """
    return f", mostly in {plain(place)}" if place else ""


def track_record(right: int, total: int) -> str:
    """Describe how reliable a finding is.

    For example: "at least 80 % of such findings are right, measured in 20 training
    runs in which an issue was planted".

    Args:
        right: Number of runs in which the finding came first and was right.
        total: Number of runs in which the finding came first.
    """
    percent = int(100 * least_share(right, total))
    runs = f"{total} training runs in which an issue was planted"
    return f"at least {percent} % of such findings are right, measured in {runs}"


def least_share(right: int, total: int) -> float:
    """Return the lower end of the 90 % confidence interval of the share `right` / `total`.

    If the true share were equal to the result, then at least `right` of `total` findings would be
    right with a probability of only 5 %.
    """
    low = 0.0
    high = right / total
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        chance = 0.0
        for count in range(right, total + 1):
            chance += comb(total, count) * share**count * (1 - share) ** (total - count)
        if chance < ERROR_OF_ONE_END:
            low = share
        else:
            high = share
    return low


ERROR_OF_ONE_END = 0.05
"""Maximum probability that the result of `least_share` is above the true share.

The upper end of the interval is wrong with the same probability, so the interval is a 90 %
confidence interval.
"""

BISECTIONS = 30
"""Number of times that `least_share` halves the range in which it searches."""


def leading(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings at the top of a report, the highest cost first.

    The list contains all issues (findings that users should fix). It also contains the findings
    about overhead (time in which the model computes nothing) that cost more than the most expensive
    issue. Issues with unknown cost come first. If there is no issue, the list is empty.
    """
    found = list(findings)
    issues = [finding for finding in found if finding.is_issue]
    if not issues:
        return []
    costliest = max(finding.seconds or 0.0 for finding in issues)
    leads = []
    for finding in found:
        is_costly_overhead = finding.is_overhead and (finding.seconds or 0.0) > costliest
        if finding.is_issue or is_costly_overhead:
            leads.append(finding)
    return sorted(leads, key=_by_cost)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings in the order of a report.

    First come the findings that `leading` returns, then the other findings. Both groups are sorted
    by cost, the highest cost first. A peak that is too low costs no time, and comes last.
    """
    found = list(findings)
    leads = leading(found)
    others = [finding for finding in found if finding not in leads]
    return leads + sorted(others, key=lambda finding: (finding.cause == "peak", *_by_cost(finding)))


def first_issue(findings: Sequence[Finding]) -> Finding | None:
    """Return the first finding that is an issue, or `None`."""
    for finding in findings:
        if finding.is_issue:
            return finding
    return None


def _by_cost(finding: Finding) -> tuple[bool, float]:
    return finding.seconds is not None, -(finding.seconds or 0.0)

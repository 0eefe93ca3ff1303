"""Describe one reason why a step or a run takes longer, with its cost and a fix."""

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True, kw_only=True):
    """One reason why a step or a run takes longer, in words.

    Attributes:
        cause: The name of the rule that found it.
        sentence: A sentence that names the reason and its cost.
        module: Name of the module with this cost. Empty if the cost is in no particular module.
        place: The code with this cost, if it is known but is no module, such as the hook of a
            callback.
        rank: The slow rank, if the rule is about a rank.
        phase: The phase in which this rank is slow.
        seconds: The cost in seconds per step, or `None` if unknown.
        share: The cost as a share of the step. If `of` is "run", a share of the time from the end
            of start-up to the end of training.
        of: "step" for a typical step of the profiled window, "run" for the whole run, including the
            time between steps.
        fix: Advice on how to reduce the cost. Empty if there is no general advice.
        is_issue: Whether this is an issue to fix. If not, the finding only shows where the time
            goes, and any training run spends time there.
        is_overhead: Whether the model computes nothing in the time that the finding is about. Such
            a finding comes before issues that cost less, even if it is not an issue.
        operators: Seconds per step of the operators that the sentence lists with their time.
        right: How reliable the rule was in CPU training runs with known issues: a pair
            `(right, total)`. This finding was reported first in `total` runs, and in `right` of
            these runs it named the known issue. `None` if not measured.
    """

    cause: str
    sentence: str
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
    operators: Mapping[str, float] = {}
    right: tuple[int, int] | None = None

    @property
    def track_record(self) -> str:
        """How reliable the finding is, in words; empty if this was not measured.

        `track_record` describes the words.
        """
        return "" if self.right is None else track_record(*self.right)


def track_record(right: int, total: int) -> str:
    """Describe how reliable a finding is.

    For example: "at least 80 % of such findings are right, as tested in 20 runs with planted
    issues".

    Args:
        right: Number of runs in which the finding came first and was right.
        total: Number of runs in which it came first.
    """
    percent = int(100 * least_share(right, total))
    runs = f"{total} runs with planted issues"
    return f"at least {percent} % of such findings are right, as tested in {runs}"


def least_share(right: int, total: int) -> float:
    """Return the lower end of the 90 % confidence interval of the share `right` / `total`.

    If the true share were this value, only one in twenty samples of `total` findings would have
    `right` or more findings that are right.
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
"""Maximum probability that the lower end of `least_share`'s interval is above the true share.

The upper end would be wrong with the same probability, so the interval is a 90 % confidence
interval.
"""

BISECTIONS = 30
"""Number of times that `least_share` halves the range in which it searches."""


LAST = {"busiest", "peak"}
"""Names of the rules whose findings come last, however much they cost."""


def leading(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings at the top of a report, sorted by cost.

    The list contains all issues. It also contains the findings about overhead (time in which the
    model computes nothing) that cost more than the most expensive issue. Issues with unknown cost
    come first. If there is no issue, the list is empty.
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
    """Return the findings of `leading`, then all other findings, with both groups sorted by cost.

    The findings of the rules in `LAST` come after all others.
    """
    found = list(findings)
    leads = leading(found)
    others = [finding for finding in found if finding not in leads]
    return leads + sorted(others, key=_last_by_cost)


def first_issue(findings: Sequence[Finding]) -> Finding | None:
    """Return the first finding that is an issue, or `None`."""
    for finding in findings:
        if finding.is_issue:
            return finding
    return None


def _by_cost(finding: Finding) -> tuple[bool, float]:
    return finding.seconds is not None, -(finding.seconds or 0.0)


def _last_by_cost(finding: Finding) -> tuple[bool, bool, float]:
    return finding.cause in LAST, *_by_cost(finding)

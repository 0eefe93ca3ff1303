"""Define the evidence about a run, and the base classes of the rules about a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from msgspec.structs import replace

from lflops import units
from lflops.analysis.step_times import lost_share
from lflops.findings.evidence import allowance
from lflops.findings.finding import Finding
from lflops.findings.rule import Rule
from lflops.ledger.account import Ledger, SlowStep
from lflops.profile.profile import Profile
from lflops.profile.series import summed

NOT_TRAINING = {"start_up", "warm_up", "lflops", "after_run", "down"}
"""Ledger categories for the time before and after training, and for the work of lflops itself."""

LARGE_SHARE = 0.1
"""The cost of an `UncertainRule` is reported if it takes at least this share of training time."""

REPEATED_COMPILATION_SHARE = 0.05
"""Compilation is repeated if it takes at least this share of the second half of a run's steps."""

MANY_RECOMPILED_STEPS = 3
"""Compilation is repeated if torch compiled code again in at least this many steps of a window."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunEvidence:
    """The known facts about a run.

    Attributes:
        ledger: The time account of the run: its seconds by category.
        profile: The profile of the last window, or `None` without a window.
        step_issues: Names of the rules that found issues in the last window. The rules about the
            run do not report the same time again.
        confirmed_by_window: Names of further rules that found issues in the last window. The cost
            in the run replaces their cost in the window.
    """

    ledger: Ledger
    profile: Profile | None
    step_issues: frozenset[str]
    confirmed_by_window: frozenset[str] = frozenset()

    @cached_property
    def training_seconds(self) -> float:
        """The result of `training_seconds` for this run."""
        return training_seconds(self.ledger)

    @cached_property
    def seconds_by_rule(self) -> dict[str, float]:
        """Seconds of the run, keyed by the name of the rule that reports them."""
        return _by_rule(self.ledger.seconds, self.ledger)

    @cached_property
    def allowance(self) -> float:
        """Factor by which thresholds rise on a busy machine."""
        lost = 0.0
        if self.profile is not None:
            lost = lost_share(self.profile)
        return allowance(max(preempted_share(self.ledger), lost))

    @cached_property
    def recompiles(self) -> bool:
        """Return whether torch compiles code again and again, even after the first steps."""
        if self.profile is not None and _recompiled_steps(self.profile) >= MANY_RECOMPILED_STEPS:
            return True
        spans = [span for span in self.ledger.spans if span.steps > self.ledger.steps / 2]
        # The first of these spans is left out: in a short run, every compiled model is compiled in
        # this span.
        late = spans[1:]
        compiling = sum(span.spent.get("compilation", 0.0) for span in late)
        seconds = sum(span.seconds for span in late)
        return compiling >= REPEATED_COMPILATION_SHARE * seconds > 0


def _by_rule(seconds: Mapping[str, float], ledger: Ledger) -> dict[str, float]:
    """Add up the seconds of the categories that the same rule reports, by the name of the rule.

    `seconds` has the seconds of each category of the ledger.
    """
    return summed((rule_of(category, ledger), took) for category, took in seconds.items())


def _recompiled_steps(profile: Profile) -> int:
    """Return the number of steps after warm-up in which torch compiled code again."""
    number = 0
    for step in profile.steps:
        if "recompiled" in step.marks and "warmup" not in step.marks:
            number += 1
    return number


def training_seconds(ledger: Ledger) -> float:
    """Return the seconds from the end of start-up to the end of training.

    The time in which lflops itself works is left out.
    """
    training = []
    for group, seconds in ledger.by_group().items():
        if group not in NOT_TRAINING:
            training.append(seconds)
    return sum(training)


def preempted_share(ledger: Ledger) -> float:
    """Return the share of the training time that slow steps waited for a core.

    The longest wait is left out, because the process may have been stopped during this wait.
    """
    waits = [step.cost for step in _slow_steps("not_scheduled", ledger)]
    seconds = ledger.seconds.get("slow/not_scheduled", 0.0) - max(waits, default=0.0)
    return max(seconds, 0.0) / (training_seconds(ledger) or 1.0)


def _slow_steps(cause: str, ledger: Ledger) -> list[SlowStep]:
    """Return the slow steps with a cause."""
    return [step for step in ledger.slow_steps if step.cause == cause]


def rule_of(category: str, ledger: Ledger) -> str:
    """Return the name of the rule that reports a category of the ledger: "gc" for "slow/gc".

    Returns the empty string for a category that no rule reports: training itself, the time before
    and after training, and the work of lflops.
    """
    group, _, part = category.partition("/")
    if group == "slow":
        return _rule_of_slow_steps(part, ledger)
    if category == "training/data":
        return "data"
    if group in NOT_TRAINING or group == "training":
        return ""
    return group.removesuffix("_save")


def _rule_of_slow_steps(cause: str, ledger: Ledger) -> str:
    """Return the name of the rule that reports the slow steps with a cause.

    If the cause is unknown and these steps lost most of their time outside all phases, this is the
    rule `other`.
    """
    if cause == "loader":
        return "data"
    if cause != "unknown":
        return cause
    by_phase = summed((step.phase, step.cost) for step in _slow_steps(cause, ledger))
    if by_phase and max(by_phase, key=by_phase.__getitem__) == "other":
        return "other"
    return cause


class RunRule(Rule):
    """A reason why a run takes longer, found in the ledger of the run.

    Attributes:
        verb: The verb of the finding's sentence, such as "is spent on". The sentence is the cost,
            the verb and the phrase: "12 % of the run (without start-up) is spent on validation".
        phrase: Noun phrase for the work that takes the time, such as "validation".
        same_as: Names of the rules about the step that report the same time. If one of these rules
            found an issue in the last window, this rule reports nothing. An empty set stands for
            the rule about the step that has the same name as this rule.
    """

    is_overhead: ClassVar[bool] = True
    verb: ClassVar[str] = "is"
    phrase: ClassVar[str] = ""
    same_as: ClassVar[frozenset[str]] = frozenset()

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield a finding if the cost is high enough and no rule in `same_as` reports it."""
        seconds = run.seconds_by_rule.get(self.name, 0.0)
        least = self.least_seconds(run)
        if self.name not in run.seconds_by_rule or seconds < least:
            return
        if run.step_issues.isdisjoint(self.same_as or {self.name}):
            yield self.finding(seconds, run, is_issue=self.is_issue(seconds, run))

    def is_issue(self, seconds: float, run: RunEvidence) -> bool:
        """Return whether a cost in seconds of the run is an issue."""
        if self.threshold.share is None:
            return False
        judged_seconds = seconds - self.excused_seconds(run)
        if self.name in run.confirmed_by_window:
            # The window was judged without the delay caused by other programs.
            return judged_seconds >= self.least_seconds(run)
        least = self.least_seconds(run) * self.allowance(run)
        return judged_seconds >= least and self.is_confirmed(run)

    def least_seconds(self, run: RunEvidence) -> float:
        """Return the minimum cost of a reported finding, in seconds of the run."""
        share = self.threshold.share
        if share is None:
            share = self.threshold.reported
        return share * run.training_seconds

    def excused_seconds(self, run: RunEvidence) -> float:
        """Return the part of the cost, in seconds, that is acceptable in any run.

        Only the rest of the cost can make the finding an issue.
        """
        return 0.0

    def allowance(self, run: RunEvidence) -> float:
        """Return the factor by which the threshold rises on a busy machine."""
        return run.allowance

    def may_be_due_to_others(self, run: RunEvidence) -> bool:
        """Return whether other programs on the machine may be the reason for the cost."""
        return False

    def is_confirmed(self, run: RunEvidence) -> bool:
        """Return whether further evidence confirms that this cost is an issue."""
        return run.allowance <= 1 or not self.may_be_due_to_others(run)

    def fix_for(self, run: RunEvidence) -> str:
        """Return the advice on how to reduce the cost.

        Rules override this method if the advice depends on the run.
        """
        return self.fix

    def finding(self, seconds: float, run: RunEvidence, *, is_issue: bool) -> Finding:
        """Make a finding from a cost in seconds of the whole run."""
        share = seconds / run.training_seconds
        per_step = seconds / max(run.ledger.steps, 1)
        cost = f"{units.percent(share)} of the run (without start-up)"
        return Finding(
            cause=self.name,
            sentence=f"{cost} {self.verb} {self.phrase}: {units.duration(per_step)} per step.",
            seconds=per_step,
            share=share,
            of="run",
            fix=self.fix_for(run),
            is_issue=is_issue,
            is_overhead=self.is_overhead,
            right=self.right if is_issue else None,
        )


class BetweenStepsRule(RunRule):
    """A reason for time between steps, such as validation.

    On a busy machine, both this time and the steps take longer, so its share of the run changes
    little. The threshold therefore rises less than for other rules.
    """

    def allowance(self, run: RunEvidence) -> float:
        return math.sqrt(run.allowance)


class OnceAllowedRule(RunRule):
    """A reason that may occur once in any run, because of the machine, without being an issue.

    Attributes:
        slow_cause: The cause that the ledger records for steps that are slow for this reason.
    """

    slow_cause: ClassVar[str]

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield the finding.

        If the cost would be too small to report without the slowest step, the sentence is about
        this step.
        """
        slowest = max(
            _slow_steps(self.slow_cause, run.ledger), key=attrgetter("cost"), default=None
        )
        for finding in super().findings(run):
            seconds = run.seconds_by_rule[self.name]
            if slowest is None or seconds - slowest.cost >= self.least_seconds(run):
                yield finding
                continue
            sentence = (
                f"{units.percent(finding.share)} of the run (without start-up) was lost in step "
                f"{slowest.step} alone, which took {units.duration(slowest.seconds)} instead of "
                f"{units.duration(slowest.usual)}."
            )
            yield replace(finding, sentence=sentence, fix="")

    def excused_seconds(self, run: RunEvidence) -> float:
        """Return the seconds of the one occurrence that is acceptable.

        This is the highest cost of a single slow step, or of a single span of the ledger (a section
        of the run), whichever is higher. If the ledger lists slow steps, their time does not count
        as the cost of a span, because a span may have several of them.
        """
        slow = [step.cost for step in _slow_steps(self.slow_cause, run.ledger)]
        return max([*slow, *self._seconds_by_span(run.ledger)], default=0.0)

    def _seconds_by_span(self, ledger: Ledger) -> Sequence[float]:
        """Return the seconds that this reason costs in each span (section) of the run.

        Listed slow steps are left out. The result is empty if there is only one span.
        """
        if len(ledger.spans) < 2:
            return ()
        are_listed = bool(_slow_steps(self.slow_cause, ledger))
        seconds = []
        for span in ledger.spans:
            spent = dict(span.spent)
            if are_listed:
                spent.pop(f"slow/{self.slow_cause}", None)
            seconds.append(_by_rule(spent, ledger).get(self.name, 0.0))
        return seconds


class UncertainRule(RunRule):
    """A cost that a ledger alone cannot prove to be an issue.

    It is reported only if the run has no profile.

    Attributes:
        category: The ledger category that contains the cost.
    """

    category: ClassVar[str]

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        seconds = run.ledger.seconds.get(self.category, 0.0)
        if run.profile is None and seconds >= LARGE_SHARE * run.training_seconds > 0:
            yield self.finding(seconds, run, is_issue=False)

"""Define the evidence about a run, and the base classes of the rules about a run.

The evidence is the facts that all rules about a run read. Most of them come from the ledger, which
is the time account of the run. A span is a section of the run in the ledger.
"""

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
from lflops.findings.stalls import pauses_of
from lflops.ledger.account import Ledger, SlowStep
from lflops.profile.profile import Profile
from lflops.profile.series import summed

NOT_TRAINING = {"start_up", "warm_up", "lflops", "after_run", "down"}
"""Ledger categories for the time before and after training, and for the work of lflops itself."""

LARGE_SHARE = 0.1
"""An `UncertainRule` reports what it found if this costs at least this share of training time."""

REPEATED_COMPILATION_SHARE = 0.05
"""Compilation is repeated if it takes at least this share of the time after half of the steps."""

MOSTLY = 0.5
"""A finding says how long and how often pauses occur if they take this share of its cost."""

MANY_RECOMPILED_STEPS = 3
"""Compilation is repeated if torch compiled code again in this many steps of a profile."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunEvidence:
    """The facts that all rules about a run read.

    Attributes:
        ledger: The time account of the run: its seconds by category.
        profile: The last profile of the run, or `None` if no steps were profiled.
        step_issues: Names of the rules about a step that found issues in this profile. The rules
            about the run do not report the same time again.
        confirmed_by_window: Names of the other rules that found issues in this profile. A rule
            about the run with the same name reports what the issue costs in the whole run.
    """

    ledger: Ledger
    profile: Profile | None
    step_issues: frozenset[str]
    confirmed_by_window: frozenset[str] = frozenset()

    @cached_property
    def training_seconds(self) -> float:
        """Seconds from the end of start-up to the end of training, without the work of lflops."""
        return training_seconds(self.ledger)

    @cached_property
    def seconds_by_rule(self) -> dict[str, float]:
        """Seconds of the run, keyed by the name of the rule that reports them."""
        return _by_rule(self.ledger.seconds, self.ledger)

    @cached_property
    def allowance(self) -> float:
        """Factor by which thresholds rise because other programs use the CPU."""
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
        # The first of these sections of the run is left out: in a short run, every compiled model
        # is compiled in it.
        late = spans[1:]
        compiling = sum(span.spent.get("compilation", 0.0) for span in late)
        seconds = sum(span.seconds for span in late)
        return compiling >= REPEATED_COMPILATION_SHARE * seconds > 0


def _by_rule(seconds: Mapping[str, float], ledger: Ledger) -> dict[str, float]:
    """Return the sum of the seconds that each rule reports, keyed by the name of the rule.

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

    The longest wait is left out, because the process might have been stopped during this wait.
    """
    waits = [step.cost for step in _slow_steps("not_scheduled", ledger)]
    seconds = ledger.seconds.get("slow/not_scheduled", 0.0) - max(waits, default=0.0)
    return max(seconds, 0.0) / (training_seconds(ledger) or 1.0)


def _slow_steps(cause: str, ledger: Ledger) -> list[SlowStep]:
    """Return the slow steps that have the given cause."""
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
    """Return the name of the rule that reports the slow steps with the given cause.

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
    """A rule that looks for one reason why a run is slow, in the run's ledger (time account).

    Attributes:
        verb: The verb of the finding's sentence, such as "is spent on". The sentence is the cost,
            the verb and the phrase: "12 % of the training loop's time (3 ms per step) is spent on
            validation".
        phrase: Noun phrase for the work that takes the time, such as "validation".
        same_as: Names of the rules about the step that report the same time. If one of these rules
            found an issue in the last profile, this rule reports nothing. An empty set stands for
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
        """Return whether a cost, in seconds of the run, is an issue (users should fix it)."""
        if self.threshold.share is None:
            return False
        judged_seconds = seconds - self.excused_seconds(run)
        if self.name in run.confirmed_by_window:
            # In the profile, the same cost was an issue even without the delay by other programs.
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
        """Return the factor by which the threshold rises because other programs use the CPU."""
        return run.allowance

    def may_be_due_to_others(self, run: RunEvidence) -> bool:
        """Return whether other programs on the machine might be the reason for the cost."""
        return False

    def is_confirmed(self, run: RunEvidence) -> bool:
        """Return whether further evidence confirms that this cost is an issue."""
        return run.allowance <= 1 or not self.may_be_due_to_others(run)

    def fix_for(self, run: RunEvidence) -> str:
        """Return the advice on how to reduce the cost.

        Rules override this method if the advice depends on the run.
        """
        return self.fix

    def rhythm(self, seconds: float, run: RunEvidence) -> str:
        """Return the end of the sentence, which says how long and how often the work is done.

        It is empty if this is unknown. `seconds` is the cost in seconds of the whole run.
        """
        return ""

    def finding(self, seconds: float, run: RunEvidence, *, is_issue: bool) -> Finding:
        """Make a finding from a cost in seconds of the whole run."""
        share = seconds / run.training_seconds
        per_step = seconds / run.ledger.counted_steps
        part = f"{units.percent(share)} of the training loop's time"
        cost = f"{part} ({units.duration(per_step)} per step)"
        return Finding(
            cause=self.name,
            sentence=f"{cost} {self.verb} {self.phrase}{self.rhythm(seconds, run)}.",
            seconds=per_step,
            share=share,
            of="run",
            fix=self.fix_for(run),
            is_issue=is_issue,
            is_overhead=self.is_overhead,
            right=self.right if is_issue else None,
        )


class BetweenStepsRule(RunRule):
    """A rule about time between steps, such as validation.

    A rule reports an issue if the cost reaches a threshold. If other programs use the CPU, the
    thresholds rise. However, these programs delay both the steps and the work between the steps, so
    the share of this work in the run changes little. Therefore, the threshold of this rule rises
    less than the thresholds of other rules.

    Attributes:
        category: The ledger category of work that is always done between two steps. Empty if the
            same work can be a phase of a step.
    """

    category: ClassVar[str] = ""

    def allowance(self, run: RunEvidence) -> float:
        return math.sqrt(run.allowance)

    def rhythm(self, seconds: float, run: RunEvidence) -> str:
        if not self.category:
            return ""
        pauses = pauses_of(run.ledger, self.category)
        if pauses is None or pauses.total < MOSTLY * seconds:
            return " between steps"
        often = pauses.often or "each time"
        return f" between steps: {units.duration(pauses.seconds)} {often}"


class OnceAllowedRule(RunRule):
    """A rule about an event that is not an issue if it occurs only once in a run.

    The machine can cause one such event in any run, so only further events count.

    Attributes:
        slow_cause: The cause that the ledger records for steps that this event slows down.
    """

    slow_cause: ClassVar[str]

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield the finding.

        If the cost without the slowest step would be too small to report, the sentence is only
        about the slowest step.
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
                f"{units.percent(finding.share)} of the training loop's time was lost in step "
                f"{slowest.step} alone, which took {units.duration(slowest.seconds)} instead of "
                f"{units.duration(slowest.usual)}."
            )
            yield replace(finding, sentence=sentence, fix="")

    def excused_seconds(self, run: RunEvidence) -> float:
        """Return the seconds of the one event that is acceptable.

        This is the highest cost of a single slow step, or of a single span (section) of the run,
        whichever is higher. The cost of a span does not include slow steps that the ledger lists,
        because a span can have several of them.
        """
        slow = [step.cost for step in _slow_steps(self.slow_cause, run.ledger)]
        return max([*slow, *self._seconds_by_span(run.ledger)], default=0.0)

    def _seconds_by_span(self, ledger: Ledger) -> Sequence[float]:
        """Return the cost of the rule's events in each span (section) of the run, in seconds.

        Slow steps that the ledger lists are left out. The result is empty if there is only one
        span.
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
    """A rule about a cost that a ledger alone cannot prove to be an issue.

    The cost is reported only if the run has no profile. Some of these rules report an issue if the
    cost is very large, the others never do. Nothing is reported for a run on a GPU or another
    device, because the host waits for the device in any phase.

    Attributes:
        category: The ledger category that contains the cost.
        very_large_share: Smallest cost of an issue, as a share of training time. `None` if the cost
            is never an issue.
    """

    category: ClassVar[str]
    very_large_share: ClassVar[float | None] = None

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        seconds = run.ledger.seconds.get(self.category, 0.0)
        if (
            run.ledger.is_on_cpu
            and run.profile is None
            and seconds >= LARGE_SHARE * run.training_seconds > 0
        ):
            yield self.finding(seconds, run, is_issue=self.is_issue(seconds, run))

    def is_issue(self, seconds: float, run: RunEvidence) -> bool:
        share = self.very_large_share
        if share is None or seconds / run.ledger.counted_steps < self.threshold.seconds:
            return False
        # Slow steps with the same cause have a finding of their own.
        is_reported = run.seconds_by_rule.get(self.name, 0.0) >= self.least_seconds(run)
        return not is_reported and seconds >= share * run.allowance * run.training_seconds

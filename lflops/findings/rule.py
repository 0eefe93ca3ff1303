"""Define `Rule`, and the base classes of the rules about a step.

A rule looks for one reason why a step or a run is slow. A rule about a step reads the measured
facts about the step, and returns candidates (possible findings). A candidate that costs enough
becomes a finding, which has a sentence and a fix.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lflops import units
from lflops.analysis.tree import hides_submodules
from lflops.findings.evidence import REPORTED_SHARE, StepEvidence, allowance
from lflops.findings.finding import Finding, mostly_in
from lflops.profile.module_names import plain
from lflops.profile.notes import filled
from lflops.profile.profile import Profile

Facts = Mapping[str, float | str | None]
"""Values for the placeholders in a rule's text templates, keyed by the names of the placeholders.

The strings in `Candidate.facts` can contain control characters, because some of them are names from
the user. `StepRule.words` replaces these characters.
"""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """The minimum costs for a candidate (a possible finding) to be reported, and to be an issue.

    Attributes:
        share: A candidate is an issue if it costs at least this share of the step, or of the run.
            With 0, every candidate is an issue. With `None`, no candidate is an issue, and the
            finding only shows where the time goes.
        seconds: An issue must also cost at least this many seconds per step. Frameworks spend some
            time in each step, and in a short step this time is a large share.
        reported: A candidate is reported if it costs at least this share of the step. A rule about
            the run uses `share` instead, unless `share` is `None`.
    """

    share: float | None = None
    seconds: float = 0.0
    reported: float = REPORTED_SHARE


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A possible finding, before overlapping costs are subtracted and small costs are dropped.

    Attributes:
        rule: The rule that found the candidate.
        seconds: The cost in seconds per step, or `None` if unknown.
        module: Name of the module in which the time is spent, or the pattern of several modules,
            such as `layers.*.mlp`. Empty for the root, or if the time is in no particular module.
        facts: Further values for the templates of the sentence and the fix.
        rank: The slow rank, or `None` if the candidate is not about one rank.
        phase: The phase in which this rank is slow. Empty without a slow rank.
        is_rest: Whether another finding already reports a part of this time. If so, `seconds` is
            only the rest.
        operators: Seconds per step of each operator that the sentence lists with its time, keyed by
            operator.
    """

    rule: "StepRule"
    seconds: float | None
    module: str = ""
    facts: Facts = field(default_factory=dict)
    rank: int | None = None
    phase: str = ""
    is_rest: bool = False
    operators: Mapping[str, float] = field(default_factory=dict)


class Rule(ABC):
    """A rule that looks for one reason why a step or a run is slow.

    The docstring of a subclass is part of the documentation. It describes the meaning of the
    finding, and when the finding is an issue (something that users should fix). `sentence` and
    `fix` are templates. Both can contain `{where}` for the module, `{cost}` for the cost, `{Cost}`
    for the cost at the start of a sentence, and the keys of the candidate's `facts`. `{place}` is
    the code that takes most of the cost, as `place_of` returns it. `{in_function}` is the same code
    after the words ", mostly in", or empty if the code is unknown.

    Attributes:
        name: The name of the rule, and the `cause` of its findings.
        threshold: The smallest costs at which the rule's findings are reported and are issues.
        title: Template of a few words for the reason and its place. If it is empty, reports show
            the usual words for the rule.
        sentence: Template of the finding's sentence.
        fix: Template of the advice on how to reduce the cost.
        is_overhead: Whether the model computes nothing in the time that the rule is about.
        is_lower_bound: Whether the true cost may be higher than the rule's estimate.
        right: How reliable the rule was in the training runs of `benchmarks/faults` that no rule
            was tuned on: a pair `(right, total)`. The rule's finding was reported first in `total`
            runs, and in `right` of these runs it named the known issue.
    """

    name: str
    threshold: ClassVar[Threshold] = Threshold()
    title: ClassVar[str] = ""
    sentence: ClassVar[str] = ""
    fix: ClassVar[str] = ""
    is_overhead: ClassVar[bool] = False
    is_lower_bound: ClassVar[bool] = False
    right: ClassVar[tuple[int, int] | None] = None


class StepRule(Rule):
    """A rule that looks for one reason why the typical step is slow."""

    @abstractmethod
    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        """Return the candidates (possible findings) of this rule.

        Args:
            step: The measured facts about the step.
            earlier: The candidates that earlier rules have found.
        """

    def is_reported(self, candidate: Candidate, step: StepEvidence) -> bool:
        """Return whether the cost of a candidate is unknown, or large enough to be reported."""
        if candidate.seconds is None:
            return True
        return candidate.seconds >= self.threshold.reported * step.mean

    # Judging a candidate.

    def is_issue(self, candidate: Candidate, step: StepEvidence) -> bool:
        """Return whether the candidate is an issue (something that users should fix).

        It is an issue if it costs enough and `is_confirmed` returns true.
        """
        share = self.issue_share(step)
        if share is None:
            return False
        least = max(share * step.uncontended_mean, self.threshold.seconds)
        if self.judged_seconds(candidate, step) < least * self.allowance(candidate, step):
            return False
        return self.is_confirmed(candidate, step)

    def issue_share(self, step: StepEvidence) -> float | None:
        """Return the minimum cost of an issue, as a share of the step.

        Returns `None` if no candidate is an issue.
        """
        return self.threshold.share

    def judged_seconds(self, candidate: Candidate, step: StepEvidence) -> float:
        """Return the cost in seconds that is compared with the threshold.

        The delay caused by other programs is subtracted if it is known.
        """
        seconds = step.uncontended(self.name, candidate.seconds or 0.0)
        if step.times.uncontended or step.is_cpu_contended:
            return step.at_most_median(self.name, seconds)
        return seconds

    def allowance(self, candidate: Candidate, step: StepEvidence) -> float:
        """Return the factor by which the threshold rises because other programs use the CPU.

        It is 1 if the delay caused by these programs is known, because it is then subtracted from
        the cost.
        """
        return 1.0 if step.times.uncontended else allowance(step.lost_cpu_share)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        """Return whether further evidence confirms that the candidate is an issue.

        This is called only for candidates that cost enough to be an issue.
        """
        return True

    # Making a finding from a candidate.

    def finding(self, candidate: Candidate, step: StepEvidence) -> Finding | None:
        """Make a finding from a candidate, or return `None` if `describe` returns no sentence."""
        said = self.describe(candidate, step)
        if said is None:
            return None
        is_issue = self.is_issue(candidate, step)
        has_track_record = step.profile.run.device_type in {None, "cpu"}
        return Finding(
            cause=self.name,
            sentence=said,
            module=candidate.module,
            title=filled(self.title_for(candidate), self.words(candidate, step)),
            place=self.place_of(candidate, step),
            rank=candidate.rank,
            phase=candidate.phase,
            seconds=candidate.seconds,
            share=step.times.share(candidate.seconds),
            fix=self.advise(candidate, step),
            is_issue=is_issue,
            is_overhead=self.is_overhead,
            is_lower_bound=self.is_lower_bound,
            operators=candidate.operators,
            right=self.right if is_issue and has_track_record else None,
        )

    def title_for(self, candidate: Candidate) -> str:
        """Return a few words for the reason and its place, with placeholders in braces.

        Rules override this method if the template depends on the candidate.
        """
        return self.title

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        """Return the code, such as a hook or a function of the user, that takes most of the cost.

        Returns the empty string if this code is unknown.
        """
        return ""

    def describe(self, candidate: Candidate, step: StepEvidence) -> str | None:
        """Return the sentence of a candidate, or `None` if it should not be reported."""
        return filled(self.sentence_for(candidate, step), self.words(candidate, step))

    def advise(self, candidate: Candidate, step: StepEvidence) -> str:
        """Return the advice on how to reduce the cost of a candidate."""
        return filled(self.fix_for(candidate, step), self.words(candidate, step))

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        """Return the text of the sentence, with placeholders in braces.

        Rules override this method if the template depends on the candidate.
        """
        return self.sentence

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        """Return the text of the fix, with placeholders in braces.

        Rules override this method if the template depends on the candidate.
        """
        return self.fix

    def words(self, candidate: Candidate, step: StepEvidence) -> Facts:
        """Return the values for the placeholders in the templates."""
        words: dict[str, float | str | None] = {}
        for name, value in candidate.facts.items():
            words[name] = plain(value) if isinstance(value, str) else value
        cost = cost_of(candidate.seconds, step)
        words["cost"] = cost
        words["Cost"] = cost[0].upper() + cost[1:]
        words["where"] = plain(candidate.module) or root_itself(step.profile)
        place = self.place_of(candidate, step)
        words["place"] = plain(place)
        words["in_function"] = mostly_in(place)
        return words


class ModuleRule(StepRule):
    """A rule that needs the times of modules."""

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.cannot_locate_time:
            return []
        return self.detect_modules(step, earlier)

    @abstractmethod
    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        """Return the candidates (possible findings) of this rule.

        This is called only if lflops can tell which modules take the time: module times are
        reliable, or the chip's peak is known.
        """

    def words(self, candidate: Candidate, step: StepEvidence) -> Facts:
        words = dict(super().words(candidate, step))
        if step.are_module_times_unreliable:
            words["cost"] = f"roughly {words['cost']}"
            words["Cost"] = f"Roughly {words['Cost']}"
        return words


def cost_of(seconds: float | None, step: StepEvidence) -> str:
    """Format a cost, such as `8.2 % of the step (4.1 ms)`."""
    share = units.percent(step.times.share(seconds))
    return f"{share} of the {step.unit} ({units.duration(seconds)})"


def root_itself(profile: Profile) -> str:
    """Describe the part of the model outside all submodules: "Net itself, outside its layers".

    If the model is compiled as a whole, this part has all layers, so the text is "the compiled
    Net". If a run has several models, lflops puts them into a `ModuleDict`, which is the root
    module. Users did not write this root, so the text is "the code around the models".
    """
    class_name = profile.modules[""].class_name
    if class_name == "ModuleDict":
        return "the code around the models"
    name = plain(class_name) or "the model"
    if hides_submodules("", profile):
        return f"the compiled {name}"
    return f"{name} itself, outside its layers"


def others_like(number: int) -> str:
    """Describe the modules that a module is compared with: "the other 5 identical modules".

    Args:
        number: Number of these modules.
    """
    return f"the other {number} identical modules" if number > 1 else "the other identical module"

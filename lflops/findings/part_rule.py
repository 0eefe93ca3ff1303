"""Define the base class of rules about a part of the step, and the rule for user-defined phases.

A part is a phase outside modules, such as the data wait, or one kind of time in modules, such as
memory-bound work.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import ClassVar

from lflops import units
from lflops.findings.evidence import StepEvidence
from lflops.findings.finding import mostly_in
from lflops.findings.rule import Candidate, StepRule, cost_of
from lflops.profile.module_names import plain
from lflops.profile.notes import filled
from lflops.profile.profile import Profile

BURST_RATIO = 5
"""A phase comes in bursts if its long times are this many times as long as its usual times.

The usual times are the times in most steps, for example in steps without a wait for data.
"""


class PartRule(StepRule):
    """A rule that reports one part of the step if it takes too long.

    A part is a phase outside modules, such as the data wait, or one kind of time in modules, such
    as memory-bound work. The parts do not overlap. `step_parts` computes them, and each part
    becomes a candidate (possible finding) of its rule. So `detect` returns nothing.

    Attributes:
        label: The name of the part in tables. By default, the rule's name.
        phrase: Noun phrase for the part, such as "inefficient kernels". The sentence of the finding
            is the cost, the verb and this phrase: "26 % of the step is lost to inefficient
            kernels".
        verb: The verb of this sentence, such as "is lost to".
        phrase_with_place: Replaces the phrase if the sentence names the code that takes most of the
            time. By default, the phrase stays.
    """

    label: ClassVar[str] = ""
    phrase: ClassVar[str] = ""
    verb: ClassVar[str] = "is"
    phrase_with_place: ClassVar[str] = ""

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        return []

    def label_of_part(self) -> str:
        """Return the name of the part that tables show next to its share."""
        return self.label or plain(self.name.replace("_", " "))

    def phrase_for(self, step: StepEvidence) -> str:
        """Return the noun phrase for the part.

        Rules override this method if the phrase depends on the step.
        """
        return self.phrase

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        return step.main_function(self.name)

    def describe(self, candidate: Candidate, step: StepEvidence) -> str:
        cost = cost_of(candidate.seconds, step)
        another = "Another " if candidate.is_rest else ""
        phrase = self.phrase_for(step)
        where = in_bursts(step.profile, self.name)
        most = candidate.module or self.place_of(candidate, step)
        if most:
            where = mostly_in(most) + where
            if phrase == self.phrase:
                phrase = self.phrase_with_place or phrase
        return f"{another}{cost} {self.verb} {phrase}{where}."

    def advise(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.advise_in(candidate.module, step)

    def advise_in(self, module: str, step: StepEvidence) -> str:
        """Return advice on how to reduce the time of the part.

        Args:
            module: Name of the module that has most of the part. Empty if there is no such module.
            step: The measured facts about the step.
        """
        return filled(self.part_fix(step), {"where": plain(module) or "the model"})

    def part_fix(self, step: StepEvidence) -> str:
        """Return the template of the fix.

        Rules override this method if the fix depends on the step.
        """
        return self.fix


class NamedPhase(PartRule):
    """A rule that reports the time of one user-defined phase of the step."""

    verb = "is spent in"

    def __init__(self, name: str) -> None:
        self.name = name

    def phrase_for(self, step: StepEvidence) -> str:
        return f"the phase {plain(self.name)}"

    def advise_in(self, module: str, step: StepEvidence) -> str:
        name = plain(self.name)
        return f"To see what takes the time, add monitor.phase blocks inside the phase {name}"


MAIN_HOOK_SHARE = 0.4
"""A finding names a hook if the hook takes at least this share of the finding's cost."""

GRADIENT_HOOKS = frozenset(
    {
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "clip_gradients",
    }
)
"""Lightning's hooks between backward and the optimizer's step."""


def main_hook(candidate: Candidate, step: StepEvidence) -> str:
    """Return the hook of a callback or of the LightningModule that takes most of the time.

    For the part `clip`, this is one of the `GRADIENT_HOOKS`, and for any other part another hook.
    If the step has no part `clip`, other parts may contain these hooks. Returns the empty string if
    no single hook takes most of the candidate's cost, or if hooks were not timed.
    """
    hooks = {}
    has_clip = "clip" in step.times.phases
    for name, seconds in step.profile.hooks.items():
        is_in_clip = has_clip and name.rpartition(".")[2] in GRADIENT_HOOKS
        if is_in_clip == (candidate.rule.name == "clip"):
            hooks[name] = seconds
    if not hooks or candidate.seconds is None:
        return ""
    slowest = max(hooks, key=hooks.__getitem__)
    if hooks[slowest] < MAIN_HOOK_SHARE * candidate.seconds:
        return ""
    return slowest


def in_bursts(profile: Profile, phase: str) -> str:
    """Describe a phase that is long in some steps and short in most steps.

    Returns text such as `: 63.5 ms in 1 of 5 steps, 600 µs in the other steps`. Returns the empty
    string if the phase takes about the same time in all steps.
    """
    known = []
    for each in profile.steps:
        if each.is_unprofiled and each.phases:
            known.append(each.phases.get(phase, 0.0))
    known.sort()
    long = [seconds for seconds in known if seconds > known[-1] / 2]
    short = known[: len(known) - len(long)]
    if not long or len(short) < len(long):
        return ""
    usual = statistics.mean(short)
    burst = statistics.mean(long)
    if burst < BURST_RATIO * usual:
        return ""
    often = f"in {len(long)} of {len(known)} steps"
    return f": {units.duration(burst)} {often}, {units.duration(usual)} in the other steps"

"""Rules about the time of forward and backward, for steps without reliable module times."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule

FIX = "Measure module times in more steps (active=8 in the schedule), on an idle machine"


class AllOfForward(StepRule):
    """Forward takes a lot of time, but module times are too unreliable to find the module."""

    name = "all_forward"
    sentence = "{Cost} is spent in forward, but lflops cannot tell in which module."
    fix = FIX

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.cannot_locate_time:
            seconds = step.times.phases.get("forward", 0.0)
            yield Candidate(rule=self, seconds=max(seconds, 0.0))


class AllOfBackward(StepRule):
    """Backward takes a lot of time, but module times are too unreliable to find the module."""

    name = "all_backward"
    sentence = "{Cost} is spent in backward, but lflops cannot tell in which module."
    fix = FIX

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.cannot_locate_time:
            backward = step.times.phases.get("backward", 0.0)
            seconds = backward - step.communication_seconds
            yield Candidate(rule=self, seconds=max(seconds, 0.0))

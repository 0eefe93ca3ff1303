"""Backward that runs more often than necessary."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold

USUAL_RATIO = 2
"""MACs of backward per MAC of forward."""

LARGE_RATIO = 2.5
"""Smallest ratio that shows that backward runs more than once."""


class RepeatedBackward(StepRule):
    """Backward has at least 2.5 times the MACs of forward, so it runs more than once.

    Twice the MACs of forward are normal, for the gradients of the inputs and of the weights.
    """

    name = "backward_twice"
    threshold = Threshold(share=0.05)
    sentence = (
        "Backward multiplies {ratio:times} as much as forward, where twice is usual: {cost} more."
    )
    fix = "Call backward once, on the sum of the losses, unless you need gradients of gradients"
    right = (7, 7)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        forward = step.root.forward.macs
        backward = step.root.backward.macs
        if not forward or backward < LARGE_RATIO * forward:
            return
        needless = 1 - USUAL_RATIO * forward / backward
        facts: Facts = {"ratio": backward / forward}
        seconds = step.times.phases.get("backward", 0.0) * needless
        yield Candidate(rule=self, seconds=seconds, facts=facts)

"""The rule about the time of activation checkpointing."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule, Threshold


class Recomputation(StepRule):
    """Activation checkpointing recomputes activations in backward.

    If the step needs at most half of the device's memory, a cost of 5 % is already an issue.
    """

    name = "recomputed"
    threshold = Threshold(share=0.12)
    share_with_spare_memory = 0.05
    sentence = (
        "{cost} is spent recomputing activations in backward, because of activation checkpointing."
    )
    fix = "Use activation checkpointing for fewer layers if memory allows it"
    right = (7, 7)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        seconds = step.root.recompute.seconds
        if seconds is not None:
            yield Candidate(rule=self, seconds=seconds.median)

    def issue_share(self, step: StepEvidence) -> float | None:
        if step.has_spare_memory:
            return self.share_with_spare_memory
        return self.threshold.share

"""The rule about a step that is faster than the chip's peak allows: the peak must be too low."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule


class PeakTooLow(StepRule):
    """The step, or a layer, is faster than the chip's peak allows, so the known peak is too low."""

    name = "peak"
    sentence = (
        "A {part} is faster than the peak of {hardware} allows, so this peak is too low, and MFU "
        "is too high."
    )
    fix = "Measure the peak again on an idle machine: lflops hardware --measure"

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        reached = step.utilization
        if reached.is_peak_too_low:
            part = "step" if (reached.mfu or 0.0) > 1 else "layer"
            facts: Facts = {"part": part, "hardware": reached.hardware}
            yield Candidate(rule=self, seconds=None, facts=facts)

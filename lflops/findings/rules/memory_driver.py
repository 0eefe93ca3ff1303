"""The rule about waiting for the driver of the device to allocate memory."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold, cost_of
from lflops.findings.step_parts import LEAST_ALLOCATING_SHARE


class AllocatingMemory(PartRule):
    """The device is idle while the host waits for the driver to allocate or free memory."""

    name = "allocating"
    threshold = Threshold(share=LEAST_ALLOCATING_SHARE)
    phrase = "waiting for the driver to allocate or free memory"
    fix = (
        "Remove torch.cuda.empty_cache() from the step. If the step does not call it, reduce the "
        "memory that the step needs"
    )

    def describe(self, candidate: Candidate, step: StepEvidence) -> str:
        cost = cost_of(candidate.seconds, step)
        return (
            "The device idles while the host waits for the driver to allocate or free memory: "
            f"this costs {cost}."
        )

"""Rules about copies to and from the device, and about model calls that prepare a batch."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold


class HostToDeviceCopy(PartRule):
    """The step waits while the batch is copied to the device.

    On a CPU, nothing is copied, and the time is spent in other code that prepares the batch. This
    time is not an issue if forward has more MACs than backward, because the loop then also runs the
    model to prepare the batch. Trainers that generate and score text do this.
    """

    name = "transfer"
    is_overhead = True
    label = "batch transfer"
    threshold = Threshold(share=0.10)
    verb = "is spent"
    phrase = "copying batches to the device"
    fix = "Pass pin_memory=True to the DataLoader, or use smaller dtypes in the batch"

    phrase_on_cpu = "preparing batches, after they are fetched and before forward"
    fix_on_cpu = (
        "Look at what the loop does with a batch before forward, such as generation, scoring or "
        "transforms"
    )

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        if not step.is_on_cpu:
            return True
        return step.root.forward.macs <= step.root.backward.macs

    def phrase_for(self, step: StepEvidence) -> str:
        return self.phrase_on_cpu if step.is_on_cpu else self.phrase

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix_on_cpu if step.is_on_cpu else self.fix


class InferenceInStep(PartRule):
    """The model is called to generate or score text while a batch is prepared.

    This finding is never an issue, because training needs the generated text or the scores.
    """

    name = "inference"
    label = "inference"
    threshold = Threshold()
    verb = "is spent on"
    phrase = "model calls that prepare a batch (generation or scoring)"
    fix = "Generate or score in larger batches, or with a faster inference engine, if possible"


class ExposedCopies(PartRule):
    """The device copies data and computes nothing during this time, as a trace shows."""

    name = "copy"
    threshold = Threshold(share=0.10)
    verb = "is spent on"
    phrase = "copies that do not overlap with computation"
    fix = (
        "Copy from pinned memory with non_blocking=True, copy fewer bytes, or copy the next batch "
        "on another stream during the current step"
    )

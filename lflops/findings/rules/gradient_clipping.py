"""Gradient clipping."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Threshold


class GradientClipping(PartRule):
    """Gradients are clipped slowly, for example by a loop over the parameters.

    In custom loops, the cost is all the time between backward and the optimizer's step.
    """

    name = "clip"
    label = "gradient clipping"
    threshold = Threshold(share=0.10, seconds=0.0005)
    verb = "is spent on"
    phrase = "gradient clipping"
    fix = "Clip gradients with foreach=True, or less often"
    right = (8, 8)

    phrase_of_custom_loop = (
        "work between backward and the optimizer's step, such as gradient clipping"
    )
    fix_of_custom_loop = (
        "Clip with torch.nn.utils.clip_grad_norm_(..., foreach=True) instead of a loop over "
        "parameters, and do not read gradients in every step"
    )

    def phrase_for(self, step: StepEvidence) -> str:
        return self.phrase if step.is_lightning else self.phrase_of_custom_loop

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix if step.is_lightning else self.fix_of_custom_loop

"""Gradient clipping."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Threshold


class GradientClipping(PartRule):
    """Gradients are clipped slowly, for example by a loop over the parameters.

    The cost is all the time between backward and the optimizer's step. It therefore includes other
    work on the gradients, such as statistics for a logger.
    """

    name = "clip"
    label = "gradient clipping"
    threshold = Threshold(share=0.10, seconds=0.0005)
    verb = "is spent on"
    phrase = "work between backward and the optimizer's step, such as gradient clipping"
    fix = "Clip gradients with foreach=True, and do not read gradients in every step"
    right = (8, 8)

    fix_of_custom_loop = (
        "Clip with torch.nn.utils.clip_grad_norm_(..., foreach=True) instead of a loop over "
        "parameters, and do not read gradients in every step"
    )

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix if step.is_lightning else self.fix_of_custom_loop

"""The rule about work on gradients between backward and the optimizer's step."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule, main_hook
from lflops.findings.rule import Candidate, Threshold
from lflops.findings.rules.optimizer import SECONDS_PER_BYTE


class GradientWork(PartRule):
    """The training loop clips, checks or logs gradients between backward and the optimizer's step.

    Typical reasons are histograms or norms of gradients for a logger, and gradients that are
    clipped in a loop over the parameters. lflops does not know which reason applies.
    """

    name = "clip"
    label = "work on gradients"
    threshold = Threshold(share=0.10, seconds=0.0005)
    verb = "is spent on"
    phrase = "work between backward and the optimizer's step, such as logging or clipping gradients"
    fix = (
        "Log histograms and norms of gradients only every N steps, and clip with foreach=True. "
        "Look at the hooks on_after_backward and on_before_optimizer_step, and at the Trainer's "
        "gradient_clip_val"
    )
    right = (8, 8)

    fix_of_custom_loop = (
        "Log histograms and norms of gradients only every N steps, and clip with "
        "torch.nn.utils.clip_grad_norm_(..., foreach=True) instead of a loop over parameters"
    )
    fix_if_clipped_fast = "Log histograms and norms of gradients only every N steps"

    fix_in_transformers = (
        "If the gradients need no clipping, pass max_grad_norm=0 to TrainingArguments. Log "
        "histograms and norms of gradients only every N steps"
    )

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        """Return whether the time is an issue.

        A transformers Trainer clips gradients by default, which is no issue if the operators take
        the time that their traffic needs.
        """
        if step.profile.run.monitor != "FlopsCallback" or not step.is_on_cpu:
            return True
        needed = step.root.other.bytes_moved * SECONDS_PER_BYTE
        return self.judged_seconds(candidate, step) > needed

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        return main_hook(candidate, step) or super().place_of(candidate, step)

    def part_fix(self, step: StepEvidence) -> str:
        if step.profile.run.monitor == "FlopsCallback":
            return self.fix_in_transformers
        if step.is_lightning:
            return self.fix
        has_foreach = any(
            count.operator == "_foreach_norm" and count.phase != "optimizer"
            for count in step.profile.op_counts
        )
        return self.fix_if_clipped_fast if has_foreach else self.fix_of_custom_loop

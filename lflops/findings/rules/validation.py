"""Rules about validation and other inference between the steps of a run."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import BetweenStepsRule, RunEvidence


class Validation(BetweenStepsRule):
    """The run validates often, or on many batches.

    A single validation after the last step is not an issue.
    """

    name = "validation"
    category = "validation"
    threshold = Threshold(share=0.10)
    verb = "is spent on"
    phrase = "validation"
    fix = "Validate less often, or on fewer batches"

    def is_confirmed(self, run: RunEvidence) -> bool:
        """Return false if the only validation came after the last step of the run."""
        groups = run.ledger.step_groups
        is_single = bool(groups) and not any(self.category in group.between for group in groups)
        return not is_single and super().is_confirmed(run)


class Inference(BetweenStepsRule):
    """The model runs in eval mode without gradients, outside the validation of the training loop.

    This finding is never an issue, because a run may need rollouts, evaluations or generated text.
    """

    name = "inference"
    threshold = Threshold(reported=0.05)
    verb = "is spent on"
    phrase = "inference without gradients (rollout, evaluation or generation)"
    fix = "Use fewer or larger batches for rollouts and evaluations, if possible"

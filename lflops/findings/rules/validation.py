"""Rules about validation and other inference between the steps of a run."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import BetweenStepsRule


class Validation(BetweenStepsRule):
    """The run validates often, or on many batches."""

    name = "validation"
    category = "validation"
    threshold = Threshold(share=0.10)
    verb = "is spent on"
    phrase = "validation"
    fix = "Validate less often, or on fewer batches"


class Inference(BetweenStepsRule):
    """The model runs in eval mode without gradients, outside the validation of the training loop.

    This finding is never an issue, because a run may need rollouts, evaluations or generated text.
    """

    name = "inference"
    threshold = Threshold(reported=0.05)
    verb = "is spent on"
    phrase = "inference without gradients (rollout, evaluation or generation)"
    fix = "Use fewer or larger batches for rollouts and evaluations, if possible"

"""Rules about the time of a run between its steps.

This time is spent on validation, inference, checkpoints, logging, compilation and restarts, or
between epochs.
"""

from msgspec.structs import replace

from lflops import units
from lflops.findings.finding import Finding
from lflops.findings.rule import Threshold
from lflops.findings.run_rule import BetweenStepsRule, RunEvidence, RunRule


class Validation(BetweenStepsRule):
    """The run validates often, or on many batches."""

    name = "validation"
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


class SavingCheckpoints(BetweenStepsRule):
    """The run saves checkpoints often, or the checkpoints are large."""

    name = "checkpoint"
    threshold = Threshold(share=0.05)
    verb = "is spent"
    phrase = "saving checkpoints"
    fix = "Save checkpoints less often, or in another process"
    right = (7, 7)


class Logging(BetweenStepsRule):
    """The run logs often, or logs images and histograms."""

    name = "logging"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "logging"
    fix = "Log less often, and do not log images or histograms in every step"


class Compilation(RunRule):
    """The run compiles code with torch.compile again and again, in many steps."""

    name = "compilation"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "compilation"
    fix = "Pad inputs to a few fixed shapes, or pass dynamic=True to torch.compile"

    def is_confirmed(self, run: RunEvidence) -> bool:
        return run.recompiles

    def finding(self, seconds: float, run: RunEvidence, *, is_issue: bool) -> Finding:
        """Make a finding. Compilation at the beginning of the run is no cost of each step."""
        found = super().finding(seconds, run, is_issue=is_issue)
        if run.recompiles:
            return found
        sentence = (
            f"{units.percent(found.share)} of the training loop's time "
            f"({units.duration(seconds)} in total) is spent on compilation at the beginning. In a "
            "longer run, this share is lower."
        )
        return replace(found, sentence=sentence, fix="", is_overhead=False)


class BetweenEpochs(RunRule):
    """The run spends time between epochs, for example to start data loader workers again."""

    name = "between_epochs"
    threshold = Threshold(share=0.05)
    verb = "is spent"
    phrase = "between epochs"
    fix = (
        "Save, log and evaluate less often. If the DataLoader has workers, pass "
        "persistent_workers=True"
    )


class RepeatedWork(RunRule):
    """The run was restarted and repeated the steps since its last checkpoint."""

    name = "repeated"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "steps that had to be repeated after a restart"
    fix = "Save checkpoints more often"

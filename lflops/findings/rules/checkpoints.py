"""Rules about checkpoints: the time to save them, and the work that is repeated after a restart."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import BetweenStepsRule, RunRule


class SavingCheckpoints(BetweenStepsRule):
    """The run saves checkpoints often, or the checkpoints are large."""

    name = "checkpoint"
    category = "checkpoint_save"
    threshold = Threshold(share=0.05)
    verb = "is spent"
    phrase = "saving checkpoints"
    fix = "Save checkpoints less often, or in another process"
    right = (7, 7)


class RepeatedWork(RunRule):
    """The run was restarted and repeated the steps since its last checkpoint."""

    name = "repeated"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "steps that had to be repeated after a restart"
    fix = "Save checkpoints more often"

"""The rule about the time between epochs."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import RunRule


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

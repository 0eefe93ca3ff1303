"""Rules about the time in which ranks communicate or wait for each other."""

from lflops.findings.evidence import StepEvidence
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold
from lflops.findings.run_rule import UncertainRule
from lflops.profile.series import sums

MANY_COLLECTIVES = 8
"""Communication is an issue only if a step has at least this many small collectives.

Many small collectives should be merged into a few large ones.
"""

SMALL_MESSAGE_BYTES = 1 << 20
"""The collectives of a step are small if they have fewer bytes than this on average."""


class ExposedCommunication(PartRule):
    """Ranks communicate or wait for each other, and compute nothing during this time.

    This time is an issue only if a step has at least 8 collectives, with an average size of less
    than 1 MiB.
    """

    name = "communication"
    threshold = Threshold(share=0.05)
    verb = "is spent"
    phrase = "communicating or waiting for other ranks, while this rank computes nothing"
    fix = (
        "Communicate less often (gradient accumulation), in larger messages, or over a faster link"
    )
    right = (15, 15)

    def phrase_for(self, step: StepEvidence) -> str:
        if step.stragglers.rows:
            return f"{self.phrase} (the wait for the slow rank is not included)"
        return self.phrase

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        totals = sums(step.profile.communication, "calls", "bytes")
        calls = totals["calls"]
        return calls >= MANY_COLLECTIVES and totals["bytes"] < calls * SMALL_MESSAGE_BYTES


class LightningCollectives(PartRule):
    """Ranks wait for each other in Lightning's collectives, for example with `sync_dist=True`."""

    name = "sync"
    threshold = Threshold(share=0.10)
    verb = "is spent"
    phrase = "waiting for other ranks in Lightning's collectives"
    fix = (
        "Look in the Ranks view of the dashboard for the rank that arrives last. Metrics that are "
        "logged with sync_dist=True also wait for all ranks"
    )


class CommunicationOfRun(UncertainRule):
    """Ranks wait for each other, in a run with a ledger but without a profiled window."""

    name = "communication"
    category = "training/wait"
    threshold = ExposedCommunication.threshold
    verb = ExposedCommunication.verb
    phrase = ExposedCommunication.phrase
    fix = ExposedCommunication.fix

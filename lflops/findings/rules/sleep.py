"""Time in which the training thread does nothing."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, ModuleRule, Threshold


class SleepingThread(ModuleRule):
    """The training thread uses no CPU in the forward of a module: it sleeps or waits.

    It is found on a CPU and one rank, where the thread waits for nothing else: waiting for a core
    and for a batch are subtracted.
    """

    name = "sleep"
    is_overhead = True
    threshold = Threshold(share=0.05)
    sentence = "{Cost} passes in {where} while the training thread uses no CPU."
    fix = (
        "Look for time.sleep, locks, and access to files or the network in the forward of {where} "
        "and in its hooks"
    )

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        if step.sleep is not None:
            yield Candidate(rule=self, seconds=step.sleep.seconds, module=step.sleep.module)

"""Rules about waiting for the next batch, in a typical step and in the whole run."""

from lflops.findings.evidence import StepEvidence, handover_seconds
from lflops.findings.part_rule import PartRule
from lflops.findings.rule import Candidate, Threshold
from lflops.findings.run_rule import RunEvidence, RunRule
from lflops.findings.stalls import stalls_of


class DataWait(PartRule):
    """The training loop waits for the next batch.

    A part of this wait is the time in which a worker process hands over a finished batch. More
    workers do not shorten this part, so it is ignored when lflops decides whether the wait is an
    issue. If the data loader has workers and other programs use the CPU, the wait is not an issue,
    because the workers may be waiting for a core.
    """

    name = "data"
    label = "data wait"
    threshold = Threshold(share=0.09)
    is_overhead = True
    verb = "is spent"
    phrase = "waiting for data"
    fix = (
        "Load batches in DataLoader workers (num_workers=), or use cheaper transforms. With an "
        "IterableDataset, each worker must read different samples"
    )
    fix_with_workers = "Use more DataLoader workers, persistent_workers=True, or cheaper transforms"

    def part_fix(self, step: StepEvidence) -> str:
        return self.fix_with_workers if step.profile.run.workers else self.fix

    def judged_seconds(self, candidate: Candidate, step: StepEvidence) -> float:
        return super().judged_seconds(candidate, step) - handover_seconds(step.profile)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        return not (step.profile.run.workers and step.is_cpu_contended)


class DataWaitOfRun(RunRule):
    """The training loop waits for batches, in all steps or only in slow steps."""

    name = "data"
    threshold = DataWait.threshold
    verb = "is spent"
    phrase = DataWait.phrase
    fix = DataWait.fix
    fix_if_unknown = (
        "Load batches in more DataLoader workers (num_workers=), or use cheaper transforms"
    )

    def fix_for(self, run: RunEvidence) -> str:
        if run.profile is None:
            return self.fix_if_unknown
        return DataWait.fix_with_workers if run.profile.run.workers else self.fix

    def excused_seconds(self, run: RunEvidence) -> float:
        if run.profile is None:
            return 0.0
        return handover_seconds(run.profile) * run.ledger.steps

    def allowance(self, run: RunEvidence) -> float:
        """Return the factor by which the threshold rises because other programs use the CPU.

        It is 1 if the loop waits for data in a regular pattern, such as in every third step,
        because other programs do not delay the run in such a pattern.
        """
        stalls = stalls_of(run.ledger)
        if stalls is not None and stalls.is_regular:
            return 1.0
        return super().allowance(run)

    def may_be_due_to_others(self, run: RunEvidence) -> bool:
        return run.profile is not None and bool(run.profile.run.workers)

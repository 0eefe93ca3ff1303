"""Rules about occasional slow steps: one for each cause that the ledger (time account) records."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import OnceAllowedRule, RunEvidence, RunRule


class GarbageCollection(OnceAllowedRule):
    """Python's garbage collector scans all objects again and again.

    A single step with a slow collection is not an issue. If other programs use the machine a lot,
    this is never an issue, because they slow down the collector.
    """

    name = "gc"
    threshold = Threshold(share=0.05)
    verb = "is spent in"
    phrase = "Python's garbage collector"
    fix = "Call gc.freeze() after start-up, or call gc.collect() less often"
    slow_cause = "gc"

    def may_be_due_to_others(self, run: RunEvidence) -> bool:
        return True


class NotScheduled(RunRule):
    """The process did not run, because other programs used its cores or because it was stopped.

    This is never an issue, because the training run is not the reason. If the process did not run
    for a large part of the time, lflops cannot rule out other issues.
    """

    name = "not_scheduled"
    threshold = Threshold(reported=0.05)
    verb = "is lost in"
    phrase = (
        "slow steps in which the process was not running: other programs used its cores, or it was "
        "stopped"
    )
    fix = "Run on an otherwise idle machine, with no more threads than cores"


class Swapping(RunRule):
    """Steps are slow because memory is read from disk (major page faults)."""

    name = "swap"
    threshold = Threshold(share=0.05)
    verb = "is lost in"
    phrase = "slow steps in which memory was read from disk (major page faults)"
    fix = "Use less memory: pages are read from disk because they do not fit into memory"


class AllocatorRetries(RunRule):
    """Steps are slow because the CUDA allocator frees its cache and tries again."""

    name = "allocator_retry"
    threshold = Threshold(share=0.05)
    verb = "is lost in"
    phrase = "slow steps in which the CUDA allocator freed its cache and tried again"
    fix = "Use less memory, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class SlowStepsOfOtherRanks(RunRule):
    """Steps are slow because this rank waits for another rank."""

    name = "other_rank"
    threshold = Threshold(share=0.05)
    verb = "is lost in"
    phrase = "slow steps in which this rank waited for another rank"
    fix = "Look at the machine, the data and the code of the rank that the other ranks wait for"
    same_as = frozenset({"rank", "communication"})

    def may_be_due_to_others(self, run: RunEvidence) -> bool:
        return True


class LargerBatches(RunRule):
    """Steps are slow because their batches are larger."""

    name = "larger_batch"
    threshold = Threshold(share=0.05)
    verb = "is lost in"
    phrase = "slow steps with a larger batch than usual"
    fix = "Use batches of about the same size"


class UnexplainedSlowSteps(OnceAllowedRule):
    """Some steps are slow, and lflops does not know the cause.

    A single slow step is not an issue.
    """

    name = "unknown"
    threshold = Threshold(share=0.05)
    verb = "is lost in"
    phrase = "steps that are slow for an unknown reason"
    fix = "When steps become slow again, profile a window of the run: lflops window DIR"
    slow_cause = "unknown"

"""Rules about threads that compete for the CPU cores."""

import statistics
from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.profile.steps import Step, is_disturbed

FEWEST_STEPS = 3
"""Other threads are examined only if there are at least this many module-timing steps."""


class TooManyThreads(StepRule):
    """Torch computes with more threads than cores, which makes all times longer."""

    name = "threads"
    threshold = Threshold(share=0.0)
    sentence = (
        "torch computes with {threads} threads on {cores} cores: the threads take turns, so "
        "everything takes longer."
    )
    fix = (
        "Use no more threads than cores: call torch.set_num_threads({cores}), or set "
        "OMP_NUM_THREADS={cores}"
    )
    right = (8, 8)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        run = step.profile.run
        if run.threads is not None and run.cores is not None and run.threads > run.cores:
            facts: Facts = {"threads": run.threads, "cores": run.cores}
            yield Candidate(rule=self, seconds=None, facts=facts)


class ComputingThread(StepRule):
    """Another Python thread of the process keeps a core busy, and the training thread waits for it.

    This is detected only if torch uses a single thread for its operators.
    """

    name = "thread"
    threshold = Threshold(share=0.10)
    sentence = (
        "Another thread of this process computes while the training thread waits: this costs "
        "{cost}. Other findings may contain the same time."
    )
    fix = (
        "Find the thread that computes in the background, for example with py-spy. If it writes "
        "TensorBoard events, log less often. Otherwise, move its work into another process, "
        "because Python runs only one thread at a time"
    )
    right = (7, 7)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.profile.run.threads != 1:
            return
        known = []
        for each in step.profile.steps:
            share = _share_of_other_threads(each)
            if share is not None:
                known.append(share)
        if len(known) >= FEWEST_STEPS:
            yield Candidate(rule=self, seconds=max(statistics.median(known), 0.0) * step.mean)


def _share_of_other_threads(step: Step) -> float | None:
    """Return the share of a step in which only other threads of this process computed.

    Returns `None` if the step is not a module-timing step, or if the share is unknown.
    """
    if step.kind != "module_timing" or is_disturbed(step.marks):
        return None
    if not step.seconds or step.thread_cpu is None:
        return None
    scheduled = step.seconds - (step.thread_waited or 0.0)
    others = (step.cpu_user or 0.0) + (step.cpu_system or 0.0) - step.thread_cpu
    if scheduled <= 0 or others <= 0:
        return None
    return min(others, scheduled - step.thread_cpu) / scheduled

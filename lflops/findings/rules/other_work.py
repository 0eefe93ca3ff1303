"""Rules about work of the training loop outside all phases, such as callbacks and logging."""

from lflops import units
from lflops.findings.evidence import StepEvidence, is_lightning
from lflops.findings.part_rule import PartRule, main_hook
from lflops.findings.rule import Candidate, Threshold
from lflops.findings.run_rule import OnceAllowedRule, RunEvidence, UncertainRule
from lflops.profile.module_names import plain
from lflops.profile.notes import filled
from lflops.profile.profile import Run
from lflops.profile.records import Phase
from lflops.profile.series import summed

UNWATCHED_SHARE = 0.05
"""Matmuls outside all phases are ignored if their MACs are at most this share of forward's MACs.

If they have more MACs, the loop may train another model outside the phases.
"""

SLOWER_MATMULS = 3
"""Matmuls outside all phases may take this many times as long per MAC as the model."""

EXPLAINED_SHARE = 0.5
"""Matmuls explain the time outside all phases if they may take at least this share of it."""

MODEL_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")


class OtherWork(PartRule):
    """The step spends time outside all other phases, for example in callbacks or checkpoints.

    This time is not an issue if matmuls take most of it. The loop then trains another model that
    lflops does not monitor, such as the discriminator of a GAN. The time of these matmuls is
    estimated from the time that the monitored model needs per MAC.
    """

    name = "other"
    threshold = Threshold(share=0.12, seconds=0.0015)
    is_overhead = True
    verb = "is spent"
    phrase = (
        "outside forward, backward and the other phases, for example on metrics, logging, "
        "checkpoints or the preparation of batches"
    )
    phrase_with_place = "outside forward, backward and the other phases"
    fix = (
        "To see what takes the time, name parts of the loop with monitor.phase. Log, save and "
        "evaluate less often, and prepare batches in DataLoader workers"
    )
    fix_in_detected_loop = (
        "To see what takes the time, monitor the loop with lflops.monitor and name its parts with "
        "monitor.phase. Log, save and evaluate less often, and prepare batches in DataLoader "
        "workers"
    )
    fix_in_transformers = (
        "Look at the callbacks of the Trainer, at logging_steps, and at methods of the Trainer "
        "that you have overridden"
    )
    fix_in_lightning = (
        'Trainer(profiler="simple") shows the time of each callback and hook. Do the slowest work '
        "less often"
    )
    fix_in_place = "Do the work of {place} less often, or in another process"
    fix_with_host_syncs = (
        "Keep .item() and .cpu() out of the step: both make the host wait for the device"
    )

    phrase_with_matmuls = (
        "outside forward, backward and the other phases, where {macs} MACs run, for example in a "
        "model that lflops does not monitor"
    )
    fix_with_matmuls = "Look for the callback or the hook that calls this model"
    fix_with_matmuls_in_custom_loop = (
        "To see the time of this model separately, name its call with monitor.phase"
    )
    fix_with_matmuls_in_detected_loop = (
        "To see the time of this model separately, monitor the loop with lflops.monitor and name "
        "the call of this model with monitor.phase"
    )

    phrase_if_never_called = "outside all phases, because the monitored model was never called"
    fix_if_never_called = "Pass lflops the model that the loop calls"

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        return not _unmonitored_macs(step)

    def phrase_for(self, step: StepEvidence) -> str:
        if model_was_never_called(step):
            return self.phrase_if_never_called
        macs = _unmonitored_macs(step)
        return self.phrase_with_matmuls.format(macs=units.count(macs)) if macs else self.phrase

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        return main_hook(candidate, step) or super().place_of(candidate, step)

    def advise(self, candidate: Candidate, step: StepEvidence) -> str:
        place = self.place_of(candidate, step)
        if place:
            return filled(self.fix_in_place, {"place": plain(place)})
        return super().advise(candidate, step)

    def part_fix(self, step: StepEvidence) -> str:
        if model_was_never_called(step):
            return self.fix_if_never_called
        if _unmonitored_macs(step):
            return self._fix_with_matmuls(step.profile.run)
        if step.host_syncs:
            return self.fix_with_host_syncs
        return self.fix_in_loop(step.profile.run)

    def _fix_with_matmuls(self, run: Run) -> str:
        if run.is_auto_detected:
            return self.fix_with_matmuls_in_detected_loop
        if run.monitor == "lflops.monitor":
            return self.fix_with_matmuls_in_custom_loop
        return self.fix_with_matmuls

    @classmethod
    def fix_in_loop(cls, run: Run) -> str:
        """Return the advice for the kind of training loop, such as Lightning's."""
        if is_lightning(run):
            return cls.fix_in_lightning
        if run.monitor == "FlopsCallback":
            return cls.fix_in_transformers
        if run.is_auto_detected:
            return cls.fix_in_detected_loop
        return cls.fix


def _unmonitored_macs(step: StepEvidence) -> int:
    """Return the MACs outside all phases if they explain the time there, and otherwise 0."""
    macs = summed((count.phase, count.macs) for count in step.profile.op_counts)
    outside = macs.get("other", 0)
    if outside <= UNWATCHED_SHARE * macs.get("forward", 0):
        return 0
    phases = step.times.phases
    macs_of_model = sum(macs.get(phase, 0) for phase in MODEL_PHASES)
    seconds_of_model = sum(phases.get(phase, 0.0) for phase in MODEL_PHASES)
    if not macs_of_model or not seconds_of_model:
        return outside
    seconds = SLOWER_MATMULS * seconds_of_model / macs_of_model * outside
    return outside if seconds >= EXPLAINED_SHARE * phases.get("other", 0.0) else 0


def model_was_never_called(step: StepEvidence) -> bool:
    """Return whether neither the model nor any of its modules ran in any step.

    A profile without operator counts does not show which modules were called. In such a profile,
    the model counts as called if any step has a forward phase.
    """
    profile = step.profile
    if "" not in profile.uncalled:
        return False
    if any(each.phases.get("forward") for each in profile.steps):
        return False
    return not any(count.phase in MODEL_PHASES for count in profile.op_counts)


class OtherWorkOfRun(OnceAllowedRule):
    """Slow steps spend their extra time outside all other phases.

    A single slow step is not an issue.
    """

    name = "other"
    threshold = Threshold(share=0.05)
    verb = "is spent"
    phrase = OtherWork.phrase
    fix = OtherWork.fix_in_detected_loop
    slow_cause = "unknown"

    def fix_for(self, run: RunEvidence) -> str:
        if run.profile is None:
            return self.fix
        return OtherWork.fix_in_loop(run.profile.run)


class OtherWorkWithoutWindow(UncertainRule):
    """Steps spend time outside all other phases, in a run without a profiled window.

    This is an issue if it takes a quarter of the training time.
    """

    name = "other"
    category = "training/other"
    very_large_share = 0.25
    threshold = OtherWork.threshold
    verb = OtherWork.verb
    phrase = OtherWork.phrase
    fix = OtherWork.fix_in_detected_loop

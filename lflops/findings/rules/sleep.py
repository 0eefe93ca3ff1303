"""The rule about time in which the training thread sleeps or waits."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, ModuleRule, Threshold
from lflops.findings.rules.python_code import modules_of

MOST_OF_MODULE = 0.5
"""If the sleep takes more than this share of the module's time, the function is named."""


class SleepingThread(ModuleRule):
    """The training thread uses no CPU in the forward of a module: it sleeps or waits.

    If the module is slower than identical modules, another finding reports the time.

    This is reported only for runs on a CPU with one rank, because in other runs, the training
    thread also waits for a device or for other ranks. Waits for a core and for a batch are
    subtracted.
    """

    name = "sleep"
    is_overhead = True
    threshold = Threshold(share=0.05)
    sentence = (
        "{Cost} is spent in {where}{in_function}, while the training thread uses no CPU: it sleeps "
        "or waits."
    )
    fix = (
        "Look for time.sleep, locks, and access to files or the network in the forward of {where}, "
        "in its hooks, and in forward hooks of its direct submodules"
    )

    fix_in_place = "Look for time.sleep, locks, and access to files or the network in {place}"

    sentence_of_custom_loop = (
        "{Cost} is spent in {where}, or between the model and backward{in_function}, while the "
        "training thread uses no CPU: it sleeps or waits."
    )
    fix_of_custom_loop = (
        "Look for time.sleep, locks, and access to files or the network in the model's forward, in "
        "hooks, and between forward and backward"
    )

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        module = candidate.module
        if module not in step.profile.modules:
            return ""
        # If the thread sleeps in most of this time, the main function is the one that sleeps.
        is_most = (candidate.seconds or 0.0) > MOST_OF_MODULE * step.self_forward(module)
        return step.main_function("forward", module) if is_most else ""

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.sentence_of_custom_loop if _is_around_model(candidate, step) else self.sentence

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        if self.place_of(candidate, step):
            return self.fix_in_place
        return self.fix_of_custom_loop if _is_around_model(candidate, step) else self.fix

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        if step.sleep is not None and step.sleep.module not in modules_of(earlier, step):
            yield Candidate(rule=self, seconds=step.sleep.seconds, module=step.sleep.module)


def _is_around_model(candidate: Candidate, step: StepEvidence) -> bool:
    """Return whether the time might also be spent between the model and backward.

    Lightning's hooks show where the forward phase ends. In other loops, the forward phase ends when
    backward begins.
    """
    return not candidate.module and not step.is_lightning

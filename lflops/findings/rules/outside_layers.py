"""Code of the model that is in none of its layers."""

from collections.abc import Iterable, Sequence

from lflops.analysis.tree import total_seconds
from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, ModuleRule, Threshold, root_itself
from lflops.profile.records import ModulePhase


class OutsideLayers(ModuleRule):
    """The model spends time outside its layers, beyond what its own operators need.

    It is no issue if ranks wait for each other there, as DDP does before the model runs.
    """

    name = "outside"
    threshold = Threshold(share=0.12, reported=0.05)
    sentence = "{Cost} is spent in {itself}."
    fix = (
        "Keep .item(), images, prints and loops in Python out of training_step and forward, and "
        "name the parts of them with lflops.scope"
    )
    right = (32, 32)

    sentence_of_custom_loop = "{Cost} is spent in {itself}, or between it and backward."
    fix_of_custom_loop = (
        "Keep .item(), images, prints and loops in Python out of the model's forward and of the "
        "loss, and name the parts of them with lflops.scope"
    )

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        layers = [step.profile.modules[name].forward for name in step.children[""]]
        # Layers within a compiled model have no time.
        has_all_times = all(layer.seconds is not None for layer in layers if layer.calls)
        if layers and has_all_times:
            seconds = _seconds_outside(step)
            if seconds is not None:
                facts: Facts = {"itself": root_itself(step.root.class_name)}
                yield Candidate(rule=self, seconds=seconds, facts=facts)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        return ModulePhase("", "forward") not in step.profile.waits

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.sentence if step.is_lightning else self.sentence_of_custom_loop

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.fix if step.is_lightning else self.fix_of_custom_loop


def _seconds_outside(step: StepEvidence) -> float | None:
    if step.breakdown is not None:
        share = step.inefficient_share_of_root + step.breakdown.parts.get("forward", 0.0)
        return share * step.breakdown.seconds
    forward = step.root.forward
    if forward.seconds is None or forward.self_macs:
        return None
    communicating = sum(
        seconds for (module, _), seconds in step.times.communicating.items() if not module
    )
    self_seconds = max((total_seconds(step.root, own=True) or 0.0) - communicating, 0.0)
    around_model = max(step.times.phases.get("forward", 0.0) - forward.seconds.median, 0.0)
    return self_seconds + around_model

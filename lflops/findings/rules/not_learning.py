"""Rules about layers that run but do not learn."""

from collections.abc import Iterable, Mapping, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.profile.profile import ModuleProfile

MOSTLY_FROZEN_SHARE = 0.5
"""Frozen layers are reported if they have at least this share of the MACs of forward."""


class FrozenLayers(StepRule):
    """At least half of the forward matmuls are in frozen layers that no gradient passes through."""

    name = "frozen"
    threshold = Threshold(share=0.0)
    sentence = (
        "{frozen:percent} of the matmuls in forward are in frozen layers, and no gradient passes "
        "through these layers: they learn nothing."
    )
    fix = (
        "If these layers should learn, call requires_grad_(True) on them. Otherwise, compute the "
        "outputs of the layers once and reuse the outputs"
    )
    right = (8, 8)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        forward = step.root.forward.macs
        if not forward or not step.root.backward.macs:
            return
        frozen = 0
        for module in _modules_without_backward(step).values():
            if module.parameters and not module.trainable_parameters:
                frozen += module.forward.self_macs
        if frozen >= MOSTLY_FROZEN_SHARE * forward:
            facts: Facts = {"frozen": frozen / forward}
            yield Candidate(rule=self, seconds=None, facts=facts)


class UnusedLayer(StepRule):
    """A trainable layer runs in forward, but gets no gradient, because its output is not used."""

    name = "unused"
    threshold = Threshold(share=0.05)
    sentence = "{where} runs in forward, but no gradient reaches it: this costs {cost}."
    fix = "Remove {where} if nothing uses its output"
    right = (8, 8)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if not step.root.backward.macs:
            return
        unused = []
        for name, module in _modules_without_backward(step).items():
            if module.trainable_parameters and module.forward.macs:
                unused.append(name)
        for name in unused:
            parent = name.rpartition(".")[0]
            seconds = step.profile.modules[name].forward.seconds
            if parent not in unused and seconds is not None:
                yield Candidate(rule=self, seconds=seconds.median, module=name)


def _modules_without_backward(step: StepEvidence) -> Mapping[str, ModuleProfile]:
    """Return the modules that run no matmuls in backward, keyed by name."""
    return {
        name: module for name, module in step.profile.modules.items() if not module.backward.macs
    }

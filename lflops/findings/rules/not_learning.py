"""Rules about layers that run but do not learn."""

from collections.abc import Iterable, Mapping, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold, cost_of
from lflops.profile.profile import ModuleProfile
from lflops.profile.records import median_of
from lflops.profile.series import sum_known

MOSTLY_FROZEN_SHARE = 0.5
"""Frozen layers are reported if they have at least this share of the MACs of forward."""


class FrozenLayers(StepRule):
    """At least half of the forward matmuls are in frozen layers that no gradient passes through."""

    name = "frozen"
    threshold = Threshold(share=0.0)
    sentence = (
        "{frozen:percent} of the matmuls in forward are in frozen layers, and no gradient passes "
        "through these layers{cost_of_frozen}."
    )
    fix = (
        "If these layers should learn, call requires_grad_(True) on them. If they should not, and "
        "their inputs are the same in each epoch, compute their outputs once and reuse them"
    )
    right = (8, 8)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        forward = step.root.forward.macs
        if not forward or not step.root.backward.macs:
            return
        frozen = []
        for module in _modules_without_backward(step).values():
            if module.parameters and not module.trainable_parameters:
                frozen.append(module.forward)
        macs = sum(work.self_macs for work in frozen)
        if macs < MOSTLY_FROZEN_SHARE * forward:
            return
        seconds = None
        cost = ""
        if not step.are_module_times_unreliable:
            seconds = sum_known(median_of(work.self_seconds) for work in frozen)
        if seconds is not None:
            cost = f": they take {cost_of(seconds, step)}"
        facts: Facts = {"frozen": macs / forward, "cost_of_frozen": cost}
        yield Candidate(rule=self, seconds=seconds, facts=facts)


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

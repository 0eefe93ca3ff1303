"""The rule about layers whose output is not used."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule, Threshold
from lflops.profile.module_names import outermost


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
        for name, module in step.profile.modules.items():
            is_used = module.backward.macs
            if module.trainable_parameters and module.forward.macs and not is_used:
                unused.append(name)
        for name in outermost(unused):
            seconds = step.profile.modules[name].forward.seconds
            if seconds is not None:
                yield Candidate(rule=self, seconds=seconds.median, module=name)

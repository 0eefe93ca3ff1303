"""Rules about settings that make training slow or wrong.

lflops detects these settings in the counting step (the step in which it counts operators).
"""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule, Threshold
from lflops.profile.notes import notes_with


class NotedSetting(StepRule):
    """A rule about a setting that makes training slow or wrong. Its cost is unknown.

    The rule finds the setting if the profile has a note with the name of the rule as its code.
    """

    threshold = Threshold(share=0.0)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        for note in notes_with(self.name, step.profile.notes):
            yield Candidate(rule=self, seconds=None, facts=note.values)


class AnomalyMode(NotedSetting):
    """Autograd's anomaly detection is on."""

    name = "anomaly_mode"
    sentence = "Autograd's anomaly detection is on, which slows down every step."
    fix = "Turn off torch.autograd.set_detect_anomaly"
    right = (8, 8)


class EvalMode(NotedSetting):
    """All modules are in eval mode during training."""

    name = "eval_mode"
    sentence = (
        "All modules are in eval mode during training: dropout is off, and normalization layers do "
        "not update their statistics."
    )
    fix = "Call model.train() before training, and after each validation"
    right = (8, 8)


class GraphBreaks(NotedSetting):
    """torch.compile splits the model's graph at unsupported code."""

    name = "graph_breaks"
    sentence = (
        "torch.compile breaks the graph in {places:place}: Python code runs at each break, and no "
        "kernel is fused across a break."
    )
    fix = (
        "Run with TORCH_LOGS=graph_breaks to see the places and reasons, such as prints, .item(), "
        "and calls that cannot be traced"
    )


class FindUnusedParameters(NotedSetting):
    """DistributedDataParallel searches for unused parameters in each step, but there are none."""

    name = "find_unused"
    sentence = (
        "DistributedDataParallel looks for unused parameters in each step, but all parameters are "
        "used."
    )
    fix = "Remove find_unused_parameters=True"
    right = (8, 8)

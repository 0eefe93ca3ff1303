"""Rules about modules that are slower than similar modules, such as the other layers of a stack."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, ModuleRule, Threshold, others_like


class SlowModule(ModuleRule):
    """A module takes longer than identical modules, though it runs the same operators."""

    name = "slow"
    threshold = Threshold(share=0.0, seconds=0.0002)
    sentence = "{where} takes {ratio:times} as long as {others}, which costs {cost}."
    fix = "Look for hooks, prints or copies that run only in {where}"
    right = (16, 16)

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        explained = {repeat.module for repeat in step.unlike_repeats}
        explained |= {candidate.module for candidate in earlier if candidate.module}
        for outlier in step.outliers:
            if outlier.module not in explained:
                others = others_like(outlier.others)
                facts: Facts = {
                    "ratio": outlier.seconds / outlier.usual_seconds,
                    "others": f"each of {others}" if outlier.others > 1 else others,
                }
                yield Candidate(
                    rule=self, seconds=outlier.excess, module=outlier.module, facts=facts
                )


class MoreOperators(ModuleRule):
    """A repeated module takes longer than the other repeats because it runs more operators."""

    name = "calls"
    threshold = Threshold(share=0.0)
    sentence = (
        "{where} runs {calls} operators, while {others} run {usual_calls} each: this costs {cost}."
    )
    fix = "If {where} has a loop, replace it with a few large operators, or compile the module"
    right = (8, 8)

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        for repeat in step.unlike_repeats:
            if not repeat.has_wider_dtype:
                facts: Facts = {
                    "calls": repeat.calls,
                    "usual_calls": repeat.usual_calls,
                    "others": others_like(repeat.others),
                }
                yield Candidate(
                    rule=self, seconds=repeat.excess_seconds, module=repeat.module, facts=facts
                )

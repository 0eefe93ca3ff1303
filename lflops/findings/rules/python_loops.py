"""The rule about modules with matmuls that call many operators in a Python loop."""

from collections.abc import Iterable, Sequence

from lflops import units
from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.findings.rules.no_matmuls import NoMatmuls, own_code
from lflops.findings.rules.python_code import in_brackets

LOOPS_IN_CPP = {"RNN", "LSTM", "GRU"}
"""Modules of torch that call many operators without a loop in Python."""


class PythonLoop(StepRule):
    """A module calls at least 200 operators each time that it is called.

    Such a module probably computes in a Python loop. lflops reports this only if the chip's peak is
    unknown. Modules without matmuls are reported by the rule `no_products`.
    """

    name = "loop"
    threshold = Threshold(reported=0.05)
    sentence = "{Cost} is spent in {where}{class} itself, which makes {calls} operator calls."
    fix = NoMatmuls.fix_of_loop

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.breakdown is not None or step.are_module_times_unreliable:
            return
        found = {step.patterns.get(each.module, each.module) for each in earlier}
        for modules in step.busiest:
            code = own_code([modules.pattern], step)
            is_loop = code.has_loop and modules.kind not in LOOPS_IN_CPP
            # The rule `outside` is about the root itself.
            if not modules.pattern or not modules.macs or not is_loop or modules.pattern in found:
                continue
            facts: Facts = {
                "class": in_brackets(modules.kind, modules.name),
                "calls": units.count(code.operators.calls),
            }
            candidate = Candidate(
                rule=self, seconds=modules.seconds, module=modules.pattern, facts=facts
            )
            if self.is_reported(candidate, step):
                yield candidate

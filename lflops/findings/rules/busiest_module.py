"""The rule about the module that takes the most time.

It applies if there is no other finding, or if the chip's peak is unknown.
"""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule
from lflops.findings.rules.python_code import in_brackets


class BusiestModule(StepRule):
    """One module takes more time than any other module.

    lflops reports this if there is no other finding, or if the chip's peak is unknown.
    """

    name = "busiest"
    title = "busiest module: {where}{class}{itself}"
    sentence = "Among the modules, the most time is spent in {where}{class}{itself}: {cost}."
    sentence_without_peak = (
        "Among the modules, the most time is spent in {where}{class}{itself}: {cost}. The chip's "
        "peak is unknown, so lflops cannot tell how much time this should take."
    )
    fix_without_peak = 'Pass hardware="measure" to {monitor}, which then measures the peak'
    fix_without_peak_in_detected_loop = (
        "Set the environment variable LFLOPS to hardware=measure: lflops then measures the peak"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        is_peak_missing = step.breakdown is None and not step.are_module_times_unreliable
        if not step.busiest or (earlier and not is_peak_missing):
            return
        # The rule `outside` is about the root itself.
        below_root = [modules for modules in step.busiest if modules.pattern]
        most = below_root[0] if below_root else step.busiest[0]
        if most.pattern:
            found = {step.patterns.get(each.module, each.module) for each in earlier}
            is_found = most.pattern in found
        else:
            is_found = any(each.rule.name == "outside" for each in earlier)
        if not is_found:
            modules = step.modules_at(most.pattern) if most.pattern else []
            has_submodules = any(step.children[name] for name in modules)
            facts: Facts = {
                "class": in_brackets(most.kind, most.name) if most.name else "",
                "itself": " itself, outside its submodules" if has_submodules else "",
            }
            yield Candidate(
                rule=self,
                seconds=most.seconds,
                module=most.name,
                facts=facts,
                is_rest=bool(earlier),
            )

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.sentence_without_peak if candidate.is_rest else self.sentence

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        if not candidate.is_rest:
            return self.fix
        if step.profile.run.is_auto_detected:
            return self.fix_without_peak_in_detected_loop
        return self.fix_without_peak.replace("{monitor}", step.profile.run.monitor or "lflops")

"""Rules about the modules that take the most time.

They apply if there is no other finding, or if the chip's peak is unknown.
"""

from collections.abc import Iterable, Mapping, Sequence

from lflops import units
from lflops.analysis.tree import TIMED_PHASES
from lflops.findings.evidence import StepEvidence
from lflops.findings.own_operators import MANY_CALLS
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.findings.rules.python_code import PythonCode, in_brackets, python_seconds

MAIN_SHARE = 0.5
"""If one of several repeated modules takes at least this share of their time, it is named alone."""

LONG_BACKWARD = 1e-3
"""Python code in a module's backward can be an issue if a call takes at least this many seconds."""


class NoMatmuls(StepRule):
    """A module spends time in operators without matmuls, such as norms and activations.

    lflops reports this only if the chip's peak is unknown. It is an issue only on a CPU, and only
    if Python code of the user takes most of the time. This is the case if most of the time is in
    backward but not in operators, or if it is in forward and the submodules have forward hooks.
    """

    name = "no_products"
    threshold = Threshold(share=0.10, reported=0.05)
    sentence = "{Cost} is spent in {where}{class} itself{hooks}{operators}."
    fix = "Fuse the operators of {where}, for example with torch.compile"
    fix_of_one_operator = (
        "Fuse the operator of {where} with the operators before and after it, for example with "
        "torch.compile"
    )
    fix_if_unknown = (
        "To see what takes the time, name parts of the forward of {where} with lflops.scope, and "
        "look for Python loops"
    )
    fix_of_other_code = (
        "Look for Python code, locks, and access to files or the network in the {pass} of {where}"
    )

    fix_of_loop = (
        "{where} makes {calls} operator calls in a step. Replace Python loops by operators on whole "
        "tensors, or compile {where}, for example with torch.compile"
    )
    fix_of_hooks = "Do the work of the forward hooks on the layers of {where} only every N steps"

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.breakdown is not None or step.are_module_times_unreliable:
            return
        explained = set()
        in_python: Mapping[str, float] = {}
        for each in earlier:
            if not each.rule.is_reported(each, step):
                continue
            if isinstance(each.rule, PythonCode):
                in_python = python_seconds(step, earlier)
            else:
                explained.add(step.patterns.get(each.module, each.module))
        patterns = _patterns_with_operators(step) - explained
        for modules in step.busiest:
            if modules.pattern not in patterns or modules.macs:
                continue
            place = modules.pattern
            names = step.modules_at(place)
            seconds = modules.seconds
            if len(names) > 1 and modules.slowest_seconds >= MAIN_SHARE * modules.seconds:
                place, seconds = modules.slowest, modules.slowest_seconds
                names = [place]
            operators = step.operator_times.of(names, {"forward", "backward"})
            seconds -= step.sleeping_in(place) + in_python.get(modules.pattern, 0.0)
            more_in_forward = _more_in_forward(names, step)
            slower = "forward" if more_in_forward >= 0 else "backward"
            has_hooks = not step.with_hooked_layers.isdisjoint(names)
            calls = sum(step.profile.modules[name].calls for name in names)
            per_call = seconds / max(calls, 1)
            facts: Facts = {
                "class": in_brackets(modules.kind),
                "operators": operators.within(seconds),
                "is_explained": operators.explains(seconds),
                "is_unknown": bool(operators.traced) and not operators.are_traced(seconds),
                "is_one_operator": sum("backward" not in name for name in operators.names) == 1,
                "pass": slower,
                "hooks": " or in forward hooks on its layers" if has_hooks else "",
                "is_slow_forward": more_in_forward >= MAIN_SHARE * seconds,
                "has_loop": operators.calls >= MANY_CALLS * max(calls, 1),
                "calls": units.count(operators.calls),
                "has_long_backward": slower == "backward" and per_call >= LONG_BACKWARD,
            }
            yield Candidate(
                rule=self,
                seconds=seconds,
                module=place,
                facts=facts,
                operators=operators.times(seconds),
            )

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        if not step.is_on_cpu:
            return False
        if candidate.facts["hooks"] and candidate.facts["is_slow_forward"]:
            return True
        has_other_code = not candidate.facts["is_explained"]
        return has_other_code and bool(candidate.facts["has_long_backward"])

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        if candidate.facts["hooks"]:
            return self.fix_of_hooks
        if not candidate.facts["is_explained"]:
            return self.fix_of_other_code
        if candidate.facts["has_loop"]:
            return self.fix_of_loop
        if candidate.facts["is_unknown"]:
            return self.fix_if_unknown
        return self.fix_of_one_operator if candidate.facts["is_one_operator"] else self.fix


def _more_in_forward(names: Sequence[str], step: StepEvidence) -> float:
    """Return the seconds by which forward of the modules themselves takes longer than backward."""
    difference = 0.0
    for name in names:
        module = step.profile.modules[name]
        for work, sign in ((module.forward, 1), (module.backward, -1)):
            if work.self_seconds is not None:
                difference += sign * work.self_seconds.median
    return difference


def _patterns_with_operators(step: StepEvidence) -> set[str]:
    """Return the patterns (`layers.*.mlp`) of modules that run operators outside their submodules.

    Compiled modules are left out, because their self time is unknown.
    """
    patterns = set()
    for name, module in step.profile.modules.items():
        runs_operators = any(module.work(phase).self_calls for phase in TIMED_PHASES)
        if name and runs_operators and not module.compiled:
            patterns.add(step.patterns[name])
    return patterns


class BusiestModule(StepRule):
    """One module takes more time than any other module.

    lflops reports this if there is no other finding, or if the chip's peak is unknown.
    """

    name = "busiest"
    sentence = "Among the modules, the most time is spent in {where}{class}: {cost}."
    sentence_without_peak = (
        "Among the modules, the most time is spent in {where}{class}: {cost}. The chip's peak is "
        "unknown, so lflops cannot tell how fast this module could be."
    )
    fix_without_peak = 'Pass hardware="measure": lflops then measures the peak of this chip'
    fix_without_peak_in_detected_loop = (
        "Set LFLOPS=hardware=measure: lflops then measures the peak of this chip"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        is_peak_missing = step.breakdown is None and not step.are_module_times_unreliable
        if not step.busiest or (earlier and not is_peak_missing):
            return
        # The rule `outside` is about the root itself.
        below_root = [modules for modules in step.busiest if modules.pattern]
        most = below_root[0] if below_root else step.busiest[0]
        found = {step.patterns.get(each.module, each.module) for each in earlier}
        if not most.pattern or most.pattern not in found:
            facts: Facts = {"class": in_brackets(most.kind) if most.name else ""}
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
        return self.fix_without_peak

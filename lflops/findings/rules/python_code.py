"""The rule about modules that spend their time in Python code."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, ModuleRule, StepRule, Threshold
from lflops.findings.rules.gradient_hooks import GradientHooks

SECONDS_PER_MODULE = 50e-6
"""Upper bound on the seconds that it takes to call a module, without the work in its forward."""

MOSTLY_PYTHON = 3
"""A module is reported if it takes this many times as long as its operators and its calls together.

`calling_seconds` estimates the time of the calls. A module without operators is always reported.
"""


class PythonCode(StepRule):
    """In forward, the Python code of modules takes longer than the operators that it runs.

    Typical causes are forward hooks, prints and loops in Python. A module that runs operators is
    reported only if a trace shows that it takes at least three times as long as its operators need.
    """

    name = "python"
    threshold = Threshold(share=0.05)
    sentence = (
        "{Cost} is spent in {where}{class} itself{others}{in_function}, {beyond}: in hooks, prints "
        "or other Python code."
    )
    fix = (
        "Look for Python loops and calls of print in the forward of {where}, and for forward hooks "
        "on its layers"
    )

    fix_in_place = "Look for Python loops and calls of print in {place}"

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.fix_in_place if self.place_of(candidate, step) else self.fix

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        return step.main_function("forward", candidate.module)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if not step.profile.is_counted or step.are_module_times_unreliable:
            return
        by_pattern = python_seconds(step, earlier)
        if not by_pattern:
            return
        most = max(by_pattern, key=by_pattern.__getitem__)
        modules = [step.profile.modules[name] for name in step.modules_at(most)]
        beyond = "although it runs no operators"
        if any(module.forward.self_calls for module in modules):
            beyond = "beyond the time of its operators"
        others = 0
        for pattern in by_pattern:
            if pattern != most:
                others += len(step.modules_at(pattern))
        noun = "module" if others == 1 else "modules"
        facts: Facts = {
            "class": in_brackets(modules[0].class_name),
            "beyond": beyond,
            "others": f" and in {others} other {noun}" if others else "",
        }
        seconds = sum(by_pattern.values())
        yield Candidate(rule=self, seconds=seconds, module=most, facts=facts)


def python_seconds(step: StepEvidence, earlier: Sequence[Candidate]) -> dict[str, float]:
    """Return the seconds of Python code in slow modules, by pattern such as `layers.*.mlp`.

    Modules that earlier rules have found are left out, by their names or by their patterns.
    """
    explained = modules_of(earlier, step)
    by_pattern: dict[str, float] = {}
    for name, module in step.profile.modules.items():
        took = module.forward.self_seconds
        pattern = step.patterns.get(name, name)
        if not name or took is None or {name, pattern} & explained:
            continue
        operators = step.operator_times.of({name}, {"forward"})
        if operators.names and not (operators.traced and operators.are_known):
            continue
        usual = calling_seconds(name, step) + operators.seconds
        if not operators.names or took.median >= MOSTLY_PYTHON * usual:
            python = took.median - usual
            if python > 0:
                by_pattern[pattern] = by_pattern.get(pattern, 0.0) + python
    for each in earlier:
        # The extra time of a module in a slow rank is reported already.
        pattern = step.patterns.get(each.module, each.module)
        is_slow_rank = each.rank is not None and each.phase == "forward"
        if is_slow_rank and pattern in by_pattern and each.rule.is_reported(each, step):
            by_pattern[pattern] -= each.seconds or 0.0
    return {pattern: seconds for pattern, seconds in by_pattern.items() if seconds > 0}


def calling_seconds(name: str, step: StepEvidence) -> float:
    """Return an upper bound on the seconds per step to call a module and its direct submodules.

    All calls in the step are added up.
    """
    modules = step.profile.modules
    calls = max(modules[name].calls, 1)
    for child in step.children[name]:
        # A container such as `ModuleList` has no calls, but counts as called once.
        calls += max(modules[child].calls, 1)
    return SECONDS_PER_MODULE * calls * step.contention


def modules_of(candidates: Iterable[Candidate], step: StepEvidence) -> set[str]:
    """Return the modules (names or patterns) that the candidates are about.

    Candidates of rules that are not about modules are ignored. So are candidates about backward
    alone, and candidates that cost too little to be reported. The result can include the root,
    whose name is empty.
    """
    names = set()
    for candidate in candidates:
        rule = candidate.rule
        is_about_forward = isinstance(rule, ModuleRule) and not isinstance(rule, GradientHooks)
        if is_about_forward and rule.is_reported(candidate, step):
            names.add(candidate.module)
    return names


def in_brackets(class_name: str, module: str = "") -> str:
    """Format the class of a module, such as ` (GELU)`.

    Returns an empty string if the class is unknown, or if the module has the same name.
    """
    return f" ({class_name})" if class_name and class_name != module else ""

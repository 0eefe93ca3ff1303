"""The rule about hooks on parameters, which run in every backward pass."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, ModuleRule, Threshold
from lflops.profile.module_names import plain
from lflops.profile.notes import names_in

PYTHON_FACTOR = 1.2
"""Backward of a module counts as slow if it takes this many times as long as its operators need."""


class GradientHooks(ModuleRule):
    """Backward of modules whose parameters have hooks takes longer than its operators need.

    The counting step finds the hooks. The time of the operators comes from the trace, so lflops
    reports this only for a traced run on a CPU.
    """

    name = "gradient_hooks"
    title = "hooks on parameters in {hooked}"
    threshold = Threshold(share=0.10, seconds=0.001)
    is_lower_bound = True
    sentence = (
        "At least {cost} is spent in backward of modules whose parameters have hooks, mostly in "
        "{where}, beyond the time of their operators."
    )
    fix = "Let the hooks on parameters (Tensor.register_hook) work only every N steps"

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        if not step.is_on_cpu:
            return
        hooked = _hooked(step)
        beyond: dict[str, float] = {}
        for name in hooked:
            seconds = _seconds_beyond_operators(name, step)
            if seconds:
                beyond[name] = seconds
        if beyond:
            most = max(beyond, key=beyond.__getitem__)
            place = plain(most) if len(hooked) == 1 else f"{len(hooked)} modules"
            facts: Facts = {"hooked": place}
            yield Candidate(rule=self, seconds=sum(beyond.values()), module=most, facts=facts)


def hooked_patterns(step: StepEvidence) -> set[str]:
    """Return the patterns (`layers.*.mlp`) of the modules whose parameters have hooks."""
    return {step.patterns.get(name, name) for name in _hooked(step)}


def _hooked(step: StepEvidence) -> list[str]:
    return names_in("gradient_hooks", step.profile.notes)


def _seconds_beyond_operators(name: str, step: StepEvidence) -> float:
    """Return the seconds of a module's own backward in which no operator runs.

    The result is 0 if the time of the module or of its operators is unknown.
    """
    module = step.profile.modules.get(name)
    if module is None or module.backward.self_seconds is None:
        return 0.0
    took = module.backward.self_seconds.median
    took -= step.times.communicating.get((name, "backward"), 0.0)
    operators = step.operator_times.of({name}, {"backward"})
    if not operators.traced or not operators.are_known:
        return 0.0
    return took - operators.seconds if took >= PYTHON_FACTOR * operators.seconds else 0.0

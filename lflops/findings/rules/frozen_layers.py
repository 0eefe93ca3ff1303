"""Rules about frozen layers, and about gradients that are computed for frozen weights."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.own_operators import ATEN
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold, cost_of
from lflops.profile.module_names import plain
from lflops.profile.profile import ModuleProfile
from lflops.profile.records import median_of
from lflops.profile.series import sum_known

MOSTLY_FROZEN_SHARE = 0.5
"""Frozen layers are reported if they have at least this share of the MACs of forward."""

RATIO_WITH_WEIGHTS = 1.8
"""If backward has this many times as many MACs as forward, it computes gradients of weights."""

WEIGHT_PRODUCTS = {"mm", "addmm", "linear", "convolution", "convolution_backward"}
"""Operators that usually multiply by a weight. Both inputs of other matmuls may need gradients."""


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
        for module in step.profile.modules.values():
            is_frozen = module.parameters and not module.trainable_parameters
            if is_frozen and module.calls and not module.backward.macs:
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


class GradientsOfFrozenWeights(StepRule):
    """Backward computes gradients of frozen weights.

    A frozen weight needs no gradient, so backward has as many MACs as forward. But if the module
    adds a trainable part to the weight before the matmul, as in `x @ (W + B @ A)`, backward
    computes the gradient of the sum, which is as large as the weight.
    """

    name = "frozen_gradients"
    title = "gradients of frozen weights in {modules}"
    threshold = Threshold(share=0.10, reported=0.05)
    sentence = (
        "{Cost} is spent on gradients as large as frozen weights, in {modules}: a trainable part "
        "is probably added to these weights before the matmul, as in x @ (W + B @ A)."
    )
    fix = "Compute both parts separately, as in x @ W + (x @ B) @ A"

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.are_module_times_unreliable or step.profile.run.takes_derivatives:
            return
        with_other_macs = _modules_with_other_macs(step)
        found = []
        seconds = 0.0
        for name, module in step.profile.modules.items():
            timed = module.backward.self_seconds
            if timed is None or name in with_other_macs or not _has_large_gradients(module):
                continue
            found.append(name)
            seconds += timed.median * (1 - module.forward.self_macs / module.backward.self_macs)
        if found:
            modules = f"{len(found)} modules such as {plain(found[0])}"
            if len(found) == 1:
                modules = plain(found[0])
            facts: Facts = {"modules": modules}
            yield Candidate(rule=self, seconds=seconds, module=found[0], facts=facts)


def _has_large_gradients(module: ModuleProfile) -> bool:
    """Return whether most weights of a module are frozen, but backward has twice forward's MACs."""
    forward = module.forward.self_macs
    if not forward or module.trainable_parameters is None:
        return False
    is_frozen = module.trainable_parameters <= MOSTLY_FROZEN_SHARE * module.parameters
    has_adapter = module.trainable_parameters > 0
    is_leaf = module.forward.macs == forward
    is_large = module.backward.self_macs >= RATIO_WITH_WEIGHTS * forward
    return is_frozen and has_adapter and is_leaf and is_large


def _modules_with_other_macs(step: StepEvidence) -> set[str]:
    """Return the modules with MACs that are not products with a weight, such as attention."""
    found = set()
    for count in step.profile.op_counts:
        if count.macs and count.operator.removeprefix(ATEN) not in WEIGHT_PRODUCTS:
            found.add(count.module)
    return found

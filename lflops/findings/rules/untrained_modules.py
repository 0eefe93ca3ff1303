"""The rule about modules that get gradients, but are not trained."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule, Threshold
from lflops.profile.module_names import outermost
from lflops.profile.profile import ModuleProfile

WEIGHT_GRADIENTS_SHARE = 0.5
"""Share of a module's backward that computes gradients of its weights.

The rest computes the gradients of its inputs, which earlier modules may need.
"""


class UntrainedModules(StepRule):
    """Backward computes gradients of weights that no optimizer updates.

    For example, a teacher model runs without `torch.no_grad()`. If gradients pass through the
    module to earlier modules, only the gradients of its weights are unnecessary.
    """

    name = "untrained"
    title = "gradients of {where}, which is not trained"
    threshold = Threshold(share=0.10, reported=0.05)
    sentence = (
        "{Cost} is spent on gradients of {where}, but no optimizer updated its parameters in the "
        "counted step."
    )
    fix = (
        "If {where} should learn, pass its parameters to an optimizer. If it should not, call "
        "{where}.requires_grad_(False), and run it in torch.no_grad() unless earlier modules need "
        "gradients through it"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        without_optimizer = _parameters_without_optimizer(step)
        if without_optimizer <= 0 or step.are_module_times_unreliable:
            return
        untrained = []
        for name, module in step.profile.modules.items():
            if name and _is_untrained(module):
                untrained.append(name)
        modules = {name: step.profile.modules[name] for name in outermost(untrained)}
        parameters = sum(module.trainable_parameters for module in modules.values())
        if parameters > without_optimizer:
            return
        for name, module in modules.items():
            if module.backward.seconds is None:
                continue
            seconds = module.backward.seconds.median
            if _passes_gradients_on(module):
                seconds *= WEIGHT_GRADIENTS_SHARE
            yield Candidate(rule=self, seconds=seconds, module=name)


def _parameters_without_optimizer(step: StepEvidence) -> int:
    """Return the number of trainable parameters that no optimizer updates.

    The result is 0 if it is unknown, for example because the model is sharded.
    """
    optimized = step.profile.run.optimized_parameters
    root = step.root
    if optimized is None or root.local_parameters != root.parameters:
        return 0
    return root.trainable_parameters - optimized


def _is_untrained(module: ModuleProfile) -> bool:
    """Return whether backward computes gradients of a module without work of an optimizer.

    This is also true if lflops does not see the work, because the optimizer uses custom kernels.
    """
    has_gradients = bool(module.trainable_parameters and module.backward.macs)
    return has_gradients and not module.optimizer.calls


def _passes_gradients_on(module: ModuleProfile) -> bool:
    """Return whether backward computes the gradients of the module's inputs.

    Then each matmul has two matmuls in backward. Otherwise, the first layer has only one.
    """
    return module.backward.macs >= 2 * module.forward.macs

"""The rule about modules that get gradients, but are not trained."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, StepRule, Threshold
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
        if step.are_module_times_unreliable:
            return
        untrained = []
        # Some optimizers work on one flat copy of all parameters. Their work belongs to the root.
        has_updated_modules = False
        for name, module in step.profile.modules.items():
            if name and _is_untrained(module):
                untrained.append(name)
            elif name and module.optimizer.calls:
                has_updated_modules = True
        if not has_updated_modules:
            return
        for name in untrained:
            parent = name.rpartition(".")[0]
            module = step.profile.modules[name]
            if parent in untrained or module.backward.seconds is None:
                continue
            seconds = module.backward.seconds.median
            if _passes_gradients_on(module):
                seconds *= WEIGHT_GRADIENTS_SHARE
            yield Candidate(rule=self, seconds=seconds, module=name)


def _is_untrained(module: ModuleProfile) -> bool:
    """Return whether backward computes gradients of a module that no optimizer updates."""
    has_gradients = bool(module.trainable_parameters and module.backward.macs)
    return has_gradients and not module.optimizer.calls


def _passes_gradients_on(module: ModuleProfile) -> bool:
    """Return whether backward computes the gradients of the module's inputs.

    Then each matmul has two matmuls in backward. Otherwise, the first layer has only one.
    """
    return module.backward.macs >= 2 * module.forward.macs

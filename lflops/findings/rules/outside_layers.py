"""The rule about the code of the model outside all of its layers."""

from collections.abc import Iterable, Sequence

from lflops import units
from lflops.analysis.tree import total_seconds
from lflops.findings.evidence import StepEvidence
from lflops.findings.own_operators import FIX_OF_SLOW_OPERATOR, MANY_CALLS
from lflops.findings.rule import Candidate, Facts, ModuleRule, Threshold, root_itself
from lflops.findings.rules.python_code import calling_seconds
from lflops.profile.profile import ModuleProfile
from lflops.profile.records import ModulePhase, Phase

REFERENCE_SHARE = 0.1
"""A reference model has at least this share of the MACs of forward."""

PYTHON_SHARE = 0.5
"""Python code is the reason if it takes at least this share of the time outside the layers."""

SHORT_SLEEP = 0.1
"""A sleep of at most this share of the time outside the layers cannot be the main function's work.

The main function takes at least half of this time.
"""


class OutsideLayers(ModuleRule):
    """The model spends time outside its layers.

    This time is an issue if Python code takes most of it. It is not an issue if operators that the
    model calls itself, such as functional pooling, take most of it, or if ranks wait for each
    other during this time, for example under DDP before the model runs.
    """

    name = "outside"
    threshold = Threshold(share=0.12, reported=0.05)
    sentence = "{Cost} is spent in {itself}{in_function}{hooks}{operators}."
    fix = (
        "Keep .item(), image logging, prints, Python loops and frequent calls of self.log out of "
        "training_step and forward. To see which part takes the time, name the parts of these "
        "methods with lflops.scope"
    )

    sentence_of_custom_loop = (
        "{Cost} is spent in {itself}, or between the model and backward{in_function}{hooks}"
        "{operators}."
    )
    fix_of_custom_loop = (
        "Keep .item(), image logging, prints and Python loops out of the model's forward and out "
        "of the loss. To see what takes the time, name parts of this code with lflops.scope"
    )
    fix_if_unknown = (
        "To see what takes the time, name parts of the model's forward and of the loss with "
        "lflops.scope"
    )
    fix_of_operators = (
        "Fuse the operators that run outside the layers, in the model's forward or in the loss, "
        "for example with torch.compile. To see what takes the time, name parts of this code with "
        "lflops.scope"
    )

    fix_of_slow_operator = FIX_OF_SLOW_OPERATOR
    fix_of_loop = (
        "The code outside the layers makes {calls} operator calls in a step. Replace Python loops "
        "by operators on whole tensors, or compile this code with torch.compile"
    )
    fix_in_place = (
        "Keep .item(), image logging, prints, Python loops and frequent calls of self.log out of "
        "{place}"
    )
    fix_of_hooks = "Let the forward hooks on the layers work only every N steps"

    def detect_modules(
        self, step: StepEvidence, earlier: Sequence[Candidate]
    ) -> Iterable[Candidate]:
        layers = step.children[""]
        for name in layers:
            layer = step.profile.modules[name].forward
            # Layers inside a compiled model are not timed.
            if layer.calls and layer.seconds is None:
                return
        seconds = _seconds_outside(step)
        if layers and seconds is not None:
            seconds = max(seconds - step.sleeping_in(""), 0.0)
            operators = step.operator_times.of({""}, _phases_outside(step, seconds))
            times = operators.times(seconds)
            in_operators = operators.within(seconds)
            if operators.are_suspected(seconds) and _is_python(seconds, step):
                in_operators = ""
            if _has_reference_model(step.root):
                times = {}
                in_operators = (
                    f": {units.count(step.root.forward.self_macs)} MACs run there without a "
                    "backward pass, for example in a reference model"
                )
            has_hooks = step.hooked_shares.get("", 0.0) >= PYTHON_SHARE
            facts: Facts = {
                "itself": root_itself(step.profile),
                "hooks": ", or in forward hooks on the layers" if has_hooks else "",
                "operators": in_operators,
                "is_explained": bool(operators.names) and operators.explains(seconds),
                "has_loop": operators.calls >= MANY_CALLS * max(step.root.calls, 1),
                "calls": units.count(operators.calls),
                "slow_operator": operators.slow_operator(seconds),
            }
            yield Candidate(rule=self, seconds=seconds, facts=facts, operators=times)

    def is_confirmed(self, candidate: Candidate, step: StepEvidence) -> bool:
        if ModulePhase("", "forward") in step.profile.waits:
            return False
        return _is_python(candidate.seconds or 0.0, step)

    def place_of(self, candidate: Candidate, step: StepEvidence) -> str:
        # A function that sleeps is named by another finding.
        is_awake = step.sleeping_in("") <= SHORT_SLEEP * step.self_forward("")
        return step.main_function("forward") if is_awake else ""

    def sentence_for(self, candidate: Candidate, step: StepEvidence) -> str:
        return self.sentence if step.is_lightning else self.sentence_of_custom_loop

    def fix_for(self, candidate: Candidate, step: StepEvidence) -> str:
        if candidate.facts["hooks"]:
            return self.fix_of_hooks
        if not _is_python(candidate.seconds or 0.0, step):
            if candidate.facts["slow_operator"]:
                return self.fix_of_slow_operator
            is_explained = candidate.facts["is_explained"]
            if is_explained and candidate.facts["has_loop"]:
                return self.fix_of_loop
            return self.fix_of_operators if is_explained and step.can_fuse else self.fix_if_unknown
        if self.place_of(candidate, step):
            return self.fix_in_place
        return self.fix if step.is_lightning else self.fix_of_custom_loop


def _seconds_outside(step: StepEvidence) -> float | None:
    if step.breakdown is not None:
        share = step.inefficient_share_of_root + step.breakdown.parts.get("forward", 0.0)
        return share * step.breakdown.seconds
    forward = step.root.forward
    if forward.seconds is None:
        return None
    communicating = []
    for (module, _), seconds in step.times.communicating.items():
        if not module:
            communicating.append(seconds)
    self_seconds = max((total_seconds(step.root, own=True) or 0.0) - sum(communicating), 0.0)
    return self_seconds + step.seconds_around_model


def _phases_outside(step: StepEvidence, seconds: float) -> set[Phase]:
    """Return the phases whose operators outside the layers may have taken the given seconds.

    In manual optimization, `training_step` may continue after backward. Its time counts as forward,
    but the operators that run there are counted in the phase `other`. They are included only if the
    trace shows that they explain the time, that those of forward and backward do not, and that they
    take longer than the code outside all phases.
    """
    passes: set[Phase] = {"forward", "backward"}
    with_other: set[Phase] = passes | {"other"}
    if step.operator_times.of({""}, passes).are_traced(seconds):
        return passes
    parts = step.times.parts
    outside_phases = parts.get("other", 0.0) + parts.get("clip", 0.0)
    if step.operator_times.of({""}, {"other"}).seconds <= outside_phases:
        return passes
    operators = step.operator_times.of({""}, with_other)
    is_explained = operators.are_traced(seconds) and operators.explains(seconds)
    return with_other if is_explained else passes


def _is_python(seconds: float, step: StepEvidence) -> bool:
    """Return whether Python code takes most of the given seconds outside the layers.

    Only forward is examined, because code that runs in backward has its own rules. If the time of
    forward or of its operators is unknown, the result is true only if there is a step breakdown.
    """
    forward = step.root.forward.self_seconds
    if forward is None or not step.profile.is_counted:
        return step.breakdown is not None
    phases = _phases_outside(step, seconds) - {"backward"}
    operators = step.operator_times.of({""}, phases)
    python = forward.median + step.seconds_around_model - operators.seconds
    python -= calling_seconds("", step) + step.sleeping_in("")
    return python >= PYTHON_SHARE * seconds


def _has_reference_model(root: ModuleProfile) -> bool:
    """Return whether another model without a backward pass seems to run outside the layers.

    In reinforcement learning from feedback, this is the reference model.
    """
    is_model = root.forward.self_macs >= REFERENCE_SHARE * root.forward.macs > 0
    return is_model and bool(root.backward.macs) and not root.backward.self_macs

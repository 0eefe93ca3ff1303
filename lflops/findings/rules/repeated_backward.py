"""Rules about backward passes that run more often than usual."""

from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.profile.records import Phase

USUAL_RATIO = 2
"""Usual ratio of the MACs of backward to the MACs of forward, if backward runs once per step."""

LARGE_RATIO = 2.5
"""Minimum ratio of the MACs of backward to the MACs of forward if backward runs more than once."""

LARGEST_CALL = 3
"""Maximum ratio of the largest backward operator's MACs to the largest forward operator's MACs.

Attention comes closest to this ratio: it has five matmuls in backward and two in forward. If the
ratio is exceeded, the backward operator has no counterpart in forward. The MACs of forward and
backward then cannot be compared, and nothing is reported.
"""


class FurtherDerivatives(StepRule):
    """The step computes derivatives in addition to the gradients of the parameters.

    Examples are gradient penalties, and the norms of the gradients of several losses, which
    `torch.autograd.grad` or `create_graph=True` computes. This finding is never an issue, because
    the training may need these derivatives.
    """

    name = "derivatives"
    threshold = Threshold(reported=0.05)
    sentence = (
        "{Cost} is spent on derivatives that torch.autograd.grad or create_graph=True computes in "
        "addition to the gradients: backward has {ratio:times} as many MACs as forward, where "
        "twice as many are usual."
    )
    fix = (
        "Compute the additional derivatives only in some of the steps, or for fewer layers, if the "
        "training allows it"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        forward = step.root.forward.macs
        backward = step.root.backward.macs
        timed = step.root.backward.seconds
        if not step.profile.run.takes_derivatives or timed is None:
            return
        if step.are_module_times_unreliable or _has_other_backward(step):
            return
        if not forward or backward < LARGE_RATIO * forward:
            return
        facts: Facts = {"ratio": backward / forward}
        seconds = timed.median * _share_beyond_usual(forward, backward)
        yield Candidate(rule=self, seconds=seconds, facts=facts)


def _share_beyond_usual(forward: int, backward: int) -> float:
    """Return the share of backward's MACs beyond the usual ratio."""
    return 1 - USUAL_RATIO * forward / backward


class RepeatedBackward(StepRule):
    """Backward has at least 2.5 times as many MACs as forward, so it runs more than once.

    Twice as many MACs are normal, because backward computes gradients of the inputs and of the
    weights.

    Nothing is reported if the step computes derivatives with `torch.autograd.grad` or
    `create_graph=True`, for example for a gradient penalty, because backward then also
    differentiates these derivatives. Also, nothing is reported if an operator of backward is much
    larger than every operator of forward. Such an operator belongs to a function without matmuls in
    forward, for example a Cholesky decomposition.
    """

    name = "backward_twice"
    threshold = Threshold(share=0.05)
    sentence = (
        "Backward has {ratio:times} as many MACs as forward, but only twice as many are normal: "
        "this costs {cost}."
    )
    fix = "Call backward once, on the sum of the losses"
    right = (7, 7)

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        if step.profile.run.takes_derivatives:
            return
        forward = step.root.forward.macs
        backward = step.root.backward.macs
        if not forward or backward < LARGE_RATIO * forward:
            return
        if _has_other_backward(step):
            return
        facts: Facts = {"ratio": backward / forward}
        seconds = step.times.phases.get("backward", 0.0) * _share_beyond_usual(forward, backward)
        yield Candidate(rule=self, seconds=seconds, facts=facts)


def _has_other_backward(step: StepEvidence) -> bool:
    """Return whether an operator of backward has no counterpart in forward."""
    return _largest_call(step, "backward") > LARGEST_CALL * _largest_call(step, "forward")


def _largest_call(step: StepEvidence, phase: Phase) -> float:
    """Return the MACs of the largest operator call in a phase.

    Only the mean over all calls of an operator in a module is known, so the largest mean is used.
    """
    largest = 0.0
    for count in step.profile.op_counts:
        if count.phase == phase and count.calls:
            largest = max(largest, count.macs / count.calls)
    return largest

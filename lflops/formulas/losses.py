"""Losses and fused optimizers that need more than one operation per element."""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, Values, formula

Lengths = Values | list[int] | Shape
"""Lengths of sequences: a list, the numbers in a tensor, or a tensor's shape if unknown."""

# Operations per element of a logsumexp.
_LOG_SUM_EXP = 4

# A state is reached from three states, and multiplied by a probability.
CTC_FORWARD = 3 * _LOG_SUM_EXP + 1

# The same from the end. The product of both directions is added to the sums of its label.
CTC_BACKWARD = CTC_FORWARD + 2 * _LOG_SUM_EXP + 1

SOFTMAX_BACKWARD = 4


def _ctc_states(steps: Lengths, labels: Lengths) -> int:
    """The states of all alignments, over all time steps.

    A state is a label, or a blank before, between or after labels.
    """
    for lengths in (steps, labels):
        if not isinstance(lengths, list | Values):
            raise NotImplementedError("the lengths of the sequences are unknown")
    states = 0
    for step_count, label_count in zip(steps, labels, strict=True):
        states += step_count * (2 * label_count + 1)
    return states


@formula("_ctc_loss", reads="input_lengths target_lengths")
def ctc_loss(
    log_probs: Shape, targets: Shape, *, input_lengths: Lengths, target_lengths: Lengths
) -> Cost:
    """All alignments, step by step."""
    return Cost(other_flops=CTC_FORWARD * _ctc_states(input_lengths, target_lengths))


@formula("_ctc_loss_backward", reads="input_lengths target_lengths")
def ctc_loss_backward(
    grad: Shape,
    log_probs: Shape,
    targets: Shape,
    *,
    input_lengths: Lengths,
    target_lengths: Lengths,
) -> Cost:
    """All alignments from the end, and the gradient of a softmax."""
    states = _ctc_states(input_lengths, target_lengths)
    return Cost(other_flops=CTC_BACKWARD * states + SOFTMAX_BACKWARD * prod(log_probs))


@formula("_cudnn_ctc_loss", "miopen_ctc_loss", reads="input_lengths target_lengths")
def ctc_loss_and_gradient(
    log_probs: Shape, targets: Shape, *, input_lengths: Lengths, target_lengths: Lengths
) -> Cost:
    """The loss and its gradient from one kernel."""
    states = _ctc_states(input_lengths, target_lengths)
    operations = CTC_FORWARD + CTC_BACKWARD
    return Cost(other_flops=operations * states + SOFTMAX_BACKWARD * prod(log_probs))


def _margin_pairs(x: Shape, target: Values | Shape) -> int:
    """The pairs of a label and a class that is no label, over all samples.

    The labels of a sample end at the first -1. If they are unknown, this is the largest number of
    pairs: half of the classes are labels.
    """
    classes = x[-1] if x else 1
    if not isinstance(target, Values):
        labels = classes // 2
        return prod(x[:-1]) * labels * (classes - labels)
    pairs = 0
    for begin in range(0, len(target), classes or 1):
        sample = target[begin : begin + classes]
        end = sample.index(-1) if -1 in sample else len(sample)
        pairs += end * (classes - len(set(sample[:end])))
    return pairs


@formula("multilabel_margin_loss_forward", reads="target")
def multilabel_margin_loss(x: Shape, *, target: Values | Shape) -> Cost:
    """Two subtractions and an addition per pair."""
    is_known = isinstance(target, Values)
    return Cost(other_flops=3 * _margin_pairs(x, target), is_upper_bound=not is_known)


@formula("multilabel_margin_loss_backward", reads="target")
def multilabel_margin_loss_backward(grad: Shape, x: Shape, *, target: Values | Shape) -> Cost:
    """Two subtractions and two additions per pair, and each element times the gradient.

    The subtractions decide whether the pair counts.
    """
    is_known = isinstance(target, Values)
    return Cost(other_flops=4 * _margin_pairs(x, target) + prod(x), is_upper_bound=not is_known)


def _elements(parameters: Sequence[Shape]) -> int:
    return sum(map(prod, parameters))


@formula("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
def fused_adam(parameters: Sequence[Shape], *, weight_decay: float, amsgrad: bool) -> Cost:
    """10 operations per element, one more for weight decay, and one more for AMSGrad's maximum.

    The 10 are two running averages (2 + 3), a root, a division, an addition and the update (2).
    """
    operations = 10 + bool(weight_decay) + amsgrad
    return Cost(other_flops=operations * _elements(parameters))


def sgd_operations(
    *, momentum: float, weight_decay: float, nesterov: bool, is_first_step: bool
) -> int:
    """The operations per element of an update of SGD."""
    operations = 1 + bool(nesterov) + bool(weight_decay)
    if momentum and not is_first_step:
        operations += 2
    return operations


@formula("_fused_sgd", "_fused_sgd_")
def fused_sgd(
    parameters: Sequence[Shape],
    *,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    is_first_step: bool,
) -> Cost:
    """The update (1), a momentum after the first step (2), Nesterov (1) and weight decay (1)."""
    operations = sgd_operations(
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        is_first_step=is_first_step,
    )
    return Cost(other_flops=operations * _elements(parameters))


@formula("_fused_adagrad", "_fused_adagrad_")
def fused_adagrad(parameters: Sequence[Shape], *, weight_decay: float) -> Cost:
    """A sum of squares (2), a root, an addition, the update (2), and one for weight decay."""
    operations = 6 + bool(weight_decay)
    return Cost(other_flops=operations * _elements(parameters))

"""Formulas for losses and fused optimizers whose cost is more than one operation per element."""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, Values, formula

Lengths = Values | list[int] | Shape
"""Lengths of sequences: a list, or a tensor's values, or its shape if the values are unknown."""

# Number of operations per element of a logsumexp.
_LOG_SUM_EXP = 4

# Number of operations per state of the CTC recursion in forward: a logsumexp over three earlier
# states, and a product with a probability.
CTC_FORWARD = 3 * _LOG_SUM_EXP + 1

# Number of operations per state of the CTC recursion in backward. The recursion from the last step
# to the first costs as much as forward. In addition, the product of the two recursions' results is
# added to the logsumexp of the state's label.
CTC_BACKWARD = CTC_FORWARD + 2 * _LOG_SUM_EXP + 1

SOFTMAX_BACKWARD = 4


def _ctc_states(steps: Lengths, labels: Lengths) -> int:
    """Count the states of the CTC recursion over all time steps and samples.

    At each time step, there is a state for each label, and for each blank before, between and after
    the labels. These are 2 n + 1 states for n labels.
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
    """Cost of a CTC loss: a recursion over the time steps that sums over all alignments."""
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
    """Cost of the gradient of a CTC loss.

    The gradient needs a recursion from the last time step to the first, and the gradient of a
    softmax.
    """
    states = _ctc_states(input_lengths, target_lengths)
    return Cost(other_flops=CTC_BACKWARD * states + SOFTMAX_BACKWARD * prod(log_probs))


@formula("_cudnn_ctc_loss", "miopen_ctc_loss", reads="input_lengths target_lengths")
def ctc_loss_and_gradient(
    log_probs: Shape, targets: Shape, *, input_lengths: Lengths, target_lengths: Lengths
) -> Cost:
    """Cost of a kernel that computes a CTC loss together with its gradient."""
    states = _ctc_states(input_lengths, target_lengths)
    operations = CTC_FORWARD + CTC_BACKWARD
    return Cost(other_flops=operations * states + SOFTMAX_BACKWARD * prod(log_probs))


def _margin_pairs(x: Shape, target: Values | Shape) -> int:
    """Count the pairs of a label and another class in all samples, for a multilabel margin loss.

    The labels of a sample end at the first -1. The other classes are the classes that are not
    labels of the sample. If the labels are unknown, the result is the largest possible number of
    pairs, which is reached if half of the classes are labels.
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
    """Cost of a multilabel margin loss.

    Each pair of a label and another class of a sample needs two subtractions and an addition.
    """
    is_known = isinstance(target, Values)
    return Cost(other_flops=3 * _margin_pairs(x, target), is_upper_bound=not is_known)


@formula("multilabel_margin_loss_backward", reads="target")
def multilabel_margin_loss_backward(grad: Shape, x: Shape, *, target: Values | Shape) -> Cost:
    """Cost of the gradient of a multilabel margin loss.

    Each pair of a label and another class of a sample needs four operations: two subtractions to
    find whether the pair violates the margin, and an addition to the gradient of each of the two
    classes. Each element of the gradient needs one multiplication.
    """
    is_known = isinstance(target, Values)
    return Cost(other_flops=4 * _margin_pairs(x, target) + prod(x), is_upper_bound=not is_known)


def _elements(parameters: Sequence[Shape]) -> int:
    return sum(map(prod, parameters))


@formula("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
def fused_adam(parameters: Sequence[Shape], *, weight_decay: float, amsgrad: bool) -> Cost:
    """Cost of a fused Adam or AdamW update: at least 10 operations per element.

    The 10 operations are two running averages (2 + 3), a root, a division, an addition and the
    update (2). Weight decay and the maximum of AMSGrad need one more operation each.
    """
    operations = 10 + bool(weight_decay) + amsgrad
    return Cost(other_flops=operations * _elements(parameters))


def sgd_operations(
    *, momentum: float, weight_decay: float, nesterov: bool, is_first_step: bool
) -> int:
    """Count the operations of an SGD update per element."""
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
    """Cost of a fused SGD update.

    Per element, the update needs 1 operation. Momentum adds 2 operations after the first step,
    Nesterov momentum adds 1, and weight decay adds 1.
    """
    operations = sgd_operations(
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        is_first_step=is_first_step,
    )
    return Cost(other_flops=operations * _elements(parameters))


@formula("_fused_adagrad", "_fused_adagrad_")
def fused_adagrad(parameters: Sequence[Shape], *, weight_decay: float) -> Cost:
    """Cost of a fused Adagrad update.

    Per element, the sum of squares needs 2 operations, the root and an addition need 1 each, and
    the update needs 2. Weight decay adds 1 operation.
    """
    operations = 6 + bool(weight_decay)
    return Cost(other_flops=operations * _elements(parameters))

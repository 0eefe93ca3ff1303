"""Losses and optimizers' updates in one kernel that are more than an operation an element."""

from math import prod
from typing import Any

from lflops.formulas.table import Cost, Shape, Values, formula

_SUM_OF_EXPONENTIALS = (
    # operations an element of a logarithm of a sum of exponentials, as `logsumexp` has them
    4
)

# of sequences: a list, or the numbers in a tensor
Lengths = tuple[int, ...] | list[int]


def _ctc(
    log_probs: Shape, inputs: Lengths, targets: Lengths, operations: int, *, each: int = 0
) -> Cost:
    """So many operations a state and step; and so many an element of the input."""
    known = all(isinstance(given, list | Values) for given in (inputs, targets))
    if not known:
        raise NotImplementedError("the lengths of the sequences are not known")
    states = sum(
        steps * (2 * labels + 1)
        for steps, labels in zip(inputs, targets, strict=True)
        # the labels, and a blank around each
    )
    return Cost(other_flops=states * operations + prod(log_probs) * each)


# a state is reached from three, and times a probability
FORWARD = 3 * _SUM_OF_EXPONENTIALS + 1
BACKWARD = (
    FORWARD + 2 * _SUM_OF_EXPONENTIALS + 1
    # the same from the end; the product of both, added to those of its label
)


@formula("_ctc_loss", reads="input_lengths target_lengths")
def ctc_loss(
    log_probs: Shape, targets: Shape, *, input_lengths: Lengths, target_lengths: Lengths
) -> Cost:
    """Every alignment, step by step."""
    return _ctc(log_probs, input_lengths, target_lengths, FORWARD)


@formula("_ctc_loss_backward", reads="input_lengths target_lengths")
def ctc_loss_backward(
    grad: Shape,
    log_probs: Shape,
    targets: Shape,
    *,
    input_lengths: Lengths,
    target_lengths: Lengths,
) -> Cost:
    """Every alignment from the end, and a softmax's gradient."""
    return _ctc(log_probs, input_lengths, target_lengths, BACKWARD, each=4)


@formula("_cudnn_ctc_loss", "miopen_ctc_loss", reads="input_lengths target_lengths")
def both_of_ctc_loss(
    log_probs: Shape, targets: Shape, *, input_lengths: Lengths, target_lengths: Lengths
) -> Cost:
    """These give the gradient with the loss."""
    return _ctc(log_probs, input_lengths, target_lengths, FORWARD + BACKWARD, each=4)


def _pairs(x: Shape, target: Values | Shape) -> tuple[int, bool]:
    """Pairs of a label and a class that is none, over all rows; a row's labels end at the first below 0.

    And whether that is known.
    """
    classes = x[-1] if x else 1
    if not isinstance(target, Values):
        return prod(x[:-1]) * (classes // 2) * (classes - classes // 2), False
    pairs = 0
    for begin in range(0, len(target), classes or 1):
        row = target[begin : begin + classes]
        labels = row[: row.index(-1)] if -1 in row else row
        pairs += len(labels) * (classes - len(set(labels)))
    return pairs, True


@formula("multilabel_margin_loss_forward", reads="target")
def multilabel_margin_loss(x: Shape, *, target: Values | Shape) -> Cost:
    """Two subtractions and an addition a pair."""
    pairs, known = _pairs(x, target)
    return Cost(other_flops=3 * pairs, is_upper_bound=not known)


@formula("multilabel_margin_loss_backward", reads="target")
def multilabel_margin_loss_backward(grad: Shape, x: Shape, *, target: Values | Shape) -> Cost:
    """Two subtractions to see whether the pair counts, and two additions.

    Then each element times the gradient.
    """
    pairs, known = _pairs(x, target)
    return Cost(other_flops=4 * pairs + prod(x), is_upper_bound=not known)


def _elements(parameters: Any) -> int:
    return sum(prod(shape) for shape in parameters)


@formula("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
def fused_adam(parameters: Any, *, weight_decay: float, amsgrad: bool) -> Cost:
    """Two running averages (2 + 3), a root, a division, an addition, the update (2).

    10 an element; one more for a decay and a maximum.
    """
    return Cost(other_flops=_elements(parameters) * (10 + bool(weight_decay) + amsgrad))


@formula("_fused_sgd", "_fused_sgd_")
def fused_sgd(
    parameters: Any, *, momentum: float, weight_decay: float, nesterov: bool, is_first_step: bool
) -> Cost:
    """The update; two more operations for a momentum that is there already, one for Nesterov's, one for a decay."""
    averaging = 2 if momentum and not is_first_step else 0
    return Cost(other_flops=_elements(parameters) * (1 + averaging + nesterov + bool(weight_decay)))


@formula("_fused_adagrad", "_fused_adagrad_")
def fused_adagrad(parameters: Any, *, weight_decay: float) -> Cost:
    """A sum of squares (2), a root, an addition, the update (2); one more for a decay."""
    return Cost(other_flops=_elements(parameters) * (6 + bool(weight_decay)))

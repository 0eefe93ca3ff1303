"""Normalisations, by the convention.

5 operations an element, 2 with known statistics, one for a weight and one for a bias.
"""

from math import prod
from typing import Any

from lflops.formulas.table import Cost, Shape, adapted, formula, per_element


def _normalised(x: Shape, weight: Any, bias: Any, each: int) -> int:
    return prod(x) * (each + (weight is not None) + (bias is not None))


@formula("native_layer_norm")
def layer_norm(x: Shape, normalized: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Statistics over the last dimensions."""
    return Cost(other_flops=_normalised(x, weight, bias, 5))


@formula("native_layer_norm_backward")
def layer_norm_backward(
    grad: Shape,
    x: Shape,
    normalized: Shape,
    mean: Shape,
    rstd: Shape,
    weight: Shape | None,
    bias: Shape | None,
) -> Cost:
    """Twice the forward."""
    return Cost(other_flops=2 * _normalised(x, weight, bias, 5))


@formula("_fused_rms_norm")
def rms_norm(x: Shape, normalized: Shape, weight: Shape | None) -> Cost:
    """Square, sum, scale."""
    return Cost(other_flops=_normalised(x, weight, None, 3))


@formula("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Shape, x: Shape, normalized: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Twice the forward."""
    return Cost(other_flops=2 * _normalised(x, weight, None, 3))


@formula("native_group_norm")
def group_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Statistics over groups of channels."""
    return Cost(other_flops=_normalised(x, weight, bias, 5))


@formula("native_group_norm_backward")
def group_norm_backward(
    grad: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Twice the forward; where there is a weight there is a bias."""
    return Cost(other_flops=2 * _normalised(x, weight, weight, 5))


@formula(
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
)
def batch_norm(
    x: Shape, weight: Shape | None, bias: Shape | None, *, training: bool = True
) -> Cost:
    """Statistics over the batch in training, known ones otherwise."""
    return Cost(other_flops=_normalised(x, weight, bias, 5 if training else 2))


@formula("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def known_batch_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Subtract and scale."""
    return batch_norm(x, weight, bias, training=False)


@formula(
    "native_batch_norm_backward",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
    "batch_norm_backward",
)
def batch_norm_backward(
    grad: Shape, x: Shape, weight: Shape | None, *, train: bool = True, update: bool = True
) -> Cost:
    """Twice the forward; where there is a weight there is a bias."""
    return Cost(other_flops=2 * _normalised(grad, weight, weight, 5 if train and update else 2))


formula("batch_norm_stats")(
    per_element(4)
    # the first part over several ranks: sum; subtract, square, sum
)


@formula("batch_norm_elemt")
def synchronised_scaling(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """The second part: scale."""
    return Cost(other_flops=_normalised(x, weight, bias, 1))


# Between them the ranks' statistics become one: a mean and a variance, weighted by the counts, 3 an
# element each.
formula("batch_norm_gather_stats_with_counts")(adapted(per_element(6), "given"))


@formula("batch_norm_backward_reduce", "batch_norm_backward_elemt")
def synchronised_backward(
    grad: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Sums before the ranks meet and the gradient after it: half of twice the forward each."""
    return Cost(other_flops=_normalised(x, weight, weight, 5))

"""Formulas for normalisations.

A normalisation counts as 5 operations per element, or 2 if the statistics (mean and variance) are
known. This convention is explained in `conventions.toml`.
A weight and a bias cost one more operation each. Backward costs twice as much as forward.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula, per_element


def _normalised(
    x: Shape, weight: Shape | None, bias: Shape | None, *, operations: int, times: int = 1
) -> Cost:
    """Cost of a normalisation with `operations` per element, plus its weight and bias.

    The weight and the bias, if present, cost one more operation per element each. The total is
    multiplied by `times`, for example by 2 for a backward pass.
    """
    operations += (weight is not None) + (bias is not None)
    return Cost(other_flops=times * operations * prod(x))


@formula("native_layer_norm")
def layer_norm(x: Shape, normalized: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a layer norm, with statistics over the last dimensions."""
    return _normalised(x, weight, bias, operations=5)


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
    """Cost of the gradients: twice the forward pass."""
    return _normalised(x, weight, bias, operations=5, times=2)


@formula("_fused_rms_norm")
def rms_norm(x: Shape, normalized: Shape, weight: Shape | None) -> Cost:
    """Cost of an RMS norm: a square, a sum and a scale per element."""
    return _normalised(x, weight, None, operations=3)


@formula("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Shape, x: Shape, normalized: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Cost of the gradients: twice the forward pass."""
    return _normalised(x, weight, None, operations=3, times=2)


@formula("native_group_norm")
def group_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a group norm, with statistics over groups of channels."""
    return _normalised(x, weight, bias, operations=5)


@formula("native_group_norm_backward")
def group_norm_backward(
    grad: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Cost of the gradients: twice the forward pass.

    The operator does not receive the bias. If there is a weight, a bias is assumed.
    """
    return _normalised(x, weight, weight, operations=5, times=2)


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
    """Cost of a batch norm.

    In training, the statistics are computed over the batch. Otherwise, they are already known.
    """
    operations = 5 if training else 2
    return _normalised(x, weight, bias, operations=operations)


@formula("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def known_batch_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a batch norm with known statistics: subtract and scale."""
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
    """Cost of the gradients: twice the forward pass.

    The operator does not receive the bias. If there is a weight, a bias is assumed.
    """
    operations = 5 if train and update else 2
    return _normalised(grad, weight, weight, operations=operations, times=2)


# First part of synchronised batch norm. Each rank computes its statistics: a sum, and a difference,
# a square and a sum.
formula("batch_norm_stats")(per_element(4))

# Second part. The ranks' statistics are combined into a mean and a variance, weighted by the counts
# (3 operations per element each).
formula("batch_norm_gather_stats_with_counts")(adapted(per_element(6), "given"))


@formula("batch_norm_elemt")
def synchronised_scaling(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of the third and last part of synchronised batch norm, which scales the input."""
    return _normalised(x, weight, bias, operations=1)


@formula("batch_norm_backward_reduce", "batch_norm_backward_elemt")
def synchronised_backward(
    grad: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Cost of one of the two operators in the backward pass of synchronised batch norm.

    The first operator computes sums that the ranks then exchange, and the second one computes the
    gradient. Each has half of the cost of the backward pass.
    """
    return _normalised(x, weight, weight, operations=5)

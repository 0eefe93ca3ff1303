"""Formulas for normalisations.

By the convention in `conventions.toml`, a normalisation costs 5 operations per element, or 2 if the
statistics (mean and variance) are known. A weight and a bias cost one more operation per element
each. Backward costs twice as much as forward.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula, per_element


def _normalised(
    x: Shape, weight: Shape | None, bias: Shape | None, *, operations: int, times: int = 1
) -> Cost:
    """Cost of a normalisation with `operations` per element, and with its weight and bias.

    The weight and the bias each cost one more operation per element, unless they are `None`. The
    total is multiplied by `times`, which is 2 for a backward pass.
    """
    operations += (weight is not None) + (bias is not None)
    return Cost(other_flops=times * operations * prod(x))


@formula("native_layer_norm")
def layer_norm(x: Shape, normalized: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a layer norm, which computes statistics over the last dimensions."""
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
    """Cost of the gradients of a layer norm: twice the cost of forward."""
    return _normalised(x, weight, bias, operations=5, times=2)


@formula("_fused_rms_norm")
def rms_norm(x: Shape, normalized: Shape, weight: Shape | None) -> Cost:
    """Cost of an RMS norm: a square, an addition and a multiplication per element."""
    return _normalised(x, weight, None, operations=3)


@formula("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Shape, x: Shape, normalized: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Cost of the gradients of an RMS norm: twice the cost of forward."""
    return _normalised(x, weight, None, operations=3, times=2)


@formula("native_group_norm")
def group_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a group norm, which computes statistics over groups of channels."""
    return _normalised(x, weight, bias, operations=5)


@formula("native_group_norm_backward")
def group_norm_backward(
    grad: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Shape | None
) -> Cost:
    """Cost of the gradients of a group norm: twice the cost of forward.

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

    In training, the operator computes statistics over the batch. Otherwise, the statistics are
    already known.
    """
    operations = 5 if training else 2
    return _normalised(x, weight, bias, operations=operations)


@formula("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def known_batch_norm(x: Shape, weight: Shape | None, bias: Shape | None) -> Cost:
    """Cost of a batch norm with known statistics: a subtraction and a scaling per element."""
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
    """Cost of the gradients of a batch norm: twice the cost of forward.

    The operator does not receive the bias. If there is a weight, a bias is assumed.
    """
    operations = 5 if train and update else 2
    return _normalised(grad, weight, weight, operations=operations, times=2)


# The first part of synchronised batch norm. Each rank computes the mean (a sum) and the variance (a
# difference, a square and a sum) of its batch.
formula("batch_norm_stats")(per_element(4))

# The second part of synchronised batch norm. The means and variances of all ranks are combined into
# one mean and one variance, weighted by the number of samples. Each combination costs 3 operations
# per element.
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

    The first operator computes sums that the ranks then exchange, and the second operator computes
    the gradient. Each operator has half of the cost of the backward pass.
    """
    return _normalised(x, weight, weight, operations=5)

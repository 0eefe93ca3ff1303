"""Formulas for convolutions.

The weight has the shape [out, in / groups, *kernel]. The number of its elements is the number of
MACs at one position of the kernel.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula

GradientMask = tuple[bool, bool, bool]
"""Whether a backward pass computes the gradients of the input, of the weight, and of the bias."""


@formula(
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "mkldnn_convolution",
    "miopen_convolution",
    "miopen_depthwise_convolution",
    "cudnn_convolution",
    "_slow_conv2d_forward",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
    "_conv_depthwise2d",
    "conv_depthwise3d",
    "_nnpack_spatial_convolution",
)
def convolution(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None, transposed: bool = False
) -> Cost:
    """Cost of a convolution.

    The kernel is applied at each position of the output. In a transposed convolution, the kernel is
    applied at each position of the input instead.
    """
    has_bias = bias is not None
    return Cost(_products(x, weight, out, transposed=transposed), other_flops=prod(out) * has_bias)


def _products(x: Shape, weight: Shape, out: Shape, *, transposed: bool) -> int:
    """Count the MACs of a convolution over all positions at which the kernel is applied."""
    scanned = x if transposed else out
    batch = x[0]
    positions = prod(scanned[2:])
    return batch * positions * prod(weight)


@formula("conv_tbc")
def convolution_time_first(x: Shape, weight: Shape, bias: Shape, *, out: Shape) -> Cost:
    """Cost of a convolution of a sequence [time, batch, in] with a kernel [kernel, in, out]."""
    time, batch, _ = out
    return Cost(macs=time * batch * prod(weight), other_flops=prod(out))


@formula("cudnn_convolution_relu", "cudnn_convolution_add_relu")
def convolution_relu(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None, z: Shape | None = None
) -> Cost:
    """Cost of a convolution and a ReLU.

    `z` is an optional tensor that the operator scales and adds to the result before the ReLU.
    """
    plain = convolution(x, weight, out=out, bias=bias)
    operations = 1
    if z is not None:
        operations += 2
    return plain._replace(other_flops=plain.other_flops + operations * prod(out))


@formula(
    "cudnn_convolution_transpose",
    "miopen_convolution_transpose",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
)
def transposed_convolution(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None
) -> Cost:
    """Cost of a transposed convolution, which applies the kernel at each position of its input."""
    return convolution(x, weight, out=out, bias=bias, transposed=True)


@formula("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(
    grad: Shape, x: Shape, weight: Shape, *, output_mask: GradientMask, transposed: bool = False
) -> Cost:
    """Cost of the requested gradients of a convolution.

    The gradient of the input and the gradient of the weight each cost as many MACs as forward. The
    gradient of the bias is a sum.
    """
    of_input, of_weight, of_bias = output_mask
    forward = _products(x, weight, grad, transposed=transposed)
    return Cost(forward * (of_input + of_weight), other_flops=prod(grad) * of_bias)


# On the CPU, torch uses this operator for convolutions that no faster operator supports.
formula("_slow_conv2d_backward")(adapted(convolution_backward, without="transposed"))

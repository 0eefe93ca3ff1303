"""Convolutions: the weight is [out, in / groups, *kernel], so its size is already the products that one position costs."""

from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula

Mask = tuple[
    bool, bool, bool
    # which gradients a backward gives: of the input, of the weight, of the bias
]


@formula(
    """
    convolution _convolution convolution_overrideable mkldnn_convolution miopen_convolution cudnn_convolution _slow_conv2d_forward
    slow_conv3d_forward _conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution
    miopen_depthwise_convolution
    """
)
def convolution(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None, transposed: bool = False
) -> Cost:
    """A kernel's products at each position.

    Of the output, or of the input where that is spread out (transposed).
    """
    positions = prod((x if transposed else out)[2:])
    return Cost(x[0] * positions * prod(weight), other_flops=prod(out) if bias is not None else 0)


@formula("conv_tbc")
def convolution_time_first(x: Shape, weight: Shape, bias: Shape, *, out: Shape) -> Cost:
    """[time, batch, in] by [kernel, in, out], and always a bias."""
    return Cost(out[0] * out[1] * prod(weight), other_flops=prod(out))


@formula("cudnn_convolution_relu", "cudnn_convolution_add_relu")
def activated_convolution(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None, z: Shape | None = None
) -> Cost:
    """A convolution with a ReLU behind it; `z` is scaled and added before."""
    plain = convolution(x, weight, out=out, bias=bias)
    return plain._replace(other_flops=plain.other_flops + prod(out) * (1 if z is None else 3))


@formula(
    "cudnn_convolution_transpose",
    "miopen_convolution_transpose",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
)
def transposed_convolution(
    x: Shape, weight: Shape, *, out: Shape, bias: Shape | None = None
) -> Cost:
    """A kernel's products at each position of the input."""
    return convolution(x, weight, out=out, bias=bias, transposed=True)


@formula("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(
    grad: Shape, x: Shape, weight: Shape, *, output_mask: Mask, transposed: bool = False
) -> Cost:
    """The forward's MACs once for each gradient asked for: of the input, of the weight.

    The bias costs a sum and no product.
    """
    positions = prod((x if transposed else grad)[2:])
    of_input, of_weight, of_bias = output_mask
    return Cost(
        x[0] * positions * prod(weight) * (of_input + of_weight),
        other_flops=prod(grad) if of_bias else 0,
    )


formula("_slow_conv2d_backward")(
    adapted(convolution_backward, without="transposed")
    # what the CPU falls back to
)

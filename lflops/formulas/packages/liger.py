"""Liger.

Triton kernels inside of autograd functions. Products that it makes with torch's operators are seen
as they run, and not here.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, function_formula, per_element

OPS = "liger_kernel.ops."
LOSS_AND_GRADIENT = (
    5 + 4
    # of a logit: the softmax's operations and its gradient's, which one kernel writes over the logits
)


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_forward")
def head_and_loss(x: Shape, weight: Shape) -> Cost:
    """The loss of [tokens, width] x [words, width], chunk by chunk; the products are torch's own."""
    return Cost(other_flops=prod(x[:-1]) * weight[0] * LOSS_AND_GRADIENT)


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_backward")
def head_and_loss_backward(
    grad: Shape, grad_input: Shape, grad_weight: Shape | None, grad_bias: Shape | None = None
) -> Cost:
    """The gradients of forward times that of the loss."""
    return Cost(
        other_flops=sum(
            prod(each) for each in (grad_input, grad_weight, grad_bias) if each is not None
        )
    )


@function_formula(f"{OPS}rope:rope_forward", f"{OPS}rope:rope_backward")
def rotary(q: Shape, k: Shape) -> Cost:
    """Two products and an addition an element."""
    return Cost(other_flops=3 * (prod(q) + prod(k)))


for function, operations in {
    "cross_entropy:cross_entropy_forward": LOSS_AND_GRADIENT,
    # the gradient of forward times that of the loss
    "cross_entropy:cross_entropy_backward": 1,
    # by the convention, and twice that backward
    "rms_norm:rms_norm_forward": 4,
    "rms_norm:rms_norm_backward": 8,
    "layer_norm:layer_norm_forward": 7,
    "layer_norm:layer_norm_backward": 14,
    # an activation, times the other half
    "swiglu:swiglu_forward": 2,
    "swiglu:swiglu_backward": 4,
    "geglu:geglu_forward": 2,
    "geglu:geglu_backward": 4,
}.items():
    function_formula(OPS + function)(per_element(operations))

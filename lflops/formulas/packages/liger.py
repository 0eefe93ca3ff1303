"""Liger: Triton kernels inside of autograd functions. Products that it makes with torch's operators are seen as they run, and not here."""

from math import prod

from lflops.formulas.table import Cost, Shape, function_formula

OPS = "liger_kernel.ops."
LOSS_AND_GRADIENT = 5 + 4
"""Of a logit: the softmax's operations and its gradient's, which one kernel writes over the logits."""


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_forward")
def head_and_loss(x: Shape, weight: Shape) -> Cost:
    """The loss of [tokens, width] x [words, width], chunk by chunk; the products are torch's own."""
    return Cost(other_flops=prod(x[:-1]) * weight[0] * LOSS_AND_GRADIENT)


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_backward")
def head_and_loss_backward(grad: Shape, grad_input: Shape, grad_weight: Shape | None, grad_bias: Shape | None = None) -> Cost:
    """The gradients of forward times that of the loss."""
    return Cost(other_flops=sum(prod(each) for each in (grad_input, grad_weight, grad_bias) if each is not None))


@function_formula(f"{OPS}cross_entropy:cross_entropy_forward")
def cross_entropy(x: Shape) -> Cost:
    """The loss, and the gradient of the logits."""
    return Cost(other_flops=prod(x) * LOSS_AND_GRADIENT)


@function_formula(f"{OPS}cross_entropy:cross_entropy_backward")
def cross_entropy_backward(x: Shape) -> Cost:
    """The gradient of forward times that of the loss."""
    return Cost(other_flops=prod(x))


@function_formula(f"{OPS}rms_norm:rms_norm_forward")
def rms_norm(x: Shape) -> Cost:
    """By the convention for a root mean square."""
    return Cost(other_flops=4 * prod(x))


@function_formula(f"{OPS}rms_norm:rms_norm_backward")
def rms_norm_backward(grad: Shape) -> Cost:
    """Twice the forward."""
    return Cost(other_flops=8 * prod(grad))


@function_formula(f"{OPS}layer_norm:layer_norm_forward")
def layer_norm(x: Shape) -> Cost:
    """By the convention for layer normalisation."""
    return Cost(other_flops=7 * prod(x))


@function_formula(f"{OPS}layer_norm:layer_norm_backward")
def layer_norm_backward(grad: Shape) -> Cost:
    """Twice the forward."""
    return Cost(other_flops=14 * prod(grad))


@function_formula(f"{OPS}rope:rope_forward", f"{OPS}rope:rope_backward")
def rotary(q: Shape, k: Shape) -> Cost:
    """Two products and an addition an element."""
    return Cost(other_flops=3 * (prod(q) + prod(k)))


@function_formula(f"{OPS}swiglu:swiglu_forward", f"{OPS}geglu:geglu_forward")
def gated(a: Shape) -> Cost:
    """An activation, times the other half."""
    return Cost(other_flops=2 * prod(a))


@function_formula(f"{OPS}swiglu:swiglu_backward", f"{OPS}geglu:geglu_backward")
def gated_backward(a: Shape) -> Cost:
    """Twice the forward."""
    return Cost(other_flops=4 * prod(a))

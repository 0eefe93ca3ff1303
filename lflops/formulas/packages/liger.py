"""Formulas for Liger: Triton kernels inside autograd functions.

Matmuls that Liger computes with torch's operators are counted as operators, not here.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, function_formula, per_element

OPS = "liger_kernel.ops."

LOSS_AND_GRADIENT = 5 + 4
"""Number of operations of a softmax and its gradient per logit. One kernel computes both."""


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_forward")
def head_and_loss(x: Shape, weight: Shape) -> Cost:
    """Cost of a cross-entropy loss and its gradient, for logits of shape [tokens, words].

    Matmuls are not included, because they run as torch's operators and are counted there.
    """
    tokens = prod(x[:-1])
    words = weight[0]
    return Cost(other_flops=tokens * words * LOSS_AND_GRADIENT)


@function_formula(f"{OPS}fused_linear_cross_entropy:fused_linear_cross_entropy_backward")
def head_and_loss_backward(
    grad: Shape, grad_input: Shape, grad_weight: Shape | None, grad_bias: Shape | None = None
) -> Cost:
    """Cost of the backward of `head_and_loss`: one operation per element of the gradients.

    Forward has computed these gradients. Backward multiplies them by the gradient of the loss.
    """
    elements = 0
    for gradient in (grad_input, grad_weight, grad_bias):
        if gradient is not None:
            elements += prod(gradient)
    return Cost(other_flops=elements)


@function_formula(f"{OPS}rope:rope_forward", f"{OPS}rope:rope_backward")
def rotary(q: Shape, k: Shape) -> Cost:
    """Cost of rotary embeddings: two multiplications and an addition per element."""
    return Cost(other_flops=3 * (prod(q) + prod(k)))


_PER_ELEMENT = {
    "cross_entropy:cross_entropy_forward": LOSS_AND_GRADIENT,
    # The gradient that forward computed is multiplied by the gradient of the loss.
    "cross_entropy:cross_entropy_backward": 1,
    # These numbers follow `conventions.toml`. Backward costs twice as much as forward.
    "rms_norm:rms_norm_forward": 4,
    "rms_norm:rms_norm_backward": 8,
    "layer_norm:layer_norm_forward": 7,
    "layer_norm:layer_norm_backward": 14,
    # The activation function of one half of the input is multiplied by the other half.
    "swiglu:swiglu_forward": 2,
    "swiglu:swiglu_backward": 4,
    "geglu:geglu_forward": 2,
    "geglu:geglu_backward": 4,
}
for function, operations in _PER_ELEMENT.items():
    function_formula(OPS + function)(per_element(operations))

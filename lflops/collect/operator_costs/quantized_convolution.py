"""Convolutions with packed weights: only the packing knows the kernel's shape."""

from typing import Any

from lflops.collect.operator_costs.table import cost_of_call
from lflops.formulas.table import Cost


@cost_of_call(*(f"quantized::conv{dimensions}d{kind}" for dimensions in (1, 2, 3) for kind in ("", "_relu", "_dynamic")))
def packed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """A kernel's products at each position of the output; only the packed weight itself knows the kernel."""
    weight, _ = args[1].unpack()
    return Cost(out.numel() // out.shape[1] * weight.numel())


@cost_of_call("quantized::conv2d_add", "quantized::conv2d_add_relu")
def packed_convolution_with_addition(args: Any, kwargs: Any, out: Any) -> Cost:
    """The same, after what is added to it."""
    return packed_convolution([args[0], *args[2:]], kwargs, out)


@cost_of_call(*(f"quantized::conv_transpose{dimensions}d{kind}" for dimensions in (1, 2, 3) for kind in ("", "_dynamic")))
def packed_transposed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """A kernel's products at each position of the input."""
    weight, _ = args[1].unpack()
    return Cost(args[0].numel() // args[0].shape[1] * weight.numel())

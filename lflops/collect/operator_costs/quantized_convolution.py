"""Convolutions with packed weights: only the packing knows the kernel's shape."""

from typing import Any

from lflops.collect.operator_costs.table import cost_of_call
from lflops.formulas.table import Cost


@cost_of_call(*(f"quantized::conv{dimensions}d{kind}" for dimensions in (1, 2, 3) for kind in ("", "_relu", "_dynamic")))
def packed_convolution(args: Any, kwargs: Any, out: Any) -> Cost:
    """A kernel's products at each position of the output; only the packed weight itself knows the kernel."""
    weight, _ = args[1].unpack()
    return Cost(out.numel() // out.shape[1] * weight.numel())

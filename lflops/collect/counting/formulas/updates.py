"""Optimizers' fused kernels, as the same update costs operator by operator."""

from math import prod
from typing import Any

from lflops.collect.counting.formulas.table import Cost, formula


def _elements(parameters: Any) -> int:
    return sum(prod(shape) for shape in parameters)


@formula("_fused_adam", "_fused_adam_")
def fused_adam(parameters: Any) -> Cost:
    """Two running averages (2 + 3), a root, a division, an addition, the update (2): 10 an element."""
    return Cost(other_flops=10 * _elements(parameters))


@formula("_fused_adamw", "_fused_adamw_")
def fused_adamw(parameters: Any) -> Cost:
    """The same, and a multiplication for the decay."""
    return Cost(other_flops=11 * _elements(parameters))


@formula("_fused_sgd", "_fused_sgd_")
def fused_sgd(parameters: Any, *, momentum: float, weight_decay: float) -> Cost:
    """The update; two more operations for a momentum, one for a decay."""
    return Cost(other_flops=_elements(parameters) * (1 + 2 * bool(momentum) + bool(weight_decay)))


@formula("_fused_adagrad", "_fused_adagrad_")
def fused_adagrad(parameters: Any) -> Cost:
    """A sum of squares (2), a root, an addition, the update (2)."""
    return Cost(other_flops=6 * _elements(parameters))

"""Optimizers' fused kernels, as the same update costs operator by operator."""

from math import prod
from typing import Any

from lflops.formulas.table import Cost, formula


def _elements(parameters: Any) -> int:
    return sum(prod(shape) for shape in parameters)


@formula("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
def fused_adam(parameters: Any, *, weight_decay: float, amsgrad: bool) -> Cost:
    """Two running averages (2 + 3), a root, a division, an addition, the update (2): 10 an element; one more for a decay and a maximum."""
    return Cost(other_flops=_elements(parameters) * (10 + bool(weight_decay) + amsgrad))


@formula("_fused_sgd", "_fused_sgd_")
def fused_sgd(parameters: Any, *, momentum: float, weight_decay: float, nesterov: bool, is_first_step: bool) -> Cost:
    """The update; two more operations for a momentum that is there already, one for Nesterov's, one for a decay."""
    averaging = 2 if momentum and not is_first_step else 0
    return Cost(other_flops=_elements(parameters) * (1 + averaging + nesterov + bool(weight_decay)))


@formula("_fused_adagrad", "_fused_adagrad_")
def fused_adagrad(parameters: Any, *, weight_decay: float) -> Cost:
    """A sum of squares (2), a root, an addition, the update (2); one more for a decay."""
    return Cost(other_flops=_elements(parameters) * (6 + bool(weight_decay)))

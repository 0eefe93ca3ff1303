"""Fused optimizers of apex and DeepSpeed.

Kernels on lists of tensors, as the same update costs operator by operator.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from lflops.formulas.table import Cost, Shape, function_formula

# of the kernel, behind the lists
Arguments = Sequence[Any]


def _at(arguments: Arguments, place: int) -> Any:
    return arguments[place] if place < len(arguments) else 0


def _sgd(arguments: Arguments) -> int:
    """The update, a momentum that is there already (2), Nesterov's, a decay."""
    decay, momentum, nesterov, first = (_at(arguments, place) for place in (0, 1, 4, 5))
    return 1 + (2 if momentum and not first else 0) + bool(nesterov) + bool(decay)


KERNELS: dict[str, Callable[[Arguments], int]] = {
    "multi_tensor_adam": lambda arguments: 10 + bool(_at(arguments, 7)),
    "multi_tensor_lamb": lambda arguments: 14 + bool(_at(arguments, 7)),
    "multi_tensor_lion": lambda arguments: 7 + bool(_at(arguments, 4)),
    "multi_tensor_adagrad": lambda arguments: 6 + bool(_at(arguments, 3)),
    "multi_tensor_novograd": lambda arguments: 10 + bool(_at(arguments, 7)),
    "multi_tensor_sgd": _sgd,
    "multi_tensor_l2norm": lambda _: 2,
    "multi_tensor_scale": lambda _: 1,
    "multi_tensor_axpby": lambda _: 3,
}
"""Operations an element.

Adam: two averages (2 + 3), a root, a division, an addition, the update (2); LAMB's two norms are 4
    more.
"""

APPLY = "multi_tensor_apply:MultiTensorApply.__call__"


@function_formula(f"apex.multi_tensor_apply.{APPLY}", f"deepspeed.ops.adam.{APPLY}", tensors_at=3)
def on_lists(
    applier: object, kernel: Any, flag: object, tensors: Sequence[Shape], *arguments: Any
) -> Cost:
    """One tensor of each list: the gradient comes first, then the parameter and its states."""
    name = str(getattr(kernel, "__name__", kernel))
    known = next((known for known in KERNELS if name.startswith(known)), None)
    if known is None:
        raise NotImplementedError(f"a fused optimizer's kernel without a formula: {name}")
    return Cost(other_flops=prod(tensors[0]) * KERNELS[known](arguments))


def _on_host(operations: int) -> Callable[[Any], Cost]:
    """A step of all parameters that have a gradient, and one operation an element more where any decays."""

    def step(optimizer: Any) -> Cost:
        groups = optimizer.param_groups
        elements = sum(
            prod(parameter.shape)
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        return Cost(
            other_flops=elements * (operations + any(group.get("weight_decay") for group in groups))
        )

    return step


function_formula("deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.step")(_on_host(10))
function_formula("deepspeed.ops.adagrad.cpu_adagrad:DeepSpeedCPUAdagrad.step")(_on_host(6))
function_formula("deepspeed.ops.lion.cpu_lion:DeepSpeedCPULion.step")(_on_host(7))

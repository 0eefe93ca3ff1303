"""Formulas for the fused optimizers of apex and DeepSpeed, which update lists of tensors.

A fused update counts as many operations as an update without a fused kernel.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from lflops.formulas.losses import sgd_operations
from lflops.formulas.table import Cost, Shape, function_formula

Arguments = Sequence[Any]
"""The arguments of a kernel that follow the lists of tensors."""

OperationsOf = Callable[[Arguments], int]
"""A function that takes a kernel's arguments and returns its operations per element."""


def _at(arguments: Arguments, place: int) -> Any:
    if place < len(arguments):
        return arguments[place]
    return 0


def _with_decay(operations: int, decay_at: int | None = None) -> OperationsOf:
    """Return a function that adds 1 to `operations` if a kernel is called with weight decay.

    `decay_at` is the position of the weight decay among the kernel's arguments; `None` if the
    kernel has no weight decay.
    """

    def operations_of(arguments: Arguments) -> int:
        has_decay = decay_at is not None and bool(_at(arguments, decay_at))
        return operations + has_decay

    return operations_of


def _sgd(arguments: Arguments) -> int:
    """Count the operations of an SGD update per element.

    The update needs 1 operation. Momentum adds 2 operations after the first step, Nesterov momentum
    adds 1, and weight decay adds 1.
    """
    return sgd_operations(
        weight_decay=_at(arguments, 0),
        momentum=_at(arguments, 1),
        nesterov=_at(arguments, 4),
        is_first_step=_at(arguments, 5),
    )


KERNELS: dict[str, OperationsOf] = {
    # Adam: two moving averages (2 and 3 operations), a square root, a division, an addition, and
    # the update (2 operations).
    "multi_tensor_adam": _with_decay(10, decay_at=7),
    # LAMB: the operations of Adam, and two norms (4 operations).
    "multi_tensor_lamb": _with_decay(14, decay_at=7),
    "multi_tensor_lion": _with_decay(7, decay_at=4),
    "multi_tensor_adagrad": _with_decay(6, decay_at=3),
    "multi_tensor_novograd": _with_decay(10, decay_at=7),
    "multi_tensor_sgd": _sgd,
    "multi_tensor_l2norm": _with_decay(2),
    "multi_tensor_scale": _with_decay(1),
    "multi_tensor_axpby": _with_decay(3),
}
"""Functions that count the operations of kernels per element, keyed by a prefix of their names."""

APPLY = "multi_tensor_apply:MultiTensorApply.__call__"


@function_formula(f"apex.multi_tensor_apply.{APPLY}", f"deepspeed.ops.adam.{APPLY}", tensors_at=3)
def multi_tensor_apply(
    applier: object, kernel: Any, flag: object, tensors: Sequence[Shape], *arguments: Any
) -> Cost:
    """Cost of the update of one parameter by a kernel that updates whole lists of parameters.

    `tensors` has one tensor from each list. The first tensor is the gradient.
    """
    name = str(getattr(kernel, "__name__", kernel))
    for beginning, operations_of in KERNELS.items():
        if name.startswith(beginning):
            return Cost(other_flops=prod(tensors[0]) * operations_of(arguments))
    raise NotImplementedError(f"lflops has no formula for the fused optimizer kernel {name}")


def _cpu_step(operations: int) -> Callable[[Any], Cost]:
    """Return the formula for a step of an optimizer that runs on the CPU.

    The step updates all parameters with a gradient. `operations` is the number of operations per
    element. If any parameter group has weight decay, each element costs one more operation.
    """

    def step(optimizer: Any) -> Cost:
        elements = 0
        has_decay = False
        for group in optimizer.param_groups:
            has_decay = has_decay or bool(group.get("weight_decay"))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    elements += prod(parameter.shape)
        return Cost(other_flops=elements * (operations + has_decay))

    return step


function_formula("deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.step")(_cpu_step(10))
function_formula("deepspeed.ops.adagrad.cpu_adagrad:DeepSpeedCPUAdagrad.step")(_cpu_step(6))
function_formula("deepspeed.ops.lion.cpu_lion:DeepSpeedCPULion.step")(_cpu_step(7))

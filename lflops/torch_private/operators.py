"""Read schemas of operators, their kernels in the dispatcher, and the attention kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lflops.torch_private.known_torch import known_torch
from lflops.torch_private.tensors import PLAIN, is_overridden, with_overrides

with known_torch():
    from torch._C import DisableTorchFunction
    from torch._ops import (
        HigherOrderOperator as HigherOrderOperator,
        OpOverload as OpOverload,
        OpOverloadPacket as OpOverloadPacket,
    )

    _KEY = torch._C.DispatchKey
    _ANY_DEVICE = _KEY.CompositeImplicitAutogradNestedTensor
    GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
    """The operator that multiplies tokens with the weights of their experts (a grouped matmul)."""

COMPOSITE = _KEY.CompositeImplicitAutograd
"""The dispatch key of operators that are written in terms of other operators."""

WRITTEN_IN_CPP = frozenset({"aten", "prims", "quantized", "_c10d_functional", "c10d", "prim"})
"""Namespaces whose operators have only kernels written in C++, and none written in Python."""

DEVICES = (_KEY.CPU, _KEY.CUDA)
NESTED = {"cpu": (_KEY.NestedTensorCPU, _ANY_DEVICE), "cuda": (_KEY.NestedTensorCUDA, _ANY_DEVICE)}
"""The dispatch keys of kernels for nested tensors, keyed by device type."""


def qualified_name(operator: Any) -> str:
    """Return an operator's qualified name, such as `aten::add.Tensor`.

    The name has the namespace, the name and the overload. The default overload has no name.
    """
    return str(operator.name())


def overloads_of(operator: Any) -> list[Any]:
    """Return the overloads of any operator, except overloads that only TorchScript can call.

    For an object that is not an operator, the result is empty.
    """
    if isinstance(operator, OpOverloadPacket):
        overloads: list[Any] = []
        for name in operator.overloads():
            each = getattr(operator, name)
            if torch._C._dispatch_has_kernel(each.name()):
                overloads.append(each)
        return overloads
    # The result of `torch.library.custom_op` holds its only overload.
    overload = getattr(operator, "_opoverload", operator)
    if not isinstance(overload, OpOverload | HigherOrderOperator):
        return []
    return [overload]


def decomposes(operator: Any) -> bool:
    """Return whether an operator has no kernel for CPU or CUDA, but is defined by other operators.

    Usually, torch runs these other operators before dispatch modes receive them. Under inference
    mode, a dispatch mode receives the operator itself.

    For an operator with a kernel for some device, such as `silu_backward`, the result is false.
    torch's Python decompositions, such as the decomposition of `upsample_nearest2d`, do not count,
    because they do not run in eager mode.
    """
    if not isinstance(operator, OpOverload) or not _has_kernel(operator, COMPOSITE):
        return False
    return not any(_has_kernel(operator, key) for key in DEVICES)


def decompose(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an operator such that dispatch modes receive the operators of which it consists.

    For nested tensors, these are the operators that the kernel for nested tensors calls. The call
    is hidden from every `__torch_function__`: a run without lflops does not make this call, so no
    `__torch_function__` expects it.
    """
    with DisableTorchFunction():
        return operator._op_dk(nested_kernel(operator, args) or COMPOSITE, *args, **kwargs)


def nested_kernel(operator: OpOverload, args: Any) -> Any:
    """Return the dispatch key of the operator's kernel for nested tensors.

    Kernels for nested tensors call other operators. Returns `None` if no argument is a nested
    tensor, or if the operator has no kernel for nested tensors.
    """
    for value in args:
        if type(value) in PLAIN and value.is_nested and value.layout is torch.strided:
            for key in NESTED.get(value.device.type, ()):
                if _has_kernel(operator, key):
                    return key
            return None
    return None


def python_kernel(operator: Any, args: Any, kwargs: Any) -> Any:
    """Return the dispatch key of the operator's Python kernel for these arguments, or `None`.

    A Python kernel was registered by `torch.library.custom_op` or `Library.impl`, and it calls
    other operators. `None` means that the kernel for these arguments is not written in Python.
    """
    if not isinstance(operator, OpOverload):
        return None
    device = ""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            device = value.device.type
            break
    name = operator.name().replace("::", "/", 1)
    for key in (device.upper(), "CompositeExplicitAutograd"):
        if f"{name}/{key}" in torch.library._impls:
            return getattr(_KEY, key, None)
    return None


def run_kernel(operator: OpOverload, key: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator's kernel directly, so that no dispatch mode receives the operator itself.

    `key` is the dispatch key of the kernel.
    """
    if is_overridden(args):
        return operator._handle.redispatch_boxed(torch._C.DispatchKeySet(key), *args, **kwargs)
    return operator._op_dk(key, *args, **kwargs)


def direct_call(operator: Any) -> Any:
    """Return the function that an operator's `__call__` calls, to save the time of `__call__`.

    If `operator` is not an operator, it is returned unchanged.
    """
    return operator._op if type(operator) is OpOverload else operator


def call_without_overrides(operator: Any) -> Any:
    """Return a function that calls an operator so that no `__torch_function__` receives the call.

    Call the returned function while `__torch_function__` overrides are off. If the kernel of the
    operator might be written in Python, the overrides are on while the kernel runs, as they would
    be without lflops.
    """
    if type(operator) is not OpOverload:
        return with_overrides(operator)
    if operator.namespace in WRITTEN_IN_CPP:
        return operator._op
    # A kernel written in Python runs with the overrides that are on now.
    return with_overrides(partial(torch._C._dispatch_call_boxed, operator._handle))


def has_nested_kernel(operator: OpOverload) -> bool:
    """Return whether any device has a kernel of this operator for nested tensors."""
    return any(_has_kernel(operator, keys[0]) for keys in NESTED.values())


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name)


def written_arguments(operator: OpOverload) -> tuple[tuple[str, int], ...]:
    """Return the names and positions of the arguments that the operator writes to."""
    written = []
    for position, each in enumerate(operator._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            written.append((each.name, position))
    return tuple(written)


def has_list_argument(operator: OpOverload) -> bool:
    """Return whether an argument is a list of tensors."""
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind and "List[" in kind:
            return True
    return False


def argument_names(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    """Return the name and the default of each argument, in the order of the schema.

    An argument without a default has `None` instead.
    """
    names = []
    for each in operator._schema.arguments:
        default = None
        if each.has_default_value():
            default = each.default_value
        names.append((each.name, default))
    return tuple(names)


def makes_storage(operator: OpOverload) -> bool:
    """Return whether a result of the operator is a new tensor, not an argument or a view."""
    return any(each.alias_info is None for each in operator._schema.returns)


def attention_kernels(*, cudnn_first: bool = False) -> dict[str, Any]:
    """Return the attention kernels that torch chooses from on CUDA, in order of preference.

    Kernels that this version of torch does not have or that the user disabled are left out.

    Args:
        cudnn_first: Whether to put the cuDNN kernel first instead of last.
    """
    cuda = torch.backends.cuda
    switches: dict[str, Any] = {
        "attention_math": cuda.math_sdp_enabled,
        "flash_attention": cuda.flash_sdp_enabled,
        "efficient_attention": cuda.mem_efficient_sdp_enabled,
        "cudnn_attention": cuda.cudnn_sdp_enabled,
    }
    names = list(switches)
    order = [names[number] for number in torch._C._get_sdp_priority_order() if number < len(names)]
    # cuDNN is last in torch's order for most chips. If it is not last, the user has set the order,
    # which is then kept.
    if cudnn_first and order[-1] == "cudnn_attention":
        order.insert(0, order.pop())
    kernels = {}
    for name in order:
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None)
        if operator is not None and switches[name]():
            kernels[name] = operator.default
    return kernels

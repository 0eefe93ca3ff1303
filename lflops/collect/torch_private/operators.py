"""Operators: their schemas, the dispatcher's kernels, and the kernels of attention."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lflops.collect.torch_private.known_torch import known_torch
from lflops.collect.torch_private.tensors import PLAIN, is_overridden, with_overrides

with known_torch():
    from torch._C import DisableTorchFunction
    from torch._ops import HigherOrderOperator as HigherOrderOperator, OpOverload as OpOverload, OpOverloadPacket as OpOverloadPacket

    _KEY = torch._C.DispatchKey
    _ANY_DEVICE = _KEY.CompositeImplicitAutogradNestedTensor
    GROUPED_MM: Any = torch.ops.aten._grouped_mm.default
    """The product of tokens with the weights of their experts."""

COMPOSITE = _KEY.CompositeImplicitAutograd  # the dispatch key of operators that are written in terms of others
WRITTEN_IN_CPP = frozenset({"aten", "prims", "quantized", "_c10d_functional", "c10d", "prim"})  # namespaces of which no kernel is in Python
DEVICES = (_KEY.CPU, _KEY.CUDA)
NESTED = {"cpu": (_KEY.NestedTensorCPU, _ANY_DEVICE), "cuda": (_KEY.NestedTensorCUDA, _ANY_DEVICE)}
"""The dispatch keys of kernels for nested tensors, by device."""


def qualified_name(operator: Any) -> str:
    """Namespace, name and overload, as in `aten::add.Tensor`; the default overload has no name."""
    return str(operator.name())


def overloads_of(operator: Any) -> list[Any]:
    """The overloads of an operator of any kind, without those that only scripts call. Empty for anything else."""
    if isinstance(operator, OpOverloadPacket):
        overloads = (getattr(operator, each) for each in operator.overloads())
        return [each for each in overloads if torch._C._dispatch_has_kernel(each.name())]
    only = getattr(operator, "_opoverload", operator)  # of `torch.library.custom_op`
    return [only] if isinstance(only, OpOverload | HigherOrderOperator) else []


def decomposes(operator: Any) -> bool:
    """Whether the operator is written in terms of others and arrived undecomposed, as it does under inference mode."""
    # Only the dispatcher's kernels count. Torch also has Python decompositions of a few kernels (`upsample_nearest2d`), which do not run
    # here. An operator with a kernel for a device does not decompose there (`silu_backward`).
    return isinstance(operator, OpOverload) and _has_kernel(operator, COMPOSITE) and not any(_has_kernel(operator, key) for key in DEVICES)


def decompose(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run the operator as the operators that it is written in, or that its kernel for nested tensors calls."""
    with DisableTorchFunction():  # without a count, no `__torch_function__` sees this call
        return operator._op_dk(nested_kernel(operator, args) or COMPOSITE, *args, **kwargs)


def nested_kernel(operator: OpOverload, args: Any) -> Any:
    """The dispatch key of the kernel that calls other operators on nested tensors; `None` if no argument is one."""
    for each in args:
        if type(each) in PLAIN and each.is_nested and each.layout is torch.strided:
            return next((key for key in NESTED.get(each.device.type, ()) if _has_kernel(operator, key)), None)
    return None


def python_kernel(operator: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key of the kernel that these arguments go to, if it is written in Python; else `None`."""
    # Such a kernel calls other operators: what `torch.library.custom_op` or `Library.impl` registered
    if not isinstance(operator, OpOverload):
        return None
    device = next((each.device.type for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), "")
    name = operator.name().replace("::", "/", 1)
    written = (device.upper(), "CompositeExplicitAutograd")
    found = next((key for key in written if f"{name}/{key}" in torch.library._impls), None)
    return None if found is None else getattr(_KEY, found, None)


def run_kernel(operator: OpOverload, key: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator's kernel at once, without asking the dispatch modes about the operator itself."""
    if is_overridden(args):
        return operator._handle.redispatch_boxed(torch._C.DispatchKeySet(key), *args, **kwargs)
    return operator._op_dk(key, *args, **kwargs)


def direct_call(operator: Any) -> Any:
    """What a call of the operator calls, without the frame in between; any other function itself."""
    return operator._op if type(operator) is OpOverload else operator


def call_without_overrides(operator: Any) -> Any:
    """A function that calls the operator while overrides are off, as the dispatcher does: no `__torch_function__` sees the call."""
    if type(operator) is not OpOverload:
        return with_overrides(operator)
    if operator.namespace in WRITTEN_IN_CPP:
        return operator._op
    # A kernel in Python is called as ever, and so are the overrides within it.
    return with_overrides(partial(torch._C._dispatch_call_boxed, operator._handle))


def has_nested_kernel(operator: OpOverload) -> bool:
    """Whether any device has a kernel of this operator for nested tensors."""
    return any(_has_kernel(operator, keys[0]) for keys in NESTED.values())


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name)


def written_arguments(operator: OpOverload) -> tuple[tuple[str, int], ...]:
    """Names and positions of the arguments that the operator writes to."""
    arguments = operator._schema.arguments
    return tuple((one.name, at) for at, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write)


def has_list_argument(operator: OpOverload) -> bool:
    """Whether an argument is a list of tensors."""
    return any("Tensor" in str(each.type) and "List[" in str(each.type) for each in operator._schema.arguments)


def argument_names(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of all arguments, in the order of the schema."""
    return tuple((each.name, each.default_value if each.has_default_value() else None) for each in operator._schema.arguments)


def makes_storage(operator: OpOverload) -> bool:
    """Whether the operator returns a new tensor, rather than one of its arguments or a view."""
    return any(each.alias_info is None for each in operator._schema.returns)


def attention_kernels(*, cudnn_first: bool = False) -> dict[str, Any]:
    """The kernels that attention chooses from on CUDA, best first: those that this torch has and the user did not switch off."""
    cuda = torch.backends.cuda
    switches: dict[str, Any] = {
        "attention_math": cuda.math_sdp_enabled,
        "flash_attention": cuda.flash_sdp_enabled,
        "efficient_attention": cuda.mem_efficient_sdp_enabled,
        "cudnn_attention": cuda.cudnn_sdp_enabled,
    }
    order = [list(switches)[number] for number in torch._C._get_sdp_priority_order() if number < len(switches)]
    if cudnn_first and order[-1] == "cudnn_attention":  # torch's own order for most chips; one of the user's stays
        order.insert(0, order.pop())
    operators = {each: getattr(torch.ops.aten, f"_scaled_dot_product_{each}", None) for each in order if switches[each]()}
    return {each: operator.default for each, operator in operators.items() if operator is not None}

"""Every private name of torch that lflops rests on, in one place; `torch_check` tries them out before the first count."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lflops.errors import CountError

try:
    from torch._C import _current_autograd_node, _current_graph_task_id
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.autograd import _get_sequence_nr, _profiler_enabled  # type: ignore[attr-defined]
    from torch.nn.modules.module import _global_forward_hooks_with_kwargs
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise CountError(f"torch {torch.__version__}: its internals are not as lflops knows them: {error}") from error

__all__ = [
    "ASKS_FOR_VALUES",
    "GROUPED_PRODUCT",
    "KNOWS_NO_SHAPE",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "attention_kernels",
    "backward_id",
    "buffers_of",
    "child_modules",
    "compilations",
    "current_node",
    "decompose",
    "decomposes",
    "fake_mode",
    "flat_parts",
    "group_named",
    "group_store",
    "hear_of_higher_order",
    "is_compiled",
    "kernel_for_sequences",
    "leaves",
    "local_part",
    "name_of",
    "next_sequence_number",
    "open_modes",
    "overloads_of",
    "pop_mode",
    "profiler_records",
    "push_mode",
    "remove_hook",
    "runs_nothing",
    "sequence_number",
    "sparse_parts",
    "storage_key",
    "stored_elements",
    "takes_sequences",
    "unseen",
    "written_arguments",
]

PLAIN = (Tensor, nn.Parameter)
"""What nearly every tensor is. To ask one of these for an attribute that it has not takes as long as to run a small operator."""

NO_BACKWARD = -1
"""`backward_id()` outside of a backward pass."""

ACCUMULATES_GRADIENT = 1 << 62
"""Sequence numbers from here on belong to nodes that no forward operator built: those that write `.grad`."""

ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where their numbers are asked for, or a shape that depends on them."""

KNOWS_NO_SHAPE = UnsupportedOperatorException
"""What they raise at an operator that does not say what its results look like."""

GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm.default
"""Of the tokens of several experts, each with its own expert's weights."""

_KEY = torch._C.DispatchKey
COMPOSITE = _KEY.CompositeImplicitAutograd
"""Under which the dispatcher keeps operators that are written in terms of others."""
DEVICES = (_KEY.CPU, _KEY.CUDA)
_OF_EITHER = _KEY.CompositeImplicitAutogradNestedTensor
SEQUENCES = {"cpu": (_KEY.NestedTensorCPU, _OF_EITHER), "cuda": (_KEY.NestedTensorCUDA, _OF_EITHER)}
"""The same of what operators do with sequences of several lengths in one tensor, by its device."""

next_sequence_number: Callable[[], int] = _get_sequence_nr
"""The number that the next autograd node built on this thread will get."""

backward_id: Callable[[], int] = _current_graph_task_id
"""Which backward pass this thread is running; they are numbered upwards."""

profiler_records: Callable[[], bool] = _profiler_enabled
"""Whether a profiler of torch's is recording."""

unseen: Callable[[], contextlib.AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
"""Within it, no mode sees the operators that run."""

current_node: Callable[[], Any] = _current_autograd_node
"""The autograd node that this thread is evaluating, or `None`."""


def sequence_number(node: Any) -> int:
    """When an autograd node was built, in its thread's order."""
    return cast("int", node._sequence_nr())


def storage_key(tensor: Tensor) -> tuple[Any, int]:
    """A tensor's storage, which a weak reference can watch, and a number that only living storages do not share."""
    storage = tensor.untyped_storage()
    return storage, storage._cdata


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a coordinate tensor as it is; the public names refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is spread over ranks; any other tensor itself."""
    if type(tensor) in PLAIN:
        return tensor
    return getattr(tensor, "_local_tensor", tensor)


def flat_parts(module: Any) -> Iterable[tuple[Tensor, nn.Module, int, int]]:
    """Of what torch's first FSDP, if this is one, made one parameter of: what each is stored in, whose it is, its elements, those here."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is None or type(module).__name__ != "FullyShardedDataParallel":
        return ()
    here = (each.numel_in_shard or 0 for each in flat._shard_param_infos)
    return zip(flat._params or [flat] * len(flat._numels), (each.module for each in flat._param_infos), flat._numels, here, strict=True)


def stored_elements(tensor: Tensor) -> int:
    """How many elements a sparse tensor stores."""
    return (sparse_parts(tensor)[1] if tensor.layout is torch.sparse_coo else tensor.values()).numel()


def child_modules(module: nn.Module) -> Iterable[tuple[str, nn.Module | None]]:
    """The registered children with repetitions, which `named_children` leaves out."""
    return module._modules.items()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The registered buffers themselves, to be put back; `named_buffers` leaves out those that are still `None`."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs it under torch.compile."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def compilations() -> int:
    """How many graphs torch.compile has compiled in this process; its loading is left to who compiles."""
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else loaded.counters["stats"]["unique_graphs"]


def name_of(operator: Any) -> str:
    """Namespace, name and overload, as `aten::add.Tensor`; the default overload has no name."""
    return str(operator.name())


def overloads_of(operator: Any) -> list[Any]:
    """Those of an operator of any kind, without such as only scripts call; none of what is no operator."""
    if isinstance(operator, OpOverloadPacket):
        found = (getattr(operator, each) for each in operator.overloads())
        return [each for each in found if torch._C._dispatch_has_kernel(each.name())]
    only = getattr(operator, "_opoverload", operator)  # what `torch.library.custom_op` made
    return [only] if isinstance(only, OpOverload | HigherOrderOperator) else []


def open_modes() -> list[Any]:
    """The modes on this thread's stack that are not running at this moment, the innermost last."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def runs_nothing(tensors: Iterable[Tensor]) -> bool:
    """Whether only shapes would be worked out: with fake tensors, or where a mode makes all tensors fake."""
    return any(isinstance(mode, FakeTensorMode) for mode in open_modes()) or any(
        isinstance(local_part(each), FakeTensor) for each in tensors
    )


def fake_mode() -> FakeTensorMode:
    """Within it, what is made is fake; real tensors are taken for fake ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It would keep a weak reference to each result, and a module refuses to convert parameters that have one: `model.to(bfloat16)` fails.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


def decomposes(operator: Any) -> bool:
    """Whether the operator is written in terms of others and reached us whole, as it does under inference mode.

    Only the dispatcher's own word counts: torch also keeps Python versions of a few kernels (`upsample_nearest2d`), which do not run here.
    Nor does what is written in others where a device has a kernel of its own (`silu_backward`).
    """
    return isinstance(operator, OpOverload) and _has_kernel(operator, COMPOSITE) and not any(_has_kernel(operator, key) for key in DEVICES)


def decompose(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run the operator as the others that it is written in, or that its kernel for sequences calls."""
    return operator._op_dk(kernel_for_sequences(operator, args) or COMPOSITE, *args, **kwargs)


def kernel_for_sequences(operator: OpOverload, args: Any) -> Any:
    """Where the kernel is kept that calls other operators on sequences of several lengths, if the arguments hold any in one tensor."""
    for each in args:
        if isinstance(each, Tensor) and each.is_nested and each.layout is torch.strided:
            return next((key for key in SEQUENCES.get(each.device.type, ()) if _has_kernel(operator, key)), None)
    return None


def takes_sequences(operator: OpOverload) -> bool:
    """Whether there may be such a kernel."""
    return any(_has_kernel(operator, keys[0]) for keys in SEQUENCES.values())


def _has_kernel(operator: OpOverload, key: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name)


def written_arguments(operator: OpOverload) -> tuple[tuple[str, int], ...]:
    """Names and positions of the arguments that the operator writes to."""
    arguments = operator._schema.arguments
    return tuple((each.name, place) for place, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)


def argument_names(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of all arguments, in the order of the schema."""
    return tuple((each.name, each.default_value if each.has_default_value() else None) for each in operator._schema.arguments)


def makes_storage(operator: OpOverload) -> bool:
    """Whether something that the operator returns is new, rather than one of its arguments or a view."""
    return any(each.alias_info is None for each in operator._schema.returns)


def attention_kernels() -> dict[str, Any]:
    """What attention picks from on CUDA, as far as this torch has it and the user left it switched on; the first is to be preferred."""
    cuda = torch.backends.cuda
    switches: dict[str, Any] = {
        "attention_math": cuda.math_sdp_enabled,
        "flash_attention": cuda.flash_sdp_enabled,
        "efficient_attention": cuda.mem_efficient_sdp_enabled,
        "cudnn_attention": cuda.cudnn_sdp_enabled,
    }
    order = [list(switches)[number] for number in torch._C._get_sdp_priority_order() if number < len(switches)]
    operators = {each: getattr(torch.ops.aten, f"_scaled_dot_product_{each}", None) for each in order if switches[each]()}
    return {each: operator.default for each, operator in operators.items() if operator is not None}


def group_named(name: str) -> Any:
    """The process group of that name, or `None`."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return torch._C._distributed_c10d._resolve_process_group(cast("Any", name))
    return None


def group_store() -> Any:
    """The store that the default process group was made by; `None` where there is no group, or it has none."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, AssertionError):
        return torch.distributed.distributed_c10d._get_default_store()
    return None


def remove_hook(handle: RemovableHandle) -> None:
    """Take a global module hook away, and with it the mark that it wants keyword arguments, which torch would leave behind."""
    handle.remove()
    _global_forward_hooks_with_kwargs.pop(handle.id, None)


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose `.grad` going backward from these would write."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    found = [tensor for tensor in tensors if tensor.is_leaf]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if sequence_number(node) >= ACCUMULATES_GRADIENT and hasattr(node, "variable"):
            found.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return found


def hear_of_higher_order(kind: type[TorchDispatchMode]) -> None:
    """Have modes of this class see higher-order operators where torch asks each of these for a rule, and not the mode."""
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        for each in torch._ops._higher_order_ops.values():
            each.python_key_table.setdefault(kind, lambda mode, *args, _of=each, **kwargs: mode.__torch_dispatch__(_of, (), args, kwargs))


def push_mode(mode: TorchDispatchMode) -> None:
    """Put a mode on top of this thread's stack.

    Not by the mode's own `__enter__`: that also tells dynamo, which from then on would never compile again the frames that it met.
    """
    _python_dispatch._push_mode(mode)


def pop_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, wherever in it the mode stands: two observers need not end in reverse order."""
    above = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    for each in reversed(above):
        _python_dispatch._push_mode(each)

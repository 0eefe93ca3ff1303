"""Read internals of tensors: storages, local parts of DTensors, sparse values, fake tensors."""

import contextlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lflops.torch_private.known_torch import known_torch

with known_torch():
    from torch._C import (
        DisableTorchFunction,
        DisableTorchFunctionSubclass,
        _EnableTorchFunction,
        _has_torch_function,
    )
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor as FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.utils import _python_dispatch

PLAIN = frozenset((Tensor, nn.Parameter))
"""The classes of nearly all tensors. They have none of the attributes of special tensors.

Check the class before you look for such an attribute: trying to read a missing attribute of a
tensor takes as long as a small operator.
"""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors that an operator raises if it needs the values of a fake tensor, which has no values.

An operator also needs the values if the shape of its result depends on them.
"""

NO_FAKE_KERNEL = UnsupportedOperatorException
"""Error that fake tensors raise for an operator without a fake kernel.

The shapes of its results are unknown.
"""


has_torch_function: Callable[[Any], bool] = _has_torch_function
"""Returns whether a call with these arguments would run a `__torch_function__`.

The `__torch_function__` may belong to a mode or to the class of an argument. Tensors in lists are
not examined; `is_overridden` examines them too.
"""


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return tensor._version


without_overrides: Callable[[], contextlib.AbstractContextManager[Any]] = DisableTorchFunction
"""Returns a context in which no `__torch_function__` of a tensor's class or of a mode runs.

An example of such a mode is the mode that `torch.set_default_device` installs.
"""


def is_overridden(args: Any) -> bool:
    """Return whether a call with these arguments would run a `__torch_function__`.

    The `__torch_function__` may belong to a mode or to the class of a tensor in `args`. Tensors in
    lists are examined too.
    """
    if has_torch_function(args):
        return True
    return any(type(each) is list and has_torch_function(each) for each in args)


def with_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with `__torch_function__` overrides enabled.

    In each call, the overrides of modes are enabled. The overrides of tensor classes are enabled
    only if they were enabled when `with_overrides` was called.
    """
    subclasses_are_on = torch._C._is_torch_function_enabled()

    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            _EnableTorchFunction(),
            contextlib.nullcontext() if subclasses_are_on else DisableTorchFunctionSubclass(),
        ):
            return function(*args, **kwargs)

    return run


_INTEGERS = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}

_size: Callable[[Tensor], Hashable] = Tensor.size
_base: Any = Tensor
_layout: Callable[[Tensor], Any] = _base.layout.__get__
_dtype: Callable[[Tensor], Any] = _base.dtype.__get__
_is_nested: Callable[[Tensor], bool] = _base.is_nested.__get__

node_of: Callable[[Tensor], Any] = _base.grad_fn.__get__
"""Returns the autograd node that computed a tensor, or `None`."""


def shape_key(tensor: Tensor) -> Hashable:
    """Return a hashable key that is the same for all tensors of one shape.

    The key of a nested tensor contains its number of elements. No attribute of a user's tensor
    class is read, because that could run the user's code.
    """
    if type(tensor) is Tensor:
        try:
            return _size(tensor)
        except RuntimeError:
            # `Tensor.size` fails for a nested tensor of the older layout.
            return "nested", Tensor.numel(tensor)
    if _layout(tensor) is torch.jagged:
        return "nested", Tensor.numel(vars(tensor)["_values"])
    return tuple(map(int, Tensor.size(tensor)))


def is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense tensor of integers or booleans."""
    is_dense = _layout(tensor) is torch.strided and not _is_nested(tensor)
    return is_dense and _dtype(tensor) in _INTEGERS


def nested_offsets(tensor: Tensor) -> Tensor | None:
    """Return the offsets of a jagged nested tensor; `None` for other tensors.

    The offsets are the positions at which the sequences begin.
    """
    if type(tensor) is Tensor or _layout(tensor) is not torch.jagged:
        return None
    offsets: Tensor = vars(tensor)["_offsets"]
    return offsets


def storage_key(tensor: Tensor) -> tuple[Any, int]:
    """Return the storage of a tensor, and a key that identifies the storage while it is alive.

    Tensors that share memory have the same key. The storage supports weak references.
    """
    if type(tensor) in PLAIN:
        storage = tensor.untyped_storage()
    else:
        with DisableTorchFunction():
            storage = tensor.untyped_storage()
    return storage, storage._cdata


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor.

    Any other tensor is returned unchanged.
    """
    if type(tensor) in PLAIN:
        return tensor
    try:
        # This calls no `__getattr__` of a user's class.
        local: Tensor = object.__getattribute__(tensor, "_local_tensor")
    except AttributeError:
        return tensor
    return local


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of a COO tensor.

    Unlike the public methods, this also works for tensors that are not coalesced.
    """
    return tensor._indices(), tensor._values()


def stored_elements(tensor: Tensor) -> int:
    """Return the number of elements that a sparse tensor stores."""
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)[1].numel()
    return tensor.values().numel()


def only_shapes_run(tensors: Iterable[Tensor]) -> bool:
    """Return whether operators on these tensors compute only shapes and no values.

    This is the case if one of the tensors is a fake tensor, or if a fake mode is active.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    if any(isinstance(mode, FakeTensorMode) for mode in modes):
        return True
    return any(isinstance(local_part(each), FakeTensor) for each in tensors)


ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""The operator that reads a tensor's device.

torch dispatches it whenever its C++ code reads the device of a fake tensor. With fake tensors,
about two thirds of all dispatched calls are such reads.
"""


def fake_device(tensor: FakeTensor) -> torch.device:
    """Return the device of a fake tensor, which is also the result of `ASKS_FOR_DEVICE`.

    This reads an attribute of the Python object and dispatches no operator.
    """
    return tensor.device


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors are fake tensors.

    Operators also accept real tensors, which they treat as fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Otherwise the mode keeps a weak reference to each result. Then `model.to(bfloat16)` fails,
    # because a module does not convert parameters that have weak references.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    # The deep copy of a fake tensor copies the tensor's attributes, also its mode. A copied mode
    # would free weak references to storages a second time, and the process would crash.
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]
    return mode

"""Tensors: storages, local parts of DTensors, sparse values, fake tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lflops.collect.torch_private.known_torch import known_torch

with known_torch():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.utils import _python_dispatch

__all__ = [
    "NEEDS_VALUES",
    "NO_FAKE_KERNEL",
    "PLAIN",
    "FakeTensor",
    "fake_mode",
    "local_part",
    "only_shapes_run",
    "sparse_parts",
    "storage_key",
    "stored_elements",
    "version_of",
]

PLAIN = (Tensor, nn.Parameter)
"""The classes of nearly all tensors. Asking one of them for a missing attribute takes as long as a small operator."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors where code needs their values, or a shape that depends on values."""

NO_FAKE_KERNEL = UnsupportedOperatorException
"""Error of fake tensors at an operator without a fake kernel: the shape of its result is unknown."""


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return tensor._version


def storage_key(tensor: Tensor) -> tuple[Any, int]:
    """A tensor's storage, which takes weak references, and its key. Two storages that are alive never share a key."""
    storage = tensor.untyped_storage()
    return storage, storage._cdata


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor; the public methods refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


def stored_elements(tensor: Tensor) -> int:
    """How many elements a sparse tensor stores."""
    return (sparse_parts(tensor)[1] if tensor.layout is torch.sparse_coo else tensor.values()).numel()


def only_shapes_run(tensors: Iterable[Tensor]) -> bool:
    """Whether operators compute shapes and no values: a tensor is fake, or a fake mode is active."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, FakeTensorMode) for mode in modes) or any(isinstance(local_part(each), FakeTensor) for each in tensors)


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors are fake, and operators take real tensors as if they were fake."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It would keep a weak reference to each result, and then `model.to(bfloat16)` fails: a module converts no parameter that has one.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode

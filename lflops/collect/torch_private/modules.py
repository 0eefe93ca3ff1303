"""Modules: the registries of children, buffers and global hooks, and whether they are compiled."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lflops.collect.torch_private.known_torch import known_torch

with known_torch():
    from torch.nn.modules.module import _global_forward_hooks_with_kwargs

__all__ = ["buffers_of", "child_modules", "compilations", "is_compiled", "remove_hook"]


def child_modules(module: nn.Module) -> Iterable[tuple[str, nn.Module | None]]:
    """The registered children with repetitions, which `named_children` leaves out."""
    return module._modules.items()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own registry of buffers; `named_buffers` leaves out those that are still `None`."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs it under torch.compile."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def compilations() -> int:
    """How many graphs torch.compile has compiled in this process. It does not load torch.compile."""
    loaded: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else loaded.counters["stats"]["unique_graphs"]


def remove_hook(handle: RemovableHandle) -> None:
    """Remove a global module hook, and the mark that it takes keyword arguments, which torch would leave."""
    handle.remove()
    _global_forward_hooks_with_kwargs.pop(handle.id, None)

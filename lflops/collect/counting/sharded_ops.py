"""Operators on tensors that are spread over ranks: what the whole of one computes, whatever part of it this rank does."""

from typing import Any

import torch
from torch import Tensor

from lflops.collect.counting.operators import Kind, Operator
from lflops.collect.torch_private.dispatch_modes import TorchDispatchMode, pop_mode, push_mode, without_modes
from lflops.collect.torch_private.operators import decompose
from lflops.formulas.table import Cost

__all__ = ["is_sharded", "unsharded_cost"]


def is_sharded(kind: type) -> bool:
    """Whether tensors of this class are spread over ranks; asked by name, for most runs have no need of the class."""
    return kind.__name__ == "DTensor"


def unsharded_cost(operator: Operator, function: Any, args: Any, kwargs: Any, out: Any) -> Cost | None:
    """From the whole shapes, which such tensors have for their own; `None` where no formula tells.

    What is written in other operators runs once more, on tensors that are shapes alone.
    """
    if operator.kind is Kind.COUNTED:
        try:
            return operator.cost(args, kwargs, out)
        except Exception:  # noqa: BLE001 - the local operator fails likewise, and is listed
            return None
    if operator.kind is not Kind.DECOMPOSED:
        return None
    adding = _Adding()
    with without_modes():
        push_mode(adding)
        try:
            decompose(function, *_shapes_of((args, kwargs)))
        except Exception:  # noqa: BLE001 - whatever asks for more than shapes
            return None
        finally:
            pop_mode(adding)
    return Cost(adding.macs)


class _Adding(TorchDispatchMode):
    """Adds products up, and nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, Operator(function)
        if operator.kind is Kind.DECOMPOSED:
            push_mode(self)
            try:
                return decompose(function, args, kwargs)
            finally:
                pop_mode(self)
        out = function(*args, **kwargs)
        self.macs += operator.cost(args, kwargs, out).macs
        return out


def _shapes_of(value: Any) -> Any:
    """The same structure with tensors on no device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _shapes_of(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_shapes_of, value))
    return value

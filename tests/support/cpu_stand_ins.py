"""CPU stand-ins for GPU kernels.

Each returns results of the right shape, so that torch's functions that call the kernel run here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["packed_attention_kernels"]


def _forward(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    tokens, heads = query.shape[-3:-1]
    empty = query.new_empty(0)
    return query * 1, query.new_zeros(heads, tokens), empty, empty, empty


def _forward_into(out: Tensor, query: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_zeros(query.shape[-2], query.shape[-3])


def _backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query * 1, key * 1, value * 1


def _efficient(query: Tensor, _key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    empty = query.new_empty(0)
    return (
        query[..., :1] * value[..., :1].sum() + query.new_zeros(*query.shape[:-1], value.shape[-1]),
        empty,
        empty,
        empty,
        0,
        0,
    )


def _efficient_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return query * 1, key * 1, value * 1, query.new_empty(0)


def packed_attention_kernels() -> Iterator[None]:
    """Register CPU kernels for packed attention, until the generator is closed."""
    kernels: dict[str, Callable[..., Any]] = {
        "_flash_attention_forward": _forward,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
        "_flash_attention_backward": _backward,
        "_efficient_attention_forward": _efficient,
        "_efficient_attention_backward": _efficient_backward,
    }
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()

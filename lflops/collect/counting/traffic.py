"""The least bytes that an operator has to move: distinct inputs read once, results written once, views none.

A dimension that is only repeated (stride 0) counts once. A gather reads the rows it takes, not the table they come from; a scatter in place
writes what it is given, not all that it could write to; what is overwritten is not read.
"""

from typing import Any

import torch
from torch import Tensor

from lflops.collect.counting.operators import Operator
from lflops.collect.torch_compat import sparse_parts

__all__ = ["bytes_moved", "size", "tensors_of"]

GATHERS = frozenset(
    ("embedding", "gather", "index", "index_select", "take", "_unsafe_index", "_embedding_bag", "_embedding_bag_forward_only")
)
SCATTERS = frozenset(
    ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_")
)
FILLS = ("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
OVERWRITES = frozenset((*FILLS, "copy_", "_foreach_copy_", "_foreach_zero_", "_fill_mem_eff_dropout_mask_"))


def bytes_moved(operator: Operator, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written by one call."""
    if operator.packet in SCATTERS:
        return _given(args[1:], kwargs) + max((size(each) for each in tensors_of(args[1:])), default=0)
    written = _written(operator, args, kwargs, out)
    if operator.packet in GATHERS:
        return _given(args[1:], kwargs) + 2 * written
    read = {id(each): each for each in tensors_of(args)}
    overwritten = 0
    if operator.packet in OVERWRITES:
        overwritten = sum(size(each) for each in tensors_of(args[:1]))
    for name, value in kwargs.items():
        if not any(name == out_name for out_name, _ in operator.written):
            read.update((id(each), each) for each in tensors_of((value,)))
    return sum(map(size, read.values())) - overwritten + written


def size(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    if tensor.layout is not torch.strided:
        return sum(size(part) for part in _sparse_parts(tensor))
    whole: int = tensor.nbytes
    if not whole or tensor.is_contiguous():
        return whole
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not stride:
            whole //= extent
    return whole


def _written(operator: Operator, args: Any, kwargs: Any, out: Any) -> int:
    returned = list(tensors_of((out,)))
    if returned or not operator.written:
        return sum(map(size, returned))
    places = [args[place] if place < len(args) else kwargs.get(name) for name, place in operator.written]
    return sum(map(size, tensors_of(places)))


def _given(args: Any, kwargs: Any) -> int:
    return sum(map(size, tensors_of((*args, *kwargs.values()))))


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, in lists too."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(tensors_of(value))
    return found


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()

"""The least bytes that an operator has to move: distinct inputs read once, results written once, views none.

A dimension that is only repeated (stride 0) counts once. A gather reads the rows it takes, not the table they come from; a scatter in place
sets what it is given, not all that it could, and reads that first where it adds to it; what is overwritten or only asked for its shape is
not read.
"""

import contextlib
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from lflops.collect.counting.operators import Operator
from lflops.collect.torch_private.tensors import sparse_parts

__all__ = ["bytes_moved", "size", "tensors_of"]

TAKES_ITS_RESULT = ("embedding", "gather", "index", "index_select", "take", "_unsafe_index")
TAKES: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), lambda args: _rows(args[0], args[1])),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), lambda args: int(args[1].numel())),
}
"""Elements of its first argument that a gather takes."""

SETS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("index_put_", "_index_put_impl_"), lambda args: _indexed(args[0], args[1], args[2])),
    **dict.fromkeys(("index_add_", "index_copy_", "index_reduce_"), lambda args: int(args[3].numel())),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), lambda args: int(args[2].numel())),
    "masked_scatter_": lambda args: min(args[1].numel(), args[2].numel()),
    "index_fill_": lambda args: args[0].numel() // max(args[0].shape[args[1]], 1) * args[2].numel(),
    "put_": lambda args: int(args[1].numel()),
    "embedding_renorm_": lambda args: _rows(args[0], args[1]),
}
"""Elements of its first argument that a scatter sets."""

ADDS = frozenset(("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_", "embedding_renorm_"))
ADDS_WHEN_TOLD = frozenset(("index_put_", "_index_put_impl_", "put_"))

LIKENESSES = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full")
FILLS = ("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
COPIES = ("copy_", "fsdp::copy_", "_foreach_copy_", "_foreach_zero_", "_fill_mem_eff_dropout_mask_")
POOLS = ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
NOT_READ = {
    **dict.fromkeys((*TAKES_ITS_RESULT, *TAKES, *SETS, *LIKENESSES, *FILLS, *COPIES), 0),
    **dict.fromkeys((f"{pool}_backward" for pool in (*POOLS, "max_pool2d_with_indices", "max_pool3d_with_indices")), 1),
    **dict.fromkeys((f"{kind}_pad{each}d_backward" for kind in ("reflection", "replication") for each in (1, 2, 3)), 1),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), 1),
}
"""Which argument is overwritten, only asked for its shape, or read in part."""


def bytes_moved(operator: Operator, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written by one call. A rule of the tables' that cannot read the call leaves it to the general one."""
    if operator.known_as in NOT_READ:
        with contextlib.suppress(Exception):  # or the formula would be blamed, and the call not counted at all
            return _moved(operator, operator.known_as, args, kwargs, out)
    return _moved(operator, "", args, kwargs, out)


def _moved(operator: Operator, packet: str, args: Any, kwargs: Any, out: Any) -> int:
    skipped = NOT_READ.get(packet)
    given: dict[int, Tensor] = {}
    for place, arg in enumerate(args):
        if place == skipped:
            continue
        if isinstance(arg, Tensor):
            given[id(arg)] = arg
        elif isinstance(arg, list | tuple):
            given.update((id(each), each) for each in tensors_of(arg))
    for name, value in kwargs.items():
        if not any(name == out_name for out_name, _ in operator.written):
            given.update((id(each), each) for each in tensors_of((value,)))
    read = sum(map(size, given.values()))
    if packet in SETS:
        written: int = SETS[packet](args) * args[0].element_size()
        adds = packet in ADDS or (packet in ADDS_WHEN_TOLD and len(args) > 3 and args[3])
        return read + written * (2 if adds else 1)
    written = _written(operator, args, kwargs, out)
    if packet in TAKES_ITS_RESULT:
        read += written
    elif packet in TAKES:
        read += TAKES[packet](args) * args[0].element_size()
    return read + written


def size(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        nbytes: int = tensor.nbytes
        return nbytes
    if tensor.layout is not torch.strided or tensor.is_nested:
        parts = _sparse_parts(tensor)
        return sum(map(size, parts)) if parts else tensor.numel() * tensor.element_size()
    whole: int = tensor.nbytes
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not stride and extent:
            whole //= extent
    return whole


def _written(operator: Operator, args: Any, kwargs: Any, out: Any) -> int:
    if isinstance(out, Tensor):
        return size(out)
    returned = tensors_of((out,))
    if returned or not operator.written:
        return sum(map(size, returned))
    # A fused optimizer writes gradients only where it has to unscale them.
    unwritten = "grads" if operator.known_as.startswith("_fused_") and kwargs.get("grad_scale") is None else ""
    places = [args[place] if place < len(args) else kwargs.get(name) for name, place in operator.written if name != unwritten]
    return sum(map(size, tensors_of(places)))


def _rows(table: Tensor, indices: Tensor) -> int:
    """Elements of the rows that the indices name."""
    return indices.numel() * table.shape[-1]


def _indexed(x: Tensor, indices: Any, values: Tensor) -> int:
    """Elements that `x[indices] = values` sets. How many a mask names only its values tell: at least as many as it is given."""
    named = [each for each in indices if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for each in named):
        return values.numel()
    places = torch.broadcast_shapes(*(each.shape for each in named))
    whole = [extent for place, extent in enumerate(x.shape) if place >= len(indices) or indices[place] is None]
    return int(places.numel()) * prod(whole)


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

"""The bytes of one call: the least traffic of an operator, and the payload of a collective.

The least traffic is each distinct input read once and each result written once. A view moves
nothing, and an expanded dimension (stride 0) counts once. A gather reads the rows that it takes,
not all of the table. A scatter in place writes as many elements as it is given, and reads them
first if it adds to them. An argument that is overwritten, or needed only for its shape, is not
read.
"""

import contextlib
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lflops.torch_private.distributed import group_named
from lflops.torch_private.tensors import PLAIN, sparse_parts

if TYPE_CHECKING:
    from lflops.flop_counter.operators import Operator

GATHERS_RESULT = ("embedding", "gather", "index", "index_select", "take", "_unsafe_index")
GATHERED: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"), lambda args: _rows(args[0], args[1])
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), lambda args: int(args[1].numel())),
}
"""Elements that a gather reads of its first argument."""

SCATTERED: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(
        ("index_put_", "_index_put_impl_"), lambda args: _indexed(args[0], args[1], args[2])
    ),
    **dict.fromkeys(
        ("index_add_", "index_copy_", "index_reduce_"), lambda args: int(args[3].numel())
    ),
    **dict.fromkeys(
        ("scatter_", "scatter_add_", "scatter_reduce_"), lambda args: int(args[2].numel())
    ),
    "masked_scatter_": lambda args: min(args[1].numel(), args[2].numel()),
    "index_fill_": lambda args: args[0].numel() // max(args[0].shape[args[1]], 1) * args[2].numel(),
    "put_": lambda args: int(args[1].numel()),
    "embedding_renorm_": lambda args: _rows(args[0], args[1]),
}
"""Elements that a scatter writes of its first argument."""

ADDS = frozenset(
    ("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_", "embedding_renorm_")
)
ADDS_IF_ASKED = frozenset(("index_put_", "_index_put_impl_", "put_"))

LIKE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_zeros",
    "new_ones",
    "new_full",
)
FILLS = (
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
)
COPIES = ("copy_", "fsdp::copy_", "_foreach_copy_", "_foreach_zero_", "_fill_mem_eff_dropout_mask_")
POOLS = (
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
)
UNREAD = {
    **dict.fromkeys((*GATHERS_RESULT, *GATHERED, *SCATTERED, *LIKE, *FILLS, *COPIES), 0),
    **dict.fromkeys(
        (
            f"{pool}_backward"
            for pool in (*POOLS, "max_pool2d_with_indices", "max_pool3d_with_indices")
        ),
        1,
    ),
    **dict.fromkeys(
        (
            f"{kind}_pad{each}d_backward"
            for kind in ("reflection", "replication")
            for each in (1, 2, 3)
        ),
        1,
    ),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), 1),
}
"""Position of the argument that is overwritten, needed only for its shape, or read in part."""


def bytes_moved(operator: "Operator", args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written by one call.

    If a rule of the tables fails on the call, the general rule applies.
    """
    if operator.known_as in UNREAD:
        with contextlib.suppress(
            Exception
            # or the formula would be blamed, and the call not counted at all
        ):
            return _moved(operator, operator.known_as, args, kwargs, out)
    return _moved(operator, "", args, kwargs, out)


def _moved(operator: "Operator", packet: str, args: Any, kwargs: Any, out: Any) -> int:
    given = list(args)
    if packet:
        del given[UNREAD[packet] : UNREAD[packet] + 1]
    given += [value for name, value in kwargs.items() if name not in operator.written]
    read = sum(map(size, {id(each): each for each in tensors_of(given)}.values()))
    if packet in SCATTERED:
        written: int = SCATTERED[packet](args) * args[0].element_size()
        adds = packet in ADDS or (packet in ADDS_IF_ASKED and len(args) > 3 and args[3])
        return read + written * (2 if adds else 1)
    written = _written(operator, args, kwargs, out)
    if packet in GATHERS_RESULT:
        read += written
    elif packet in GATHERED:
        read += GATHERED[packet](args) * args[0].element_size()
    return read + written


def size(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor.nbytes
    if tensor.layout is not torch.strided or tensor.is_nested:
        parts = _sparse_parts(tensor)
        return sum(map(size, parts)) if parts else tensor.numel() * tensor.element_size()
    distinct = tensor.nbytes
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not stride and extent:
            distinct //= extent
    return distinct


def _written(operator: "Operator", args: Any, kwargs: Any, out: Any) -> int:
    if isinstance(out, Tensor):
        return size(out)
    returned = tensors_of((out,))
    if returned or not operator.written:
        return sum(map(size, returned))
    # A fused optimizer writes gradients only where it has to unscale them.
    unwritten = (
        "grads"
        if operator.known_as.startswith("_fused_") and kwargs.get("grad_scale") is None
        else ""
    )
    written = [
        args[at] if at < len(args) else kwargs.get(name)
        for name, at in operator.written.items()
        if name != unwritten
    ]
    return sum(map(size, tensors_of(written)))


def _rows(table: Tensor, indices: Tensor) -> int:
    return indices.numel() * table.shape[-1]


def _indexed(x: Tensor, indices: Any, values: Tensor) -> int:
    """Elements that `x[indices] = values` writes.

    A mask selects at least as many as there are values.
    """
    named = [each for each in indices if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for each in named):
        return values.numel()
    selected = torch.broadcast_shapes(*(each.shape for each in named))
    unindexed = [
        extent for dim, extent in enumerate(x.shape) if dim >= len(indices) or indices[dim] is None
    ]
    return int(selected.numel()) * prod(unindexed)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if type(value) in PLAIN or isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


Collective = tuple[
    str, str, int | None, int
    # name, process group, the group's size, bytes of the payload
]


def collective_of(name: str, args: Any, kwargs: Any, out: Any) -> Collective:
    """What a collective transfers.

    The larger of the bytes that this rank gives and those that it receives.
    """
    # An argument may be an output buffer, so each is counted on its own.
    payload = max(sum(map(size, tensors_of((each,)))) for each in (*args, *kwargs.values(), out))
    group = next(
        (found for found in map(_group, (*args, *kwargs.values())) if found is not None), None
    )
    return (
        name.rpartition("::")[2],
        "" if group is None else group.group_name,
        None if group is None else group.size(),
        payload,
    )


def is_deferred(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a collective of backward is begun as DDP begins those of gradients.

    They are awaited when all nodes have run.
    """
    asynchronous = kwargs.get("async_op", args[4] if len(args) > 4 else True)
    return name.rpartition("::")[2] == "allreduce_" and asynchronous is not False


def _group(value: Any) -> Any:
    if isinstance(value, str):
        return group_named(value)
    if isinstance(value, torch.ScriptObject) and distributed.is_available():
        with contextlib.suppress(RuntimeError, TypeError):
            return distributed.ProcessGroup.unbox(value)
    return None

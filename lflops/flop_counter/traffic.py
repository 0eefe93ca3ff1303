"""Compute the bytes of one call: the memory traffic of an operator, or a collective's payload.

The memory traffic is the least that the operator needs: it reads each input once and writes each
result once. A tensor that is passed twice is read once. A view moves nothing, and an expanded
dimension (stride 0) counts once. A gather such as `embedding` reads the selected rows, not the
whole table. An in-place scatter such as `index_add_` writes only the selected elements, and also
reads them if it adds to them. An argument that is only overwritten, or needed only for its shape,
is not read.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from lflops.inputs.tensors import argument
from lflops.torch_private.distributed import group_named
from lflops.torch_private.tensors import PLAIN, sparse_parts

if TYPE_CHECKING:
    from lflops.flop_counter.operators import Operator

GATHERS_RESULT = ("embedding", "gather", "index", "index_select", "take", "_unsafe_index")
"""Operators (gathers) that read one element of their first argument for each returned element."""


def _rows(table: Tensor, indices: Tensor) -> int:
    return indices.numel() * table.shape[-1]


def _indexed(x: Tensor, indices: Any, values: Tensor) -> int:
    """Return the number of elements that `x[indices] = values` writes.

    If `indices` contains a mask, this number is unknown. In this case, return the number of
    elements of `values`, which is a lower bound.
    """
    index_tensors = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in index_tensors):
        return values.numel()
    selected = torch.broadcast_shapes(*(index.shape for index in index_tensors))
    elements = int(selected.numel())
    for dim, extent in enumerate(x.shape):
        if dim >= len(indices) or indices[dim] is None:
            elements *= extent
    return elements


def _filled_slices(args: Any) -> int:
    tensor, dim, indices = args[:3]
    elements_per_index = tensor.numel() // max(tensor.shape[dim], 1)
    return int(elements_per_index * indices.numel())


def _elements_of(position: int) -> Callable[[Any], int]:
    """Return a function that returns the number of elements of the argument at `position`."""

    def elements(args: Any) -> int:
        return int(args[position].numel())

    return elements


def _rows_of_first(args: Any) -> int:
    return _rows(args[0], args[1])


def _index_put_elements(args: Any) -> int:
    return _indexed(args[0], args[1], args[2])


GATHERED: dict[str, Callable[[Any], int]] = {
    "_embedding_bag": _rows_of_first,
    "_embedding_bag_forward_only": _rows_of_first,
    "nll_loss_forward": _elements_of(1),
    "nll_loss2d_forward": _elements_of(1),
}
"""For each gather operator, a function that returns the number of elements that a call reads."""

SCATTERED: dict[str, Callable[[Any], int]] = {
    "index_put_": _index_put_elements,
    "_index_put_impl_": _index_put_elements,
    "index_add_": _elements_of(3),
    "index_copy_": _elements_of(3),
    "index_reduce_": _elements_of(3),
    "scatter_": _elements_of(2),
    "scatter_add_": _elements_of(2),
    "scatter_reduce_": _elements_of(2),
    "masked_scatter_": lambda args: min(args[1].numel(), args[2].numel()),
    "index_fill_": _filled_slices,
    "put_": _elements_of(1),
    "embedding_renorm_": _rows_of_first,
}
"""For each scatter operator, a function that returns the number of elements that a call writes."""

ADDS = frozenset(
    ("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_", "embedding_renorm_")
)
"""Scatter operators that read each element before they write it, because they add to it."""

ADDS_IF_ASKED = frozenset(("index_put_", "_index_put_impl_", "put_"))
"""Scatter operators that add to the elements only if their argument `accumulate` is true.

`accumulate` is the fourth positional argument.
"""

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
POOL_BACKWARDS = (
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
)
PAD_BACKWARDS = (
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
)
LOSS_BACKWARDS = ("nll_loss_backward", "nll_loss2d_backward")
UNREAD = {
    **dict.fromkeys((*GATHERS_RESULT, *GATHERED, *SCATTERED, *LIKE, *FILLS, *COPIES), 0),
    **dict.fromkeys((*POOL_BACKWARDS, *PAD_BACKWARDS, *LOSS_BACKWARDS), 1),
}
"""The position of the argument that an operator does not read completely, keyed by operator.

Operators usually read all of their arguments. The argument at this position is an exception: it is
overwritten, read only in part, or needed only for its shape.
"""


def bytes_moved(operator: "Operator", args: Any, kwargs: Any, out: Any) -> int:
    """Return the number of bytes that one call reads and writes.

    Operators in `UNREAD` have special rules. For all other operators, and if a special rule fails,
    all arguments count as read and all results count as written.
    """
    name = operator.table_name
    if name in UNREAD:
        # An error here would count as an error of the formula, and the call would not be counted.
        with contextlib.suppress(Exception):
            return _moved_by_rule(operator, name, args, kwargs, out)
    return _read(operator, args, kwargs) + _written(operator, args, kwargs, out)


def _moved_by_rule(operator: "Operator", name: str, args: Any, kwargs: Any, out: Any) -> int:
    read_args = list(args)
    # An argument that is passed by keyword is not in the list.
    if UNREAD[name] < len(read_args):
        del read_args[UNREAD[name]]
    read = _read(operator, read_args, kwargs)
    if name in SCATTERED:
        scattered: int = SCATTERED[name](args) * args[0].element_size()
        adds = name in ADDS or (name in ADDS_IF_ASKED and len(args) > 3 and args[3])
        return read + scattered * (2 if adds else 1)
    written = _written(operator, args, kwargs, out)
    if name in GATHERS_RESULT:
        read += written
    elif name in GATHERED:
        read += GATHERED[name](args) * args[0].element_size()
    return read + written


def _read(operator: "Operator", args: Any, kwargs: Any) -> int:
    """Return the number of bytes that a call reads: all arguments except outputs such as `out=`.

    A tensor that is passed more than once counts once.
    """
    inputs = list(args)
    for name, value in kwargs.items():
        if name not in operator.written_arguments:
            inputs.append(value)
    distinct = {id(tensor): tensor for tensor in tensors_of(inputs)}
    return sum(map(size, distinct.values()))


def _written(operator: "Operator", args: Any, kwargs: Any, out: Any) -> int:
    """Return the number of bytes that a call writes: the bytes of its results.

    If the operator returns nothing, return the bytes of the arguments that it writes to.
    """
    if isinstance(out, Tensor):
        return size(out)
    returned = tensors_of((out,))
    if returned or not operator.written_arguments:
        return sum(map(size, returned))
    # A fused optimizer writes to the gradients only to unscale them.
    is_fused = operator.table_name.startswith("_fused_")
    writes_gradients = not is_fused or kwargs.get("grad_scale") is not None
    written = []
    for name, position in operator.written_arguments.items():
        if name != "grads" or writes_gradients:
            written.append(argument(args, kwargs, position, name))
    return sum(map(size, tensors_of(written)))


def size(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes. Elements that share memory count once."""
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


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in a sequence, and in the lists and tuples nested in it."""
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


class Collective(NamedTuple):
    """One call of a collective operator.

    Attributes:
        name: The operator's name without its namespace.
        group: The name of the process group, or an empty string if unknown.
        group_size: The number of ranks in the group, or `None` if unknown.
        payload: The larger of the bytes that this rank sends and the bytes that it receives.
    """

    name: str
    group: str
    group_size: int | None
    payload: int


def collective_of(name: str, args: Any, kwargs: Any, out: Any) -> Collective:
    """Return the process group and the payload of a call of a collective operator."""
    # An argument may be an output buffer, so each argument is measured separately.
    payload = 0
    for value in (*args, *kwargs.values(), out):
        payload = max(payload, sum(map(size, tensors_of((value,)))))
    operator = name.rpartition("::")[2]
    for value in (*args, *kwargs.values()):
        group = _group(value)
        if group is not None:
            return Collective(operator, group.group_name, group.size(), payload)
    return Collective(operator, "", None, payload)


def is_deferred(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a collective in backward is an asynchronous gradient all-reduce, as in DDP.

    Ranks wait for such a collective only after all autograd nodes have run, and not in the module
    that starts it.
    """
    if name.rpartition("::")[2] != "allreduce_":
        return False
    is_asynchronous: bool = argument(args, kwargs, 4, "async_op", default=True) is not False
    return is_asynchronous


def _group(value: Any) -> Any:
    """Return the process group that an argument of a collective stands for.

    The argument may be the name of a process group, or a `torch.ScriptObject` that wraps a process
    group. For any other argument, return `None`.
    """
    if isinstance(value, str):
        return group_named(value)
    if isinstance(value, torch.ScriptObject) and distributed.is_available():
        with contextlib.suppress(RuntimeError, TypeError):
            return distributed.ProcessGroup.unbox(value)
    return None

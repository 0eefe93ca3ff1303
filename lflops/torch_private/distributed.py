"""Access process groups, their store, and the flat parameters of FSDP1."""

import contextlib
from collections.abc import Collection, Iterator
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class FlatPart(NamedTuple):
    """One of the user's parameters in an FSDP1 flat parameter.

    FSDP1 joins the parameters of a module into one flat parameter and divides its elements among
    the ranks.

    Attributes:
        stored_in: The user's parameter if FSDP1 keeps it, otherwise the flat parameter.
        module: The module that owns the user's parameter.
        elements: The number of elements of the user's parameter.
        local_elements: The number of these elements that this rank holds.
    """

    stored_in: Tensor
    module: nn.Module
    elements: int
    local_elements: int


def flat_parts(module: Any) -> Iterator[FlatPart]:
    """Yield the user's parameters in the flat parameter of an FSDP1 module.

    Yields nothing for any other module.
    """
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is None or type(module).__name__ != "FullyShardedDataParallel":
        return
    stored_in = flat._params or [flat] * len(flat._numels)
    parts = zip(stored_in, flat._param_infos, flat._numels, flat._shard_param_infos, strict=True)
    for tensor, info, elements, shard in parts:
        yield FlatPart(tensor, info.module, elements, shard.numel_in_shard or 0)


def group_named(name: str) -> Any:
    """Return the process group with this name, or `None`."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return torch._C._distributed_c10d._resolve_process_group(cast("Any", name))
    return None


def wait_operator() -> Any:
    """Return the operator `wait_tensor`, which waits for the result of a functional collective."""
    return torch.ops._c10d_functional.wait_tensor.default


def receive_operator() -> Any:
    """Return the operator `recv_`, which receives tensors from another rank into its arguments.

    Returns `None` if this build of torch has no process groups.
    """
    return getattr(getattr(torch.ops.c10d, "recv_", None), "default", None)


_VOTES = ("_warmup_forward_vote", "_warmup_backward_result")
"""Functions of torch in which pipeline stages agree on whether the shapes of tensors are known."""

_STAGES = str(Path("distributed", "pipelining", "stage.py"))
"""Last parts of the path of the torch file that defines the functions in `_VOTES`."""


def is_pipeline_vote() -> bool:
    """Return whether this thread runs one of the functions in `_VOTES`.

    In these functions, the stages of a torch pipeline exchange a small tensor that does not belong
    to the model.
    """
    return _is_called_by(_VOTES, _STAGES)


_INFERS = ("_propagate_tensor_meta_non_cached",)
"""Function of DTensor that runs an operator only to infer the shape of its result."""

_SHARDING = str(Path("distributed", "tensor", "_sharding_prop.py"))
"""Last parts of the path of the torch file that defines the function in `_INFERS`."""


def infers_sharding() -> bool:
    """Return whether DTensor is calling an operator only to infer the shape of its result.

    DTensor makes this call in addition to the real call, on fake tensors with the shapes that the
    tensors have before they are sharded. If a fake mode is already active, these fake tensors are
    on the same device as the tensors of the real call, and only the call stack distinguishes the
    two calls.
    """
    return _is_called_by(_INFERS, _SHARDING)


def _is_called_by(functions: Collection[str], file: str) -> bool:
    """Return whether this thread runs one of these functions of a file.

    `file` is the last parts of the file's path, such as `pipelining/stage.py`.
    """
    for frame, _ in walk_stack(currentframe()):
        code = frame.f_code
        if code.co_name in functions and code.co_filename.endswith(file):
            return True
    return False


def group_store() -> Any:
    """Return the key-value store of the default process group, or `None` if there is none."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, AssertionError):
        return torch.distributed.distributed_c10d._get_default_store()
    return None


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Return a context with a process group of this process and ranks that do not exist.

    Collectives of the group return immediately, with results of the right shape.
    """
    # This import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()

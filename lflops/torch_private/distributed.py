"""Process groups, their store, and the flat parameters of the first FSDP."""

import contextlib
from collections.abc import Iterable, Iterator
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class FlatPart(NamedTuple):
    """One parameter of the user's inside a flat parameter of the first FSDP."""

    # the parameter itself, or the flat parameter that has its elements
    stored_in: Tensor
    # that owns it
    module: nn.Module
    elements: int
    # on this rank
    local_elements: int


def flat_parts(module: Any) -> Iterable[FlatPart]:
    """The user's parameters inside a module's flat parameter.

    Empty unless the module is wrapped by the first FSDP.
    """
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is None or type(module).__name__ != "FullyShardedDataParallel":
        return ()
    local = (each.numel_in_shard or 0 for each in flat._shard_param_infos)
    owners = (each.module for each in flat._param_infos)
    return map(
        FlatPart._make,
        zip(flat._params or [flat] * len(flat._numels), owners, flat._numels, local, strict=True),
    )


def group_named(name: str) -> Any:
    """The process group of that name, or `None`."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return torch._C._distributed_c10d._resolve_process_group(cast("Any", name))
    return None


def wait_operator() -> Any:
    """The operator that waits for a collective's result, and returns it."""
    return torch.ops._c10d_functional.wait_tensor.default


def receive_operator() -> Any:
    """The operator that receives tensors of another rank, and writes them.

    `None` in a torch without process groups.
    """
    return getattr(getattr(torch.ops.c10d, "recv_", None), "default", None)


_VOTES, _STAGES = (
    ("_warmup_forward_vote", "_warmup_backward_result"),
    str(Path("distributed", "pipelining", "stage.py")),
)
"""Functions in which the stages of a pipeline vote, and their file."""


def is_pipeline_vote() -> bool:
    """Whether stages of torch's pipelines are asking each other now if their shapes are given."""
    running = (frame.f_code for frame, _ in walk_stack(currentframe()))
    return any(code.co_name in _VOTES and code.co_filename.endswith(_STAGES) for code in running)


def group_store() -> Any:
    """The store of the default process group; `None` without a group or a store."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, AssertionError):
        return torch.distributed.distributed_c10d._get_default_store()
    return None


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group of one rank and others that do not exist.

    Collectives return at once, with results of the right shape.
    """
    # registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()

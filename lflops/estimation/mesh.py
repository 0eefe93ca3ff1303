"""A model parallelized as one rank of a mesh has it, in a group whose other ranks do not exist.

Torch's own wrappers run on fake tensors, except for DistributedDataParallel, whose buckets lflops
makes itself.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lflops.errors import CountError
from lflops.estimation.fake_tensors import like_sharded
from lflops.flop_counter.live_memory import ON_HOST, on_stream
from lflops.inputs.arguments import describe, is_whole
from lflops.model.module_tree import blocks_in
from lflops.profile.profile import Profile
from lflops.torch_private.distributed import fake_group
from lflops.torch_private.self_check import check_fake_group
from lflops.torch_private.tensors import local_part

DIMENSIONS = ("pipeline", "replica", "data", "tensor")
"""In the order of the mesh: stages of a pipeline, which the user's code makes; replicas of what FSDP2 shards over `data`;

`tensor`
divides each part. Replicas alone are DDP's.
"""

_ALL_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(
    distributed,
    "reduce_scatter_single",
    distributed.reduce_scatter_tensor,
    # torch 2.13 has renamed both
)

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""From the words of a transformers `tp_plan` to torch's styles."""


def checked_mesh(caller: str, mesh: Any) -> dict[str, int]:
    """The mesh, in its order; empty where it is one rank."""
    if mesh is None:
        return {}
    taken = f"give ranks by {', '.join(map(repr, DIMENSIONS))}, as {{'data': 8, 'tensor': 4}}"
    if not isinstance(mesh, Mapping) or not mesh or any(name not in DIMENSIONS for name in mesh):
        raise CountError(f"{caller}: mesh={describe(mesh)}: {taken}")
    for name, ranks in mesh.items():
        if not is_whole(ranks, 1):
            raise CountError(
                f"{caller}: mesh[{name!r}]={describe(ranks)}: give a whole number of ranks, 1 or more"
            )
    if "replica" in mesh and "tensor" in mesh and "data" not in mesh:
        wrong = "mesh has 'replica' and 'tensor' without 'data': DistributedDataParallel takes no DTensors"
        raise CountError(f"{caller}: {wrong}, give 'data' for 'replica'")
    if "pipeline" in mesh and "replica" in mesh and "data" not in mesh:
        raise CountError(
            f"{caller}: mesh has 'pipeline' and 'replica': DistributedDataParallel of a stage is not estimated, give 'data'"
        )
    return {name: mesh[name] for name in DIMENSIONS if name in mesh}


def checked_rank(caller: str, rank: Any, mesh: Mapping[str, int]) -> int:
    """The rank, which the mesh has."""
    if not is_whole(rank) or rank >= prod(mesh.values()):
        taken = (
            f"mesh={dict(mesh)} has ranks 0 to {prod(mesh.values()) - 1}"
            if mesh
            else "give a mesh, whose rank it is"
        )
        raise CountError(f"{caller}: rank={describe(rank)}: {taken}")
    return int(rank)


def mesh_group(caller: str, mesh: Mapping[str, int], rank: int = 0) -> AbstractContextManager[None]:
    """The process group of a mesh, as the rank has it; none for an empty one."""
    if not mesh:
        return nullcontext()
    if torch.distributed.is_initialized():
        raise CountError(
            f"{caller}: mesh={dict(mesh)}, but a process group is open already: leave mesh out, and shard the model in the function"
        )
    check_fake_group()
    return fake_group(prod(mesh.values()), rank)


def parallelize(
    caller: str,
    model: nn.Module,
    mesh: Mapping[str, int],
    mixed: MixedPrecisionPolicy | None = None,
    *,
    offload: bool = False,
) -> tuple[Tensor, ...]:
    """Divide a model over a mesh.

    Tensor parallelism by its plan, then FSDP2 of each block and of the rest; or replicas of DDP.
    """
    # A model that is divided already is not changed. FSDP2 computes and reduces in the dtypes of
    # `mixed`. If it `offload`s, shards and their gradients are on the host. Returns DDP's buckets,
    # which no module holds.
    if any(local_part(each) is not each for each in model.parameters()) or set(mesh) == {
        "pipeline"
    }:
        return ()
    if set(mesh) == {"replica"}:
        trained = (each for each in model.parameters() if each.requires_grad)
        return tuple(_bucket(parameters, mesh["replica"]) for parameters in assigned(trained))
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "tensor" in mesh:
        parallelize_module(model, devices["tensor"], _plan(caller, model))
    sharded = tuple(name for name in ("replica", "data") if name in mesh)
    if sharded:
        policy, place = (
            mixed or MixedPrecisionPolicy(),
            CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        )
        # A cast to another dtype makes the shard's copy that is gathered. Without one, the copy on
        # the device is gathered itself.
        copies = offload and all(
            policy.param_dtype in (None, each.dtype) for each in model.parameters()
        )
        for part in (*blocks_in(model).values(), model):
            shards: Any = fully_shard(
                part, mesh=devices[sharded], mp_policy=policy, offload_policy=place
            )
            shards.set_custom_all_gather(
                _Collective(_ALL_GATHER, 1, copy_for=mesh["data"] if copies else None)
            )
            shards.set_custom_reduce_scatter(
                _Collective(_REDUCE_SCATTER, 0, 2)
                # its input is of the stream that computes
            )
        for parameter in (each for each in model.parameters() if offload and each.requires_grad):
            parameter.register_post_accumulate_grad_hook(_to_host)
    return ()


def _to_host(parameter: Any) -> None:
    """Put a gradient on the host.

    What it was reduced to on the device is freed when those of its block are there.
    """
    with on_stream(ON_HOST):
        parameter.grad = like_sharded(parameter.grad)


class _Collective:
    """A collective of FSDP2, whose buffers are allocated on these streams in turn, as on CUDA.

    With `copy_for` ranks the rank's part is copied to the device first, until it is sent.
    """

    def __init__(self, run: Callable[..., Any], *streams: int, copy_for: int | None = None) -> None:
        self._run, self._streams, self._copy_for = run, cycle(streams), copy_for
        self._copy: Tensor | None = None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        self._copy = None
        return self._run(output_tensor, input_tensor, **how)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with on_stream(next(self._streams)):
            if self._copy_for is not None:
                self._copy = torch.empty(prod(size) // self._copy_for, dtype=dtype, device=device)
            return torch.empty(*size, dtype=dtype, device=device)


def tensor_plan(model: nn.Module) -> Any:
    """How ranks divide the model, as transformers' models say; nothing for others."""
    return getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)


def _plan(caller: str, model: nn.Module) -> dict[str, ParallelStyle]:
    plan = tensor_plan(model)
    if not isinstance(plan, Mapping) or not plan:
        instead = "apply parallelize_module in the function that builds it, and leave 'tensor' out"
        raise CountError(f"{caller}: {type(model).__name__} has no tp_plan: {instead}")
    unknown = {style for style in plan.values() if style not in STYLES}
    if unknown:
        raise CountError(
            f"{caller}: the model's tp_plan has {min(map(str, unknown))!r}: of these {', '.join(STYLES)} are known"
        )
    return {name: STYLES[style]() for name, style in plan.items()}


def with_mesh(profile: Profile, mesh: Mapping[str, int]) -> Profile:
    """The profile of one of a mesh's ranks."""
    if not mesh:
        return profile
    strategy = {
        "pipeline": "pipeline",
        "replica": "hsdp" if "data" in mesh else "ddp",
        "data": "fsdp2",
        "tensor": "tensor parallel",
    }
    names = [strategy[name] for name in mesh if not (name == "data" and "replica" in mesh)]
    run = replace(
        profile.run,
        world_size=prod(mesh.values()),
        strategy=", ".join(names),
        data_parallel_size=mesh.get("data", 1) * mesh.get("replica", 1),
        tensor_parallel_size=mesh.get("tensor", 1),
    )
    return replace(profile, run=run)


FIRST, LATER = 1 << 20, 25 << 20
"""The bytes from which a bucket is full: the first one's, and those of all others.

They are torch's defaults.
"""


def assigned(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each bucket, from the last to the first, as their gradients become ready.

    A bucket has one dtype.
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= (LATER if full else FIRST):
            full.append(filling.pop(parameter.dtype))
    return [*full, *filling.values()]


def _bucket(parameters: list[nn.Parameter], ranks: int) -> Tensor:
    """One bucket, and hooks that copy each gradient there, reduce the bucket when it is full, and copy the results back."""
    # As with torch's default settings, a gradient and its place in a bucket are separate memory
    bucket = torch.empty(
        sum(each.numel() for each in parameters),
        dtype=parameters[0].dtype,
        device=parameters[0].device,
    )
    places = [
        place.view(each.shape)
        for place, each in zip(
            bucket.split([each.numel() for each in parameters]), parameters, strict=True
        )
    ]
    waiting: set[int] = set()

    def fill(index: int, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        torch.mul(parameter.grad, 1 / ranks, out=places[index])
        waiting.add(index)
        if len(waiting) == len(parameters):
            waiting.clear()
            distributed.all_reduce(bucket)
            for each, place in zip(parameters, places, strict=True):
                if each.grad is not None:
                    each.grad.copy_(place)

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(fill, index))
    return bucket

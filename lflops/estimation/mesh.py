"""Parallelize a model for one rank of a mesh, in a process group without other ranks.

FSDP2 and torch's tensor parallelism run on fake tensors. DistributedDataParallel cannot run on
them, so lflops creates equivalent gradient buckets.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
"""The names of the dimensions of a mesh, outermost first.

The user's code divides the model into the stages of `pipeline`. FSDP2 shards the model over `data`,
and `replica` is the number of copies of each shard. Without `data`, DDP replicates the model over
`replica`. `tensor` is the dimension of tensor parallelism.
"""

# torch 2.13 renamed both collectives.
_ALL_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Functions that create torch's parallel styles.

The keys are the names of styles in the `tp_plan` of a transformers model.
"""


def checked_mesh(caller: str, mesh: Any) -> dict[str, int]:
    """Check the argument `mesh` of a public function, and sort its dimensions as in `DIMENSIONS`.

    Returns the number of ranks in each dimension. For `None`, the result is empty.
    """
    if mesh is None:
        return {}
    if not isinstance(mesh, Mapping) or not mesh or not set(mesh) <= set(DIMENSIONS):
        raise CountError(
            f"{caller}: mesh={describe(mesh)}: pass a dictionary such as "
            f"{{'data': 8, 'tensor': 4}}, with the number of ranks in each dimension; the "
            f"dimensions are {', '.join(map(repr, DIMENSIONS))}"
        )
    for name, ranks in mesh.items():
        if not is_whole(ranks, 1):
            raise CountError(
                f"{caller}: mesh[{name!r}]={describe(ranks)}: "
                "pass a whole number of ranks, at least 1"
            )
    is_ddp = "replica" in mesh and "data" not in mesh
    if is_ddp and "tensor" in mesh:
        raise CountError(
            f"{caller}: mesh has 'replica' without 'data', which means DistributedDataParallel, "
            "but this does not support tensor parallelism: pass 'data' instead of 'replica'"
        )
    if is_ddp and "pipeline" in mesh:
        raise CountError(
            f"{caller}: mesh has 'pipeline' and 'replica' without 'data', but estimates do not "
            "support DistributedDataParallel in a pipeline stage: pass 'data' instead of 'replica'"
        )
    return {name: mesh[name] for name in DIMENSIONS if name in mesh}


def checked_rank(caller: str, rank: Any, mesh: Mapping[str, int]) -> int:
    """Check that a rank exists in the mesh, and return the rank."""
    size = prod(mesh.values())
    if not is_whole(rank) or rank >= size:
        known = f"mesh={dict(mesh)} has ranks 0 to {size - 1}"
        without = "without a mesh, the only rank is 0: pass mesh= as well"
        raise CountError(f"{caller}: rank={describe(rank)}: {known if mesh else without}")
    return int(rank)


def mesh_group(caller: str, mesh: Mapping[str, int], rank: int = 0) -> AbstractContextManager[None]:
    """Return a context with a fake process group that has as many ranks as the mesh.

    For an empty mesh, the context does nothing.
    """
    if not mesh:
        return nullcontext()
    if torch.distributed.is_initialized():
        raise CountError(
            f"{caller}: mesh={dict(mesh)} needs its own process group, but a process group is "
            "already initialized: leave mesh= out, and shard the model in the function that builds "
            "the model"
        )
    check_fake_group()
    return fake_group(prod(mesh.values()), rank)


def is_divided(model: nn.Module) -> bool:
    """Return whether this rank has only a part of at least one parameter of the model."""
    return any(local_part(each) is not each for each in model.parameters())


def parallelize(
    caller: str,
    model: nn.Module,
    mesh: Mapping[str, int],
    mixed: MixedPrecisionPolicy | None = None,
    *,
    offload: bool = False,
) -> tuple[Tensor, ...]:
    """Divide a model over a mesh.

    With DDP, gradient buckets are created and the model stays whole. Otherwise, tensor parallelism
    divides the model according to the model's `tp_plan`, and FSDP2 then shards each block and the
    rest of the model. The model stays unchanged if it is already divided, or if the mesh has only
    the dimension `pipeline`.

    Args:
        caller: Name of the public function; error messages begin with it.
        model: The model.
        mesh: Number of ranks in each dimension.
        mixed: The dtypes in which FSDP2 computes and reduces; `None` keeps the model's dtypes.
        offload: Whether FSDP2 keeps shards and their gradients on the host.

    Returns:
        The gradient buckets of DDP; empty without DDP.
    """
    if is_divided(model) or set(mesh) == {"pipeline"}:
        return ()
    if set(mesh) == {"replica"}:
        buckets = assigned(_trained(model))
        return tuple(_bucket(parameters, mesh["replica"]) for parameters in buckets)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "tensor" in mesh:
        plan = _plan(caller, model)
        _check_heads(caller, model, mesh["tensor"])
        parallelize_module(model, devices["tensor"], plan)
    if "replica" in mesh or "data" in mesh:
        _shard(model, devices, mesh, mixed or MixedPrecisionPolicy(), offload=offload)
    return ()


def _shard(
    model: nn.Module,
    devices: DeviceMesh,
    mesh: Mapping[str, int],
    mixed: MixedPrecisionPolicy,
    *,
    offload: bool,
) -> None:
    """Shard each block of a model, and then the rest of the model, with FSDP2."""
    sharded = tuple(name for name in ("replica", "data") if name in mesh)
    place = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    # With offloading, FSDP2 copies a shard to the device before it gathers the shard. If FSDP2 also
    # changes the dtype, its cast already allocates this copy. Otherwise, `_Collective` has to
    # allocate the copy.
    is_cast = any(mixed.param_dtype not in (None, each.dtype) for each in model.parameters())
    copy_for = None
    if offload and not is_cast:
        copy_for = mesh["data"]
    for part in (*blocks_in(model).values(), model):
        shards: Any = fully_shard(
            part, mesh=devices[sharded], mp_policy=mixed, offload_policy=place
        )
        shards.set_custom_all_gather(_Collective(_ALL_GATHER, 1, copy_for=copy_for))
        # The input of a reduce-scatter is allocated on stream 0, on which the model computes. The
        # output is allocated on stream 2.
        shards.set_custom_reduce_scatter(_Collective(_REDUCE_SCATTER, 0, 2))
    if offload:
        for parameter in _trained(model):
            parameter.register_post_accumulate_grad_hook(_to_host)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _to_host(parameter: Any) -> None:
    """Replace a gradient with a copy on the host, as FSDP2 does when it offloads to the CPU.

    The memory of the gradient on the device is freed when all gradients of the block are ready.
    """
    with on_stream(ON_HOST):
        parameter.grad = like_sharded(parameter.grad)


class _Collective:
    """Runs an FSDP2 collective, and allocates its buffers on the same streams as on CUDA.

    The streams matter because the CUDA allocator reuses freed memory only on the same stream, so
    buffers on several streams reserve more memory. FSDP2 calls `allocate` for each buffer. The
    buffers are allocated on the given streams in turn: the first buffer on the first stream, the
    second buffer on the next stream, and so on.

    With offloading, FSDP2 first copies this rank's shard from the host to the device. Pass the
    number of ranks that share the weights as `copy_for`, to allocate memory for this copy as well.
    """

    def __init__(self, run: Callable[..., Any], *streams: int, copy_for: int | None = None) -> None:
        self._run = run
        self._streams = cycle(streams)
        self._copy_for = copy_for
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
    """Return a transformers model's plan for tensor parallelism, or `None` if it has none."""
    return getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)


def heads_of(model: Any) -> dict[str, int]:
    """Return how many attention heads and key/value heads a transformers model has.

    The keys are descriptions such as `key/value heads`. Tensor parallelism cannot split a head, so
    the number of ranks must divide these numbers. The result is empty for a model without a
    configuration.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    descriptions = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key/value heads",
    }
    heads: dict[str, int] = {}
    for name, description in descriptions.items():
        number = getattr(config, name, None)
        if isinstance(number, int):
            heads[description] = number
    return heads


def _check_heads(caller: str, model: nn.Module, ranks: int) -> None:
    for name, number in heads_of(model).items():
        if number % ranks:
            raise CountError(
                f"{caller}: {type(model).__name__} has {number} {name}, which tensor parallelism "
                f"cannot split over {ranks} ranks: pass a number of ranks that divides {number}"
            )


def _plan(caller: str, model: nn.Module) -> dict[str, ParallelStyle]:
    plan = tensor_plan(model)
    if not isinstance(plan, Mapping) or not plan:
        raise CountError(
            f"{caller}: {type(model).__name__} has no tp_plan: apply parallelize_module in the "
            "function that builds the model, and leave 'tensor' out of the mesh"
        )
    unknown = set(plan.values()).difference(STYLES)
    if unknown:
        raise CountError(
            f"{caller}: the model's tp_plan has the style {min(map(str, unknown))!r}, but lflops "
            f"supports only {', '.join(STYLES)}: apply parallelize_module in the function that "
            "builds the model, and leave 'tensor' out of the mesh"
        )
    return {name: STYLES[style]() for name, style in plan.items()}


def with_mesh(profile: Profile, mesh: Mapping[str, int]) -> Profile:
    """Add the numbers of ranks in the mesh, and the kinds of parallelism, to a profile."""
    if not mesh:
        return profile
    names: list[str] = []
    if "pipeline" in mesh:
        names.append("pipeline")
    if "replica" in mesh:
        names.append("hsdp" if "data" in mesh else "ddp")
    elif "data" in mesh:
        names.append("fsdp2")
    if "tensor" in mesh:
        names.append("tensor parallel")
    run = replace(
        profile.run,
        world_size=prod(mesh.values()),
        strategy=", ".join(names),
        data_parallel_size=mesh.get("data", 1) * mesh.get("replica", 1),
        tensor_parallel_size=mesh.get("tensor", 1),
    )
    return replace(profile, run=run)


FIRST, LATER = 1 << 20, 25 << 20
"""Number of bytes at which DDP's first gradient bucket is full, and the number for later buckets.

These are torch's defaults.
"""


def assigned(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into the gradient buckets of DDP.

    The parameters of a bucket have the same dtype. The first bucket has the model's last
    parameters, because backward computes their gradients first.
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
    """Create a gradient bucket of DDP, and register hooks on the parameters of the bucket.

    The hooks copy the gradients into the bucket, run an all-reduce when the bucket has all
    gradients, and copy the results back. As with torch's default settings, the gradients and the
    bucket do not share memory.
    """
    sizes = [each.numel() for each in parameters]
    first = parameters[0]
    bucket = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    places: list[Tensor] = []
    for part, parameter in zip(bucket.split(sizes), parameters, strict=True):
        places.append(part.view(parameter.shape))
    filled: set[int] = set()

    def fill(index: int, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        torch.mul(parameter.grad, 1 / ranks, out=places[index])
        filled.add(index)
        if len(filled) == len(parameters):
            filled.clear()
            distributed.all_reduce(bucket)
            for each, place in zip(parameters, places, strict=True):
                if each.grad is not None:
                    each.grad.copy_(place)

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(fill, index))
    return bucket

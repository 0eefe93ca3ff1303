"""Distribute a model in several ways, and return the estimated and the real memory of a rank."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lflops
from lflops.profile.profile import Memory

STEPS = 3

# If storages hold more bytes than ever before, they are checked up to LOOKS more times, with a
# pause of BETWEEN_LOOKS seconds before each check.
LOOKS = 10
BETWEEN_LOOKS = 0.002
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LiveStorages(TorchDispatchMode):
    """Measure the live storages that operators have made, before and after each operator.

    It shares no code with lflops.

    A thread of gloo holds the tensors of a collective for some milliseconds after `wait()` has
    returned, and longer on a busy machine. So if there are more bytes than ever before, and some of
    them were passed to a collective, the storages are measured several times, and the smallest
    value counts.

    Storages that gloo allocates for itself are not included, because this mode only sees views of
    them. A profiler would record them, but would miss storages that the threads of gloo free.

    Attributes:
        peak: The largest number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, StorageWeakRef] = {}
        self._given: set[int] = set()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of tensors that may be new."""
        for each in tensors:
            # Other storages are fake: torch uses fake tensors to infer shapes.
            if each.untyped_storage().device.type == "cpu":
                storage = StorageWeakRef(each.untyped_storage())
                self._known[storage.cdata] = storage

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Remember the storages of tensors that are passed to a collective."""
        self._given.update(StorageWeakRef(each.untyped_storage()).cdata for each in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            # The operator is called again with the local tensors.
            return NotImplemented
        # FSDP resizes storages between operators, so they are measured before the operator as well.
        self.look()
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.given(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.hold(each for each in tree_leaves(out) if isinstance(each, Tensor))
        self.look()
        return out

    def look(self) -> None:
        """Measure the live storages, and update the peak."""
        held = self._bytes()
        self._given &= self._known.keys()
        for _ in range(LOOKS if self._given else 0):
            if held <= self.peak:
                return
            time.sleep(BETWEEN_LOOKS)
            held = min(held, self._bytes())
        self.peak = max(self.peak, held)

    def _bytes(self) -> int:
        """Return the bytes of all live storages, and forget the others."""
        self._known = {key: each for key, each in self._known.items() if not _is_gone(each)}
        storages: list[Any] = [
            torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._known.values()
        ]
        return sum(each.nbytes() for each in storages if each is not None)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())


class Size(NamedTuple):
    """The sizes of a model and its batch."""

    width: int
    wide: int
    blocks: int
    samples: int


class Blocks(nn.Module):
    """Blocks of two linear layers, and a head.

    `tp_plan` is a plan for tensor parallelism in the format of transformers.
    """

    tp_plan: Mapping[str, str] = {
        "blocks.*.0": "colwise",
        "blocks.*.2": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(size.blocks):
            up = nn.Linear(size.width, size.wide)
            down = nn.Linear(size.wide, size.width)
            self.blocks.append(nn.Sequential(up, nn.GELU(), down))
        self.head = nn.Linear(size.width, size.wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def replicated(model: nn.Module, ranks: int) -> nn.Module:
    """Replicate the model with DDP and its default settings."""
    return DistributedDataParallel(model)


def sharded(
    model: nn.Module,
    ranks: int,
    *,
    reshard: bool | None = None,
    policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard the model with FSDP2, block by block."""
    return _sharded(model, init_device_mesh("cpu", (ranks,)), reshard, policy)


def prefetched(model: nn.Module, ranks: int) -> nn.Module:
    """Shard the model with FSDP2, so that each block prefetches the next two blocks.

    This is so in forward and in backward.
    """
    model = sharded(model, ranks)
    blocks: Any = model.blocks
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(place - 2, 0) : place])))
    return model


def replicated_shards(model: nn.Module, ranks: int) -> nn.Module:
    """Shard the model with FSDP2 in each of two replicas (HSDP)."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "data"))
    return _sharded(model, mesh, None, None)


def in_columns_and_rows(model: nn.Module, ranks: int) -> nn.Module:
    """Divide the model with tensor parallelism over all ranks."""
    return _tensor_parallel(model, init_device_mesh("cpu", (ranks,)))


def sharded_columns_and_rows(model: nn.Module, ranks: int) -> nn.Module:
    """Divide the model with tensor parallelism over two ranks, and shard the parts with FSDP2."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    return _sharded(_tensor_parallel(model, mesh["tensor"]), mesh["data"], None, None)


def _sharded(
    model: nn.Module, mesh: object, reshard: bool | None, policy: MixedPrecisionPolicy | None
) -> nn.Module:
    for part in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy or MixedPrecisionPolicy(),
        )  # type: ignore[call-overload]
    return model


def _tensor_parallel(model: nn.Module, mesh: object) -> nn.Module:
    plan = {
        "blocks.*.0": ColwiseParallel(),
        "blocks.*.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]


class Case(NamedTuple):
    """One way to distribute a model.

    Attributes:
        wrap: Distributes the model over a number of ranks, as a training run does.
        mesh: Returns the `mesh` argument of the estimate for a number of ranks.
        by_hand: Whether the function that is estimated calls `wrap`. This is necessary if `mesh`
            does not describe all settings.
        least: The smallest possible number of ranks.
    """

    wrap: Callable[[nn.Module, int], nn.Module]
    mesh: Callable[[int], Mapping[str, int]]
    by_hand: bool = False
    least: int = 2

    def estimated(
        self,
        size: Size,
        ranks: int,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> int:
        """Return the estimated peak in bytes."""

        def build() -> nn.Module:
            model = Blocks(size)
            return self.wrap(model, ranks) if self.by_hand else model

        profile = lflops.estimate(
            build,
            batch(size),
            backward=True,
            loss=lambda out: out.sum(),
            optimizer=optimizer,
            mesh=self.mesh(ranks),
        )
        memory = profile.memory
        assert memory is not None
        return memory.peak_bytes

    def allocated(
        self,
        size: Size,
        ranks: int,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> int:
        """Train for a few steps on this rank, and return its real peak in bytes."""
        with LiveStorages() as storages:
            model = self.wrap(Blocks(size), ranks)
            x = batch(size)
            stepper = optimizer(model.parameters())
            storages.peak = 0
            for _ in range(STEPS):
                model(x).sum().backward()
                stepper.step()
                stepper.zero_grad()
        return storages.peak


def batch(size: Size) -> Tensor:
    """Return the batch of one rank."""
    return torch.zeros(size.samples, size.width)


def over(*names: str) -> Callable[[int], Mapping[str, int]]:
    """Return a function from the number of ranks to a mesh with one or two dimensions.

    If there are two dimensions, the first one has 2 ranks.
    """

    def mesh(ranks: int) -> Mapping[str, int]:
        if len(names) == 1:
            return {names[0]: ranks}
        return {names[0]: 2, names[1]: ranks // 2}

    return mesh


CASES: dict[str, Case] = {
    "DDP": Case(replicated, over("replica")),
    "FSDP2": Case(sharded, over("data")),
    "FSDP2, not resharded after forward": Case(
        partial(sharded, reshard=False), over("data"), by_hand=True
    ),
    "FSDP2, prefetched": Case(prefetched, over("data"), by_hand=True),
    "FSDP2, bfloat16 by its policy": Case(
        partial(sharded, policy=HALF), over("data"), by_hand=True
    ),
    "HSDP": Case(replicated_shards, over("replica", "data"), least=4),
    "tensor parallel": Case(in_columns_and_rows, over("tensor")),
    "FSDP2 and tensor parallel": Case(
        sharded_columns_and_rows, lambda ranks: {"data": ranks // 2, "tensor": 2}, least=4
    ),
}


def rank_peak(
    name: str,
    size: Size,
    ranks: int,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> int:
    """Return the real peak of this rank in bytes for one of the cases."""
    return CASES[name].allocated(size, ranks, optimizer)


MICROBATCHES = 4
SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
}


def stage_of(size: Size) -> nn.Module:
    """Return the blocks of one pipeline stage. All stages are identical."""
    return nn.Sequential(*Blocks(size).blocks)


class ScheduledStep:
    """A training step with a pipeline schedule of torch. The schedule is made in the first step."""

    def __init__(self, schedule: str, size: Size) -> None:
        self._kind = SCHEDULES[schedule]
        self._size = size
        self._schedule: PipelineScheduleSingle | None = None

    def __call__(self, stage: nn.Module, x: Tensor) -> None:
        rank = distributed.get_rank()
        stages = distributed.get_world_size()
        if self._schedule is None:
            shape = (self._size.samples // MICROBATCHES, self._size.width)
            example_input = torch.zeros(shape, requires_grad=rank > 0)
            example_output = torch.zeros(shape, requires_grad=True)
            made = PipelineStage(
                stage,
                rank,
                stages,
                torch.device("cpu"),
                input_args=example_input,
                output_args=example_output,
            )
            self._schedule = self._kind(made, MICROBATCHES, loss_fn=lambda out, _: out.sum())
        if rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=x if rank == stages - 1 else None)


def estimated_stage(schedule: str, size: Size, stages: int, rank: int) -> Memory:
    """Return the estimated memory of one stage."""
    step = ScheduledStep(schedule, size)
    model = partial(stage_of, size)
    profile = lflops.estimate(
        model,
        batch(size),
        optimizer=torch.optim.AdamW,
        mesh={"pipeline": stages},
        rank=rank,
        step=step,
    )
    assert profile.memory is not None
    return profile.memory


def stage_peak(schedule: str, size: Size) -> int:
    """Train for a few steps as one stage, and return the real peak of this rank in bytes."""
    with LiveStorages() as storages:
        stage = stage_of(size)
        x = batch(size)
        step = ScheduledStep(schedule, size)
        stepper = torch.optim.AdamW(stage.parameters())
        storages.peak = 0
        for _ in range(STEPS):
            step(stage, x)
            stepper.step()
            stepper.zero_grad()
    return storages.peak

"""Ways to distribute a model over ranks, each with its estimate and the real storages of a rank."""

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
LOOKS, BETWEEN_LOOKS = 10, 0.002
"""How often, and after how many seconds, storages are looked at again where they hold more than ever before."""
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LiveStorages(TorchDispatchMode):
    """Looks at all storages that operators have made, before and after each operator.

    It shares no code with lflops.

    A thread of gloo holds a collective's tensors for some milliseconds after `wait()` has returned,
    longer on a busy machine. Where a look finds more than any before, and something of it was given
    to a collective, it is taken again for a while: the least counts.

    What gloo allocates for itself is not among them: a collective makes it, and views of it alone
    are seen. A profiler has it, but misses what gloo's threads free.

    Attributes:
        peak: The most bytes that were alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, StorageWeakRef] = {}
        self._given: set[int] = set()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Add what no operator has made here."""
        for each in tensors:
            if (
                each.untyped_storage().device.type == "cpu"
            ):  # and not fake, as where shapes are inferred
                storage = StorageWeakRef(each.untyped_storage())
                self._known[storage.cdata] = storage

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Note what a collective is given."""
        self._given.update(StorageWeakRef(each.untyped_storage()).cdata for each in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with the local parts
        self.look()  # FSDP resizes storages between operators
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.given(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.hold(each for each in tree_leaves(out) if isinstance(each, Tensor))
        self.look()
        return out

    def look(self) -> None:
        """Note a peak, if it is one."""
        held = self._bytes()
        self._given &= self._known.keys()
        for _ in range(LOOKS if self._given else 0):
            if held <= self.peak:
                return
            time.sleep(BETWEEN_LOOKS)
            held = min(held, self._bytes())
        self.peak = max(self.peak, held)

    def _bytes(self) -> int:
        self._known = {key: each for key, each in self._known.items() if not _is_gone(each)}
        storages: list[Any] = [
            torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._known.values()
        ]
        return sum(each.nbytes() for each in storages if each is not None)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())


class Size(NamedTuple):
    """Of a model and its batch."""

    width: int
    wide: int
    blocks: int
    samples: int


class Blocks(nn.Module):
    """Blocks of two layers, a head, and a plan for tensor parallelism in transformers' words."""

    tp_plan: Mapping[str, str] = {
        "blocks.*.0": "colwise",
        "blocks.*.2": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size.width, size.wide), nn.GELU(), nn.Linear(size.wide, size.width)
            )
            for _ in range(size.blocks)
        )
        self.head = nn.Linear(size.width, size.wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def replicated(model: nn.Module, ranks: int) -> nn.Module:
    """By DDP with its default settings."""
    return DistributedDataParallel(model)


def sharded(
    model: nn.Module,
    ranks: int,
    *,
    reshard: bool | None = None,
    policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """By FSDP2, block by block."""
    return _sharded(model, init_device_mesh("cpu", (ranks,)), reshard, policy)


def prefetched(model: nn.Module, ranks: int) -> nn.Module:
    """By FSDP2; each block gathers the next two while it runs, forward and backward."""
    model = sharded(model, ranks)
    blocks: Any = model.blocks
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(place - 2, 0) : place])))
    return model


def replicated_shards(model: nn.Module, ranks: int) -> nn.Module:
    """Two replicas of what FSDP2 shards."""
    return _sharded(
        model,
        init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "data")),
        None,
        None,
    )


def in_columns_and_rows(model: nn.Module, ranks: int) -> nn.Module:
    """By `parallelize_module`."""
    return _tensor_parallel(model, init_device_mesh("cpu", (ranks,)))


def sharded_columns_and_rows(model: nn.Module, ranks: int) -> nn.Module:
    """Tensor parallelism on two ranks, and FSDP2 of its parts."""
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
    """One way.

    Attributes:
        wrap: What a training does with its model.
        mesh: What an estimate is asked for, by the number of ranks.
        by_hand: Whether the estimated function wraps the model itself: `mesh` alone does not say
            how.
        least: The fewest ranks.
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
        """The estimated peak."""
        build = (lambda: self.wrap(Blocks(size), ranks)) if self.by_hand else partial(Blocks, size)
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
        """The peak of this process, which is one of the ranks, over a few steps."""
        with LiveStorages() as storages:
            model, x = self.wrap(Blocks(size), ranks), batch(size)
            stepper = optimizer(model.parameters())
            storages.peak = 0
            for _ in range(STEPS):
                model(x).sum().backward()
                stepper.step()
                stepper.zero_grad()
        return storages.peak


def batch(size: Size) -> Tensor:
    """One rank's."""
    return torch.zeros(size.samples, size.width)


def over(*names: str) -> Callable[[int], Mapping[str, int]]:
    """A mesh of these dimensions.

    Of two, the one named last has as many ranks as are left by two of the first.
    """
    return lambda ranks: (
        {names[0]: ranks} if len(names) == 1 else {names[0]: 2, names[1]: ranks // 2}
    )


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
    """The peak of this rank under a case."""
    return CASES[name].allocated(size, ranks, optimizer)


MICROBATCHES = 4
SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
}


def stage_of(size: Size) -> nn.Module:
    """The blocks of one stage, all of which are alike."""
    return nn.Sequential(*Blocks(size).blocks)


class ScheduledStep:
    """A step by one of torch's schedules. Like a training, it makes the schedule once."""

    def __init__(self, schedule: str, size: Size) -> None:
        self._kind, self._size = SCHEDULES[schedule], size
        self._schedule: PipelineScheduleSingle | None = None

    def __call__(self, stage: nn.Module, x: Tensor) -> None:
        rank, stages = distributed.get_rank(), distributed.get_world_size()
        if self._schedule is None:
            shape = (self._size.samples // MICROBATCHES, self._size.width)
            given = (
                torch.zeros(shape, requires_grad=rank > 0),
                torch.zeros(shape, requires_grad=True),
            )
            made = PipelineStage(
                stage, rank, stages, torch.device("cpu"), input_args=given[0], output_args=given[1]
            )
            self._schedule = self._kind(made, MICROBATCHES, loss_fn=lambda out, _: out.sum())
        if rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=x if rank == stages - 1 else None)


def estimated_stage(schedule: str, size: Size, stages: int, rank: int) -> Memory:
    """The estimate of one stage."""
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
    """The peak of this process as a stage, over a few steps."""
    with LiveStorages() as storages:
        stage, x, step = stage_of(size), batch(size), ScheduledStep(schedule, size)
        stepper = torch.optim.AdamW(stage.parameters())
        storages.peak = 0
        for _ in range(STEPS):
            step(stage, x)
            stepper.step()
            stepper.zero_grad()
    return storages.peak

"""Test estimates of a model that is divided among ranks: the work and the memory of one rank.

No other rank runs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import lflops
from lflops.profile.profile import Profile

RANKS, TOKENS, NARROW, WIDE = 4, 8, 16, 32
FLOAT = 4
BATCH = torch.ones(TOKENS, NARROW)
SUM = 4
"""Bytes of the number with which backward starts."""

needs_shapes_of_collectives = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives do not say what their results look like, and an estimate says so",
)


@pytest.fixture(autouse=True)
def one_of_four() -> Iterator[None]:
    """Open a process group of four ranks whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


def whole() -> nn.Sequential:
    """Build two layers on one rank."""
    return nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW))


def in_columns_and_rows() -> nn.Module:
    """Divide the wide dimension among the ranks: each rank has a quarter of it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return parallelize_module(whole(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def in_shards() -> nn.Module:
    """Shard each parameter: each rank has a quarter of it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = whole()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def third_step(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> Profile:
    """Return the profile of the third step of a real training run."""
    stepper = optimizer(model.parameters())
    for _ in range(3):
        with lflops.counting(model) as counted:
            model(BATCH).sum().backward()
            stepper.step()
            stepper.zero_grad()
    return counted.profile


@needs_shapes_of_collectives
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("build", [in_columns_and_rows, in_shards])
def test_the_work_and_the_peak_are_those_of_a_rank_that_trains(
    build: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    """The estimate matches the third step of a real rank in work, communication and memory.

    Two tensors differ: only the estimate includes the batch, and only the count of a loop includes
    the number with which backward starts.
    """
    real = third_step(build(), optimizer)
    estimated = lflops.estimate(
        build, BATCH, backward=True, loss=lambda out: out.sum(), optimizer=optimizer
    )
    for phase in ("forward", "backward"):
        assert 0 < real.total(phase=phase) == estimated.total(phase=phase)
    assert real.communication == estimated.communication
    assert real.memory is not None
    assert estimated.memory is not None
    assert abs(real.memory.peak_bytes + BATCH.nbytes - estimated.memory.peak_bytes) <= SUM
    assert (
        real.memory.by_category["optimizer_state"]
        == estimated.memory.by_category["optimizer_state"]
    )


@needs_shapes_of_collectives
def test_gathered_parameters_are_alive_while_their_module_runs() -> None:
    """Each layer's gathered parameters are alive while the layer runs, and freed afterwards.

    FSDP resizes their storages without an operator. Each rank also holds its quarter of all
    parameters all the time.
    """
    estimated = lflops.estimate(in_shards, BATCH, backward=True, loss=lambda out: out.sum())
    assert estimated.memory is not None
    first, second = NARROW * WIDE + WIDE, WIDE * NARROW + NARROW
    own = (first + second) // RANKS
    alive = {
        (moment.operator, moment.module, moment.phase): moment.by_category.parameters // FLOAT
        for moment in estimated.memory.timeline
        if moment.by_category is not None
    }
    assert [own + first, own + second] == [alive["addmm", row, "forward"] for row in ("0", "2")]
    assert own + second == alive["mm", "2", "backward"]
    assert own == alive["relu", "1", "forward"] == alive["fsdp::chunk_cat", "", "backward"]


@needs_shapes_of_collectives
def test_a_module_in_columns_and_rows_may_be_given_as_it_is() -> None:
    """A module under tensor parallelism can be passed directly, and stays unchanged.

    The rank executes a quarter of the MACs and holds a quarter of the sharded weights.
    """
    model = in_columns_and_rows()
    before = [(each, each.grad) for each in model.parameters()]
    estimated = lflops.estimate(model, BATCH, backward=True)
    built = lflops.estimate(in_columns_and_rows, BATCH, backward=True)
    assert 2 * TOKENS * NARROW * WIDE // RANKS == estimated.total()
    assert estimated.op_counts == built.op_counts
    assert estimated.memory is not None
    assert ((2 * NARROW * WIDE + WIDE) // RANKS + NARROW) * FLOAT == estimated.memory.by_category[
        "parameters"
    ]
    assert all(
        old is new and grad is new.grad
        for (old, grad), new in zip(before, model.parameters(), strict=True)
    )


KEEP: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shards": (
        in_shards,
        (
            "the parameters of a module under fully_shard cannot be replaced with fake tensors: "
            "pass a function that builds"
        ),
    ),
    "a wrapper": (
        lambda: DistributedDataParallel(whole()),
        "DistributedDataParallel has buckets as large as the gradients, which fake tensors cannot replace",
    ),
    "a wrapper within": (
        lambda: nn.Sequential(DistributedDataParallel(whole())),
        "pass the module inside the wrapper",
    ),
    "the older shards": (
        lambda: FullyShardedDataParallel(whole(), device_id=torch.device("cpu")),
        "FullyShardedDataParallel has flat parameters, which fake tensors cannot replace",
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.parametrize(("make", "said"), KEEP.values(), ids=KEEP)
def test_a_module_that_keeps_its_real_tensors_is_refused(
    make: Callable[[], nn.Module], said: str
) -> None:
    """The error says what to pass instead, and the module is unchanged."""
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(lflops.CountError, match=f"estimate: .*{said}"):
        lflops.estimate(model, BATCH, backward=True)
    assert all(
        type(each) is not Tensor and each is before[name] for name, each in model.named_parameters()
    )


@needs_shapes_of_collectives
@pytest.mark.parametrize("build", [in_columns_and_rows, in_shards])
def test_the_largest_batch_of_a_rank_is_that_of_its_estimates(
    build: Callable[[], nn.Module],
) -> None:
    """The largest batch fits by an estimate of its own, and one more sample does not.

    The model is sharded once, and each tried batch must leave it unchanged.
    """
    memory_bytes = 100_000
    # An optimizer with one operator per step, because the search makes several estimates.
    fused = partial(torch.optim.AdamW, fused=True)
    how = {"loss": lambda out: out.sum(), "optimizer": fused}
    found = lflops.largest_batch(
        build, lambda samples: torch.ones(samples, NARROW), memory_bytes=memory_bytes, **how
    )
    estimates = [
        lflops.estimate(build, torch.ones(samples, NARROW), backward=True, **how)
        for samples in (found, found + 1)
    ]
    assert [True, False] == [
        each.memory is not None and each.memory.fits(memory_bytes, margin=0) for each in estimates
    ]

"""An estimate of a model that is spread over ranks is what one of them does and keeps.

No other rank is needed.
"""

from collections.abc import Callable, Iterator

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

needs_shapes_of_collectives = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives do not say what their results look like, and an estimate says so",
)


@pytest.fixture(autouse=True)
def one_of_four() -> Iterator[None]:
    """A rank whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


def whole() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW))


def in_columns_and_rows() -> nn.Module:
    """Each rank has a quarter of the wide layer between."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return parallelize_module(whole(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def in_shards() -> nn.Module:
    """Each rank has a quarter of each parameter."""
    mesh, model = init_device_mesh("cpu", (RANKS,)), whole()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def third_step(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> Profile:
    """Of a real training."""
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
    """An estimate holds the batch, which a loop's count does not see.

    That sees the number that backward starts from.
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
    """FSDP resizes their storages without an operator.

    Each rank's quarter; and both layers in turn, the second also in backward.
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
    """It is left so; a rank's part of the products is a quarter, and the weights it holds."""
    model = in_columns_and_rows()
    before = [(each, each.grad) for each in model.parameters()]
    estimated, built = (
        lflops.estimate(each, BATCH, backward=True) for each in (model, in_columns_and_rows)
    )
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
            "the parameters of a module under fully_shard cannot be replaced: pass a function that "
            "builds"
        ),
    ),
    "a wrapper": (
        lambda: DistributedDataParallel(whole()),
        "DistributedDataParallel has buckets as large as the gradients, which fake tensors cannot replace",
    ),
    "a wrapper within": (
        lambda: nn.Sequential(DistributedDataParallel(whole())),
        "pass the module that it wraps",
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
    """What to give in its place is said; and it has not been touched."""
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
    """The model is sharded once, and each batch that is tried finds it as it was."""
    memory_bytes, loss = 100_000, lambda out: out.sum()
    how = {"loss": loss, "optimizer": torch.optim.AdamW}
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

"""Test counts in distributed runs.

Each rank counts its own part of the work, under the names of the model, with DDP, FSDP2 and tensor
parallelism.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import lflops
from lflops import Profile
from lflops.profile.records import Phase
from tests.support.processes import Ranks, Scenario
from tests.support.profile_checks import calls, flops, macs
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)

float32 = 4
"""Bytes per element."""
world = 2
"""Number of ranks in the group of two ranks."""
square_elements = hidden * hidden + hidden
up_elements = hidden * wide + wide
down_elements = wide * hidden + hidden
tensors = 2
"""Number of tensors in a linear layer: weight and bias."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Provide a process group with one process."""
    with Ranks(1, tmp_path_factory.mktemp("one_rank")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Provide a process group with two processes."""
    with Ranks(world, tmp_path_factory.mktemp("two_ranks")) as ranks:
        yield ranks


@pytest.fixture(params=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Provide each of the two process groups."""
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks


def sent(profile: Profile, phase: Phase) -> dict[str, int]:
    """Return the bytes of each collective in one phase."""
    carried: dict[str, int] = {}
    for each in profile.communication:
        if each.phase == phase:
            before = carried.get(each.collective, 0)
            carried[each.collective] = before + each.bytes
    return carried


def data_parallel() -> Profile:
    """Count one pass of a DDP model."""
    return lflops.count(
        DistributedDataParallel(between_linears(Block())), sequence(), backward=True
    )


def test_a_replicated_model_has_its_own_rows_below_the_wrapper(ranks: Ranks) -> None:
    """The modules of a DDP model are named below `module`, as the wrapper registers them.

    Each rank counts the work of its own batch.
    """
    for profile in ranks.run(data_parallel):
        assert {
            "module.0": square,
            "module.1.up": up,
            "module.1.down": down,
            "module.2": square,
        } == macs(profile, "forward")
        assert {
            "module.0": square,
            "module.1.up": 2 * up,
            "module.1.down": 2 * down,
            "module.2": 2 * square,
        } == macs(profile, "backward")
        rows = ("", "module", "module.0", "module.1", "module.1.up", "module.1.down", "module.2")
        assert dict.fromkeys(rows, 1) == calls(profile)


def test_the_gradients_are_reduced_once(ranks: Ranks) -> None:
    """The all-reduce of DDP carries every gradient once, in backward.

    It passes through torch's dispatcher like any other operator.
    """
    elements = 2 * square_elements + up_elements + down_elements
    for profile in ranks.run(data_parallel):
        assert {"allreduce_": float32 * elements} == sent(profile, "backward")
        assert float32 * elements == profile.modules[""].backward.comm_bytes


def compressing(
    _state: object, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook with its own matmul of 2 * 2 * 2 MACs."""
    gradients = bucket.buffer()
    square_of_four = gradients[:4].view(2, 2)
    gradients[:4] += (square_of_four @ square_of_four).flatten()
    return (
        torch.distributed.all_reduce(gradients, async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def compressed() -> Profile:
    """Count one pass of a DDP model with the hook `compressing`."""
    model = DistributedDataParallel(between_linears(Block()))
    model.register_comm_hook(None, compressing)
    return lflops.count(model, sequence(), backward=True)


def test_what_a_communication_hook_computes_is_other(two_ranks: Ranks) -> None:
    """The matmul of a communication hook belongs to the phase other.

    Backward has the same work as without the hook, and still contains the collective.
    """
    plain = two_ranks.run(data_parallel)
    for profile, without in zip(two_ranks.run(compressed), plain, strict=True):
        assert macs(without, "backward") == macs(profile, "backward")
        assert {"": 2 * 2 * 2} == macs(profile, "other")
        assert sent(without, "backward") == sent(profile, "backward")
        assert (("", "backward"),) == profile.waits


def test_ranks_wait_where_a_collective_is_awaited(two_ranks: Ranks) -> None:
    """`profile.waits` lists where a rank waits for other ranks.

    With DDP, it waits after all nodes of backward have run. With FSDP2, it waits in each layer that
    gathers or scatters. With tensor parallelism, it waits where an all-reduce runs.
    """
    end = ("", "backward")
    for profile in two_ranks.run(data_parallel):
        assert (end,) == profile.waits
    for profile in two_ranks.run(pass_of_fully_sharded):
        assert {end} | {(each.module, each.phase) for each in profile.communication} == set(
            profile.waits
        )
        assert {("0", "forward"), ("1", "forward"), ("2", "forward")} == {
            wait for wait in profile.waits if wait.phase == "forward"
        }
    for profile in two_ranks.run(first_pass_of_tensor_parallel):
        assert {("", "forward"), end, ("up", "backward")} == set(profile.waits)


def with_power_sgd() -> Profile:
    """Count one pass of a DDP model that compresses gradients with PowerSGD from the first step."""
    model = DistributedDataParallel(between_linears(Block()))
    state = PowerSGDState(
        None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=0,
        use_error_feedback=False,
        warm_start=False,
    )
    model.register_comm_hook(state, powerSGD_hook)
    return lflops.count(model, sequence(), backward=True)


def test_power_sgd_s_products_are_no_module_s(two_ranks: Ranks) -> None:
    """The matmuls of PowerSGD belong to the phase other, not to a module.

    For each weight of n x m, PowerSGD computes two factors of rank 1 and their product, with n * m
    MACs each. The hook itself computes the first factor. The other two are computed when a
    collective ends. If it does not end at once, gloo computes them on its own thread, where nothing
    is counted.
    """
    weights = 2 * hidden * hidden + 2 * hidden * wide
    plain = two_ranks.run(data_parallel)
    for profile, without in zip(two_ranks.run(with_power_sgd), plain, strict=True):
        assert macs(without, "backward") == macs(profile, "backward")
        assert macs(profile, "other") in [{"": factors * weights} for factors in (1, 2, 3)]
        assert ["communication_hook"] == [note.code for note in profile.notes]
        assert [] == [note.code for note in without.notes]


class Trainable(nn.Module):
    """A module like a LightningModule: its `training_step` calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().sum()


def redirected() -> Profile:
    """Count a step in the way in which Lightning runs it with DDP.

    Lightning calls the wrapper, and replaces the model's forward by its training step for this
    call.
    """
    model = Trainable()
    wrapper = DistributedDataParallel(model)
    forward = model.forward

    def once(x: Tensor) -> Tensor:
        model.forward = forward
        return model.training_step(x)

    optimizer = AdamW(model.parameters())
    with lflops.counting(model) as counted:
        model.forward = once
        wrapper(sequence()).backward()
        optimizer.step()
    return counted.profile


def test_a_forward_that_is_a_training_step_that_calls_forward(ranks: Ranks) -> None:
    """The model is called twice, nested, and has one row, which contains the loss."""
    outputs = tokens * hidden
    for profile in ranks.run(redirected):
        assert {"net.up": up, "net.down": down} == macs(profile, "forward")
        assert {"net.up": up, "net.down": 2 * down} == macs(profile, "backward")
        assert {
            "": 2 * outputs,
            "net": tokens * wide,
            "net.up": 2 * up + tokens * wide,
            "net.down": 2 * down + outputs,
        } == flops(profile, "forward")
        assert {
            "net.up": 11 * up_elements + tensors,
            "net.down": 11 * down_elements + tensors,
        } == flops(profile, "optimizer")
        assert {"": 2, "net": 1, "net.up": 1, "net.down": 1} == calls(profile)
        assert float32 * (up_elements + down_elements) == profile.modules[""].backward.comm_bytes


class Parallel(nn.Module):
    """A block with twice the width, which is divided between two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, world * wide)
        self.down = nn.Linear(world * wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel() -> Parallel:
    """Divide the block: the first layer by columns, the second layer by rows."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    return parallelize_module(
        Parallel(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def first_pass_of_tensor_parallel() -> Profile:
    """Count the first pass, before torch has cached any shapes."""
    return lflops.count(tensor_parallel(), sequence(requires_grad=True), backward=True)


def second_pass_of_tensor_parallel() -> Profile:
    """Count the second pass, for which torch has cached the shapes."""
    model, x = tensor_parallel(), sequence(requires_grad=True)
    model(x).sum().backward()
    return lflops.count(model, x, backward=True)


@pytest.mark.parametrize(
    "scenario", [first_pass_of_tensor_parallel, second_pass_of_tensor_parallel]
)
def test_a_rank_of_a_parallel_layer_has_its_half_of_the_products(
    two_ranks: Ranks, scenario: Scenario
) -> None:
    """Each rank counts its half of the matmuls, also while torch infers the shapes of results.

    The output is all-reduced in forward, and the gradient of the input in backward.
    """
    for profile in two_ranks.run(scenario):
        assert {"up": up, "down": down} == macs(profile, "forward")
        assert {"up": 2 * up, "down": 2 * down} == macs(profile, "backward")
        assert {"all_reduce": float32 * tokens * hidden} == sent(profile, "forward")
        assert {"all_reduce": float32 * tokens * hidden} == sent(profile, "backward")
        assert world * (up + down) == profile.modules[""].forward.logical_macs


def test_a_rank_of_a_parallel_layer_has_its_half_of_the_parameters(two_ranks: Ranks) -> None:
    """Both weights and the first bias are divided between the ranks.

    Each rank has the second bias.
    """
    for profile in two_ranks.run(first_pass_of_tensor_parallel):
        up_row = profile.modules["up"]
        assert world * up_elements == up_row.parameters
        assert up_elements == up_row.local_parameters
        down_row = profile.modules["down"]
        assert world * hidden * wide + hidden == down_row.parameters
        assert down_elements == down_row.local_parameters


def step(model: nn.Module, optimizer: Optimizer) -> Profile:
    """Run two steps, and return the profile of the second."""
    for _ in range(2):
        with lflops.counting(model) as counted:
            model(sequence()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return counted.profile


def adamw_on_tensor_parallel() -> Profile:
    """Count a step with AdamW on lists of tensors."""
    model = tensor_parallel()
    return step(model, AdamW(model.parameters(), foreach=True))


def descent_on_tensor_parallel() -> Profile:
    """Count a step with SGD without momentum, tensor by tensor."""
    model = tensor_parallel()
    return step(model, SGD(model.parameters(), foreach=False))


def test_a_parallel_layers_update_is_of_what_the_rank_holds(two_ranks: Ranks) -> None:
    """The optimizer's work is counted for the elements that the rank holds.

    It is 11 operations per element for AdamW and 1 for SGD. AdamW also counts the steps of each
    tensor, with one operation.
    """
    for profile in two_ranks.run(adamw_on_tensor_parallel):
        assert {"up": 11 * up_elements + tensors, "down": 11 * down_elements + tensors} == flops(
            profile, "optimizer"
        )
    for profile in two_ranks.run(descent_on_tensor_parallel):
        assert {"up": up_elements, "down": down_elements} == flops(profile, "optimizer")


def fully_sharded() -> nn.Sequential:
    """Shard a model with FSDP2: three units and the root."""
    model = nn.Sequential(nn.Linear(hidden, hidden), Block(), Block())
    for unit in model:
        fully_shard(unit)
    return fully_shard(model)


def pass_of_fully_sharded() -> Profile:
    """Count the first pass, in which torch sets up the shards."""
    return lflops.count(fully_sharded(), sequence(), backward=True)


def adamw_on_fully_sharded() -> Profile:
    """Count a step with AdamW, tensor by tensor."""
    model = fully_sharded()
    return step(model, AdamW(model.parameters(), foreach=False))


def descent_on_fully_sharded() -> Profile:
    """Count a step with SGD with momentum, on lists of tensors."""
    model = fully_sharded()
    return step(model, SGD(model.parameters(), momentum=0.9, foreach=True))


def rows_of_a_shard(rows: int, ranks: int) -> int:
    """Return the number of rows in a shard, including padding.

    The first dimension of a tensor is divided into equal parts. The last part may contain padding.
    """
    return math.ceil(rows / ranks)


@pytest.mark.parametrize("scenario", [pass_of_fully_sharded, adamw_on_fully_sharded])
def test_a_fully_sharded_model_works_on_whole_weights(ranks: Ranks, scenario: Scenario) -> None:
    """With FSDP2, each rank runs all matmuls for its batch, under the names of the model."""
    rows = {"0": square, "1.up": up, "1.down": down, "2.up": up, "2.down": down}
    for profile in ranks.run(scenario):
        assert rows == macs(profile, "forward")
        # The input of the first layer needs no gradient.
        assert {row: 2 * cost for row, cost in rows.items()} | {"0": square} == macs(
            profile, "backward"
        )
        assert dict.fromkeys(("", "1", "2", *rows), 1) == calls(profile)
        assert square_elements + 2 * (up_elements + down_elements) == profile.modules[""].parameters


def test_a_fully_sharded_model_gathers_twice_and_scatters_once(two_ranks: Ranks) -> None:
    """With FSDP2, weights are gathered in forward and in backward, and gradients are scattered.

    The bytes include the padding that makes all shards equal.
    """
    unit = world * rows_of_a_shard(hidden, world) * (hidden + 1)
    up_shard = rows_of_a_shard(wide, world) * (hidden + 1)
    down_shard = rows_of_a_shard(hidden, world) * (wide + 1)
    block = world * (up_shard + down_shard)
    whole = float32 * (unit + 2 * block)
    for profile in two_ranks.run(pass_of_fully_sharded):
        assert {"_allgather_base_": whole} == sent(profile, "forward")
        assert {"_allgather_base_": whole, "_reduce_scatter_base_": whole} == sent(
            profile, "backward"
        )


def shards(rank: int) -> dict[str, int]:
    """Return the number of elements that a rank holds of each layer.

    If the number of rows is odd, the first rank has one more row.
    """
    # Both numbers of rows are odd.
    of_hidden = rows_of_a_shard(hidden, world) - rank
    of_wide = rows_of_a_shard(wide, world) - rank
    up_shard = of_wide * (hidden + 1)
    down_shard = of_hidden * (wide + 1)
    return {
        "0": of_hidden * (hidden + 1),
        "1.up": up_shard,
        "1.down": down_shard,
        "2.up": up_shard,
        "2.down": down_shard,
    }


def test_a_fully_sharded_models_update_is_of_its_shards(two_ranks: Ranks) -> None:
    """The optimizer's work is counted for the elements in the shards of the rank, by layer.

    It is 11 operations per element for AdamW, and 3 for SGD with momentum.
    """
    for rank, profile in enumerate(two_ranks.run(adamw_on_fully_sharded)):
        assert shards(rank) == {row: profile.modules[row].local_parameters for row in shards(rank)}
        assert {row: 11 * elements + tensors for row, elements in shards(rank).items()} == flops(
            profile, "optimizer"
        )
    for rank, profile in enumerate(two_ranks.run(descent_on_fully_sharded)):
        assert {row: 3 * elements for row, elements in shards(rank).items()} == flops(
            profile, "optimizer"
        )


def test_a_fully_sharded_pass_leaves_nothing_uncounted(two_ranks: Ranks) -> None:
    """FSDP2 uses no unsupported operators.

    Its copies into and out of buffers are known to have no arithmetic.
    """
    for profile in two_ranks.run(pass_of_fully_sharded):
        assert set() == {each.operator for each in profile.unsupported}

"""Counting on ranks: each counts its own part of the work, by the names of the model, whatever wraps it."""

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
"""Bytes of an element."""
world = 2
square_elements = hidden * hidden + hidden
up_elements = hidden * wide + wide
down_elements = wide * hidden + hidden
tensors = 2
"""Of each Linear: weight and bias."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process that is a group of its own."""
    with Ranks(1, tmp_path_factory.mktemp("one_rank")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes in one group."""
    with Ranks(world, tmp_path_factory.mktemp("two_ranks")) as ranks:
        yield ranks


@pytest.fixture(params=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Either."""
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks


def sent(profile: Profile, phase: Phase) -> dict[str, int]:
    """The bytes of each collective in one phase."""
    carried: dict[str, int] = {}
    for each in profile.communication:
        if each.phase == phase:
            carried[each.collective] = carried.get(each.collective, 0) + each.bytes
    return carried


def data_parallel() -> Profile:
    """One pass of a replicated model."""
    return lflops.count(
        DistributedDataParallel(between_linears(Block())), sequence(), backward=True
    )


def test_a_replicated_model_has_its_own_rows_below_the_wrapper(ranks: Ranks) -> None:
    """The wrapper registers the model as `module`; the work of each rank is that of its batch."""
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
    """The reducer's all-reduce passes the dispatcher like any operator.

    It carries every gradient, in backward.
    """
    elements = 2 * square_elements + up_elements + down_elements
    for profile in ranks.run(data_parallel):
        assert {"allreduce_": float32 * elements} == sent(profile, "backward")
        assert float32 * elements == profile.modules[""].backward.comm_bytes


def compressing(
    _state: object, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook with a product of its own, 2 x 2 x 2 MACs."""
    gradients = bucket.buffer()
    square_of_four = gradients[:4].view(2, 2)
    gradients[:4] += (square_of_four @ square_of_four).flatten()
    return (
        torch.distributed.all_reduce(gradients, async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def compressed() -> Profile:
    """One pass of a replicated model with that hook."""
    model = DistributedDataParallel(between_linears(Block()))
    model.register_comm_hook(None, compressing)
    return lflops.count(model, sequence(), backward=True)


def test_what_a_communication_hook_computes_is_other(two_ranks: Ranks) -> None:
    """Not a module's backward, which is what it is without the hook.

    Its collective is backward's all the same.
    """
    plain = two_ranks.run(data_parallel)
    for profile, without in zip(two_ranks.run(compressed), plain, strict=True):
        assert macs(without, "backward") == macs(profile, "backward")
        assert {"": 2 * 2 * 2} == macs(profile, "other")
        assert sent(without, "backward") == sent(profile, "backward")
        assert (("", "backward"),) == profile.waits


def test_ranks_wait_where_a_collective_is_awaited(two_ranks: Ranks) -> None:
    """Under DDP when all nodes of backward have run.

    A sharded layer waits where it gathers and scatters; an all-reduce where it runs.
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
    """One pass of a replicated model whose gradients are compressed from the first step on."""
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
    """Of each weight of n x m two factors of rank 1 and their product, n * m MACs each.

    The first is computed in the hook itself.

    The other two run when a collective ends: with gloo on a thread of its own, where nothing is
    counted, if that is not at once.
    """
    weights = 2 * hidden * hidden + 2 * hidden * wide
    plain = two_ranks.run(data_parallel)
    for profile, without in zip(two_ranks.run(with_power_sgd), plain, strict=True):
        assert macs(without, "backward") == macs(profile, "backward")
        assert macs(profile, "other") in [{"": factors * weights} for factors in (1, 2, 3)]
        assert (["communication_hook"], []) == (
            [note.code for note in profile.notes],
            [note.code for note in without.notes],
        )


class Trainable(nn.Module):
    """As a LightningModule: its training step calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().sum()


def redirected() -> Profile:
    """A step as Lightning makes it.

    The wrapper is called, and the model's forward is for once its training step.
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
    """The model is entered twice, and is one row; the loss is its own."""
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
    """Twice as wide as a block, and halved over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, world * wide)
        self.down = nn.Linear(world * wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel() -> Parallel:
    """By columns, then by rows."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    return parallelize_module(
        Parallel(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def first_pass_of_tensor_parallel() -> Profile:
    """Nothing of it is in any cache."""
    return lflops.count(tensor_parallel(), sequence(requires_grad=True), backward=True)


def second_pass_of_tensor_parallel() -> Profile:
    """What shapes it has was worked out in the first."""
    model, x = tensor_parallel(), sequence(requires_grad=True)
    model(x).sum().backward()
    return lflops.count(model, x, backward=True)


@pytest.mark.parametrize(
    "scenario", [first_pass_of_tensor_parallel, second_pass_of_tensor_parallel]
)
def test_a_rank_of_a_parallel_layer_has_its_half_of_the_products(
    two_ranks: Ranks, scenario: Scenario
) -> None:
    """Local work, also while torch works out shapes.

    The output's sum goes around forward, the input's gradient's backward.
    """
    for profile in two_ranks.run(scenario):
        assert {"up": up, "down": down} == macs(profile, "forward")
        assert {"up": 2 * up, "down": 2 * down} == macs(profile, "backward")
        assert {"all_reduce": float32 * tokens * hidden} == sent(profile, "forward")
        assert {"all_reduce": float32 * tokens * hidden} == sent(profile, "backward")
        assert world * (up + down) == profile.modules[""].forward.logical_macs


def test_a_rank_of_a_parallel_layer_has_its_half_of_the_parameters(two_ranks: Ranks) -> None:
    """Both weights are halved, and one of the biases."""
    for profile in two_ranks.run(first_pass_of_tensor_parallel):
        up_row, down_row = profile.modules["up"], profile.modules["down"]
        assert (world * up_elements, up_elements) == (up_row.parameters, up_row.local_parameters)
        assert (world * hidden * wide + hidden, down_elements) == (
            down_row.parameters,
            down_row.local_parameters,
        )


def step(model: nn.Module, optimizer: Optimizer) -> Profile:
    """The second of two."""
    for _ in range(2):
        with lflops.counting(model) as counted:
            model(sequence()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return counted.profile


def adamw_on_tensor_parallel() -> Profile:
    """On lists."""
    model = tensor_parallel()
    return step(model, AdamW(model.parameters(), foreach=True))


def descent_on_tensor_parallel() -> Profile:
    """Tensor by tensor, without any state."""
    model = tensor_parallel()
    return step(model, SGD(model.parameters(), foreach=False))


def test_a_parallel_layers_update_is_of_what_the_rank_holds(two_ranks: Ranks) -> None:
    """Eleven operations an element that it holds, or one."""
    for profile in two_ranks.run(adamw_on_tensor_parallel):
        assert {"up": 11 * up_elements + tensors, "down": 11 * down_elements + tensors} == flops(
            profile, "optimizer"
        )
    for profile in two_ranks.run(descent_on_tensor_parallel):
        assert {"up": up_elements, "down": down_elements} == flops(profile, "optimizer")


def fully_sharded() -> nn.Sequential:
    """Three units, and the root."""
    model = nn.Sequential(nn.Linear(hidden, hidden), Block(), Block())
    for unit in model:
        fully_shard(unit)
    return fully_shard(model)


def pass_of_fully_sharded() -> Profile:
    """The first, in which torch sets the shards up."""
    return lflops.count(fully_sharded(), sequence(), backward=True)


def adamw_on_fully_sharded() -> Profile:
    """Tensor by tensor."""
    model = fully_sharded()
    return step(model, AdamW(model.parameters(), foreach=False))


def descent_on_fully_sharded() -> Profile:
    """On lists, with a momentum that begins as a copy."""
    model = fully_sharded()
    return step(model, SGD(model.parameters(), momentum=0.9, foreach=True))


def rows_of_a_shard(rows: int, ranks: int) -> int:
    """The first dimension is dealt out in equal parts, the last of which may be padding."""
    return math.ceil(rows / ranks)


@pytest.mark.parametrize("scenario", [pass_of_fully_sharded, adamw_on_fully_sharded])
def test_a_fully_sharded_model_works_on_whole_weights(ranks: Ranks, scenario: Scenario) -> None:
    """Every rank has all the products of its batch, by the names that the model had before."""
    rows = {"0": square, "1.up": up, "1.down": down, "2.up": up, "2.down": down}
    for profile in ranks.run(scenario):
        assert rows == macs(profile, "forward")
        assert {row: (1 if row == "0" else 2) * cost for row, cost in rows.items()} == macs(
            profile, "backward"
        )
        assert dict.fromkeys(("", "1", "2", *rows), 1) == calls(profile)
        assert square_elements + 2 * (up_elements + down_elements) == profile.modules[""].parameters


def test_a_fully_sharded_model_gathers_twice_and_scatters_once(two_ranks: Ranks) -> None:
    """Whole weights forward and again backward, and their gradients.

    With the padding that makes the shards equal.
    """
    unit = world * rows_of_a_shard(hidden, world) * (hidden + 1)
    block = world * (
        rows_of_a_shard(wide, world) * (hidden + 1) + rows_of_a_shard(hidden, world) * (wide + 1)
    )
    whole = float32 * (unit + 2 * block)
    for profile in two_ranks.run(pass_of_fully_sharded):
        assert {"_allgather_base_": whole} == sent(profile, "forward")
        assert {"_allgather_base_": whole, "_reduce_scatter_base_": whole} == sent(
            profile, "backward"
        )


def shards(rank: int) -> dict[str, int]:
    """What a rank holds: the first has the larger part of an odd number of rows."""
    of_hidden, of_wide = (
        rows_of_a_shard(rows, world) - (rank if rows % world else 0) for rows in (hidden, wide)
    )
    block = {"up": of_wide * (hidden + 1), "down": of_hidden * (wide + 1)}
    return {
        "0": of_hidden * (hidden + 1),
        **{f"{n}.{part}": elements for n in (1, 2) for part, elements in block.items()},
    }


def test_a_fully_sharded_models_update_is_of_its_shards(two_ranks: Ranks) -> None:
    """Eleven operations an element of what a rank holds, at the row that owns it.

    Three with a momentum alone.
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
    """What goes in and out of its buffers is copied, which is known to be no arithmetic."""
    for profile in two_ranks.run(pass_of_fully_sharded):
        assert set() == {each.operator for each in profile.unsupported}

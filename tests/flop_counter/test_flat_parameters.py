"""Test parameters that are sharded in older ways than FSDP2.

These are the flat parameters of FSDP1, and parameters that DeepSpeed's ZeRO partitioned.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import lflops
from lflops import Profile
from tests.support.processes import Ranks
from tests.support.profile_checks import calls, macs
from tests.support.small_models import Block, down, hidden, sequence, tokens, up, wide

world = 2
classes = 3
square, head = tokens * hidden * hidden, tokens * hidden * classes
PARAMETERS = {
    "0": hidden * hidden + hidden,
    "1": hidden * wide + wide + wide * hidden + hidden,
    "1.up": hidden * wide + wide,
    "1.down": wide * hidden + hidden,
    "2": hidden * classes + classes,
}
WHOLE = {"": PARAMETERS["0"] + PARAMETERS["1"] + PARAMETERS["2"], **PARAMETERS}


def model() -> nn.Sequential:
    """Build a block between two layers."""
    return nn.Sequential(nn.Linear(hidden, hidden), Block(), nn.Linear(hidden, classes))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start two processes in one group."""
    with Ranks(world, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


def step_of_flat(strategy: ShardingStrategy, *, keeps: bool) -> Profile:
    """Return the profile of the second step of an FSDP model with two units.

    The units are the block and the rest of the model.
    """
    wrapped = FullyShardedDataParallel(
        model(),
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        use_orig_params=keeps,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), foreach=False)
    for _ in range(2):
        with lflops.counting(wrapped) as counted:
            wrapped(sequence()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return counted.profile


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_of_flat_parameters_each_is_known_by_its_module(
    strategy: ShardingStrategy, two: Ranks, *, keeps: bool
) -> None:
    """Each module has its whole parameters, and the local parameters of all ranks add up to it."""
    profiles = two.run(partial(step_of_flat, strategy, keeps=keeps))
    for profile in profiles:
        assert WHOLE == {row: module.parameters for row, module in profile.modules.items()}
        assert WHOLE == {
            row: module.trainable_parameters for row, module in profile.modules.items()
        }
        assert 4 * WHOLE[""] == profile.modules[""].parameter_bytes
    assert WHOLE == {
        row: sum(profile.modules[row].local_parameters for profile in profiles) for row in WHOLE
    }
    assert all(0 < profile.modules[""].local_parameters < WHOLE[""] for profile in profiles)


@pytest.mark.parametrize("keeps", [True, False])
def test_of_flat_parameters_that_are_not_dealt_out_each_rank_has_all(
    two: Ranks, *, keeps: bool
) -> None:
    """With `NO_SHARD`, as with DDP, each rank has all parameters."""
    for profile in two.run(partial(step_of_flat, ShardingStrategy.NO_SHARD, keeps=keeps)):
        assert WHOLE == {row: module.parameters for row, module in profile.modules.items()}
        assert WHOLE == {row: module.local_parameters for row, module in profile.modules.items()}


@pytest.mark.parametrize("keeps", [True, False])
def test_flat_parameters_change_no_modules_work(two: Ranks, *, keeps: bool) -> None:
    """Sharding does not change the work of a module for the rank's batch.

    Each rank updates its part of the parameters, with one FLOP per element.
    """
    rows = {"0": square, "1.up": up, "1.down": down, "2": head}
    profiles = two.run(partial(step_of_flat, ShardingStrategy.FULL_SHARD, keeps=keeps))
    for profile in profiles:
        assert rows == macs(profile, "forward")
        # The input of the first layer needs no gradient.
        in_backward = {"0": square, "1.up": 2 * up, "1.down": 2 * down, "2": 2 * head}
        assert in_backward == macs(profile, "backward")
        assert sum(rows.values()) == profile.modules[""].forward.logical_macs
        assert dict.fromkeys(WHOLE, 1) == calls(profile)
    # Flat parameters are padded at the end, so that all ranks have equal parts.
    updated = sum(profile.modules[""].optimizer.flops for profile in profiles)
    assert WHOLE[""] <= updated <= WHOLE[""] + world * world


def test_of_what_zero_has_dealt_out_the_whole_is_what_it_says() -> None:
    """For a partitioned parameter, the size comes from the attributes that DeepSpeed sets.

    DeepSpeed replaces the parameter by an empty tensor. This rank has 18 of 35 elements of the
    weight, and the whole bias.
    """
    layer = nn.Linear(hidden, wide)
    weight = nn.Parameter(torch.empty(0))
    part = torch.zeros(18)
    vars(weight).update(ds_numel=hidden * wide, ds_shape=torch.Size((wide, hidden)), ds_tensor=part)
    layer.weight = weight
    with lflops.counting(layer) as counted:
        pass
    root = counted.profile.modules[""]
    assert hidden * wide + wide == root.parameters
    assert 18 + wide == root.local_parameters
    assert 4 * (hidden * wide + wide) == root.parameter_bytes
    assert 4 * (18 + wide) == root.local_parameter_bytes


def test_a_users_module_may_be_called_as_torchs_are() -> None:
    """A user's class may have the name of torch's FSDP class, without its handles."""

    class FullyShardedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._fsdp_wrapped_module = nn.Linear(hidden, wide)
            self._handle = SimpleNamespace(flat_param=None)

    with lflops.counting(FullyShardedDataParallel()) as counted:
        pass
    assert hidden * wide + wide == counted.profile.modules[""].parameters

"""Who is asked where ranks stand, in which order, and what is taken for an answer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lflops.errors import CountError
from lflops.ranks.collect.topology import topology_of
from tests.support.profile_builders import run


def mesh(*shape: int, names: tuple[str, ...] | None, first: int = 0) -> Any:
    """As a DeviceMesh is looked at: ranks in order from the first."""
    ranks = torch.arange(first, first + torch.Size(shape).numel()).view(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names, ndim=len(shape))


class Spread(nn.Module):
    """Its parameter says that it is spread over a mesh."""

    def __init__(self, over: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.device_mesh = over  # type: ignore[attr-defined]


class FullySharded(FSDPModule, Spread):
    """As `fully_shard` makes it of a module."""

    def __new__(cls, *args: Any) -> Any:
        """Make a module: `FSDPModule` would undo `fully_shard`."""
        return nn.Module.__new__(cls)


def test_the_user_s_function_is_asked_for_every_rank_and_nobody_else() -> None:
    """Two times two; what the mesh would say is not heard."""
    found = topology_of(
        4,
        0,
        function=lambda rank: {"dp": rank // 2, "stage": rank % 2},
        mesh=mesh(4, names=("tensor_parallel",)),
    )
    assert {"data": 2, "pipeline": 2} == found.sizes
    assert {"data": 1, "pipeline": 0} == found.coordinates[2]


NOT_COORDINATES: list[tuple[Any, str]] = [
    (3, r"topology=3: pass a function that takes a rank and returns its coordinates"),
    (lambda rank: rank, r"topology\(0\) is 0: pass a function"),
    (lambda rank: {"data": rank - 1}, r"topology\(0\) is {'data': -1}: pass"),
    (lambda rank: {"data": float(rank)}, r"topology\(0\) is {'data': 0.0}: pass"),
    (lambda rank: {0: rank}, r"topology\(0\) is {0: 0}: pass"),
    (lambda rank: {"data": 1 // rank}, r"topology\(0\) raised ZeroDivisionError: .*: pass"),
    (
        lambda rank: {"data": rank} if rank else {"tensor": 0},
        r"topology\(1\) has data, but topology\(0\) has tensor: return the same kinds",
    ),
    (
        lambda rank: {"tensor": 2 * rank},
        r"topology: the coordinates of 'tensor' are 0, 2, 4, 6: pass",
    ),
]


@pytest.mark.parametrize(("function", "problem"), NOT_COORDINATES)
def test_what_are_no_coordinates_is_refused(function: Any, problem: str) -> None:
    """The message says for which rank what was given, and what is taken."""
    with pytest.raises(CountError, match=problem):
        topology_of(4, 0, function=function)


def test_a_mesh_says_it_by_the_names_of_its_dimensions() -> None:
    """As Lightning's strategy names them; the last dimension is the fastest."""
    found = topology_of(6, 0, mesh=mesh(2, 3, names=("data_parallel", "tensor_parallel")))
    assert {"data": 2, "tensor": 3} == found.sizes
    assert {"data": 1, "tensor": 2} == found.coordinates[5]


def test_replicas_of_shards_are_both_of_data() -> None:
    """Two replicas of three shards: six data ranks, the last of them the sixth.

    A kind that a run has no size for is a coordinate alone.
    """
    found = topology_of(12, 0, mesh=mesh(2, 3, 2, names=("dp_replicate", "dp_shard", "cp")))
    assert {"data": 6, "context": 2} == found.sizes
    assert {"data": 5, "context": 1} == found.coordinates[11]
    facts = found.of(run())
    assert (12, 6, None) == (facts.world_size, facts.data_parallel_size, facts.tensor_parallel_size)


def test_replicas_of_shards_in_a_custom_loop_are_all_of_data() -> None:
    """Under `fully_shard`, both dimensions of a mesh are, whatever their names; tensors are not."""
    for names in (("replica", "shard"), ("outer", "inner"), None):
        model = FullySharded(mesh(2, 2, names=names))
        found = topology_of(4, 0, model=model)
        assert {"data": 4} == found.sizes
        assert {"data": 3} == found.coordinates[3]
    both = topology_of(4, 0, model=FullySharded(mesh(2, 2, names=("outer", "tp"))))
    assert {"data": 2, "tensor": 2} == both.sizes


def test_the_parameters_are_asked_what_the_mesh_leaves_open() -> None:
    """The strategy knows of data.

    A parameter that is spread over ranks 2 and 3 says the rest, of these two.
    """
    model = Spread(mesh(2, names=("tp",), first=2))
    found = topology_of(4, 2, mesh=mesh(2, 2, names=("dp", "anything")), model=model)
    assert {"data": 2, "tensor": 2, "anything": 2} == found.sizes
    assert ({"data": 1, "anything": 1, "tensor": 1}, {"data": 0, "anything": 1}) == (
        found.coordinates[3],
        found.coordinates[1],
    )


def test_a_mesh_without_names_is_one_of_tensors_if_it_has_one_dimension() -> None:
    """Unless `fully_shard` made it, whose modules are of a class of their own."""
    assert {"tensor": 2, "data": 1} == topology_of(2, 0, model=Spread(mesh(2, names=None))).sizes
    assert {} == topology_of(4, 0, model=Spread(mesh(2, 2, names=None))).sizes


def test_ranks_that_all_share_one_batch_are_at_one_place_of_data() -> None:
    """Two halves of a model on two ranks; of four ranks it is not known."""
    found = topology_of(2, 1, model=Spread(mesh(2, names=("tp",))))
    assert ([{"tensor": 0, "data": 0}, {"tensor": 1, "data": 0}]) == [
        found.coordinates[rank] for rank in (0, 1)
    ]
    assert {"tensor": 2} == topology_of(4, 0, model=Spread(mesh(2, names=("tp",)))).sizes


def test_the_sampler_is_asked_last() -> None:
    """Over how many ranks batches are dealt out, and which of these this one is."""
    sampler = {"num_replicas": 4, "rank": 1}
    found = topology_of(8, 3, model=Spread(mesh(2, names=("tp",), first=2)), sampler=sampler)
    assert {"tensor": 2, "data": 4} == found.sizes
    assert {"tensor": 1, "data": 1} == found.coordinates[3]
    assert {"data": 8} == topology_of(8, 3, mesh=mesh(8, names=("dp",)), sampler=sampler).sizes


def test_of_one_rank_all_is_known() -> None:
    """And of several that nobody tells of nothing, which is not 1."""
    assert {"data": 1, "tensor": 1} == topology_of(1, 0).sizes
    assert ({}, {}) == (topology_of(2, 0).sizes, topology_of(2, 0).coordinates)

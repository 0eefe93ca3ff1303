"""Test `topology_of`: which sources it reads for the coordinates of ranks, and in which order."""

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
    """Return an object with the attributes of a `DeviceMesh`, whose ranks begin with `first`."""
    ranks = torch.arange(first, first + torch.Size(shape).numel()).view(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names, ndim=len(shape))


class Spread(nn.Module):
    """A module whose parameter is distributed over a mesh."""

    def __init__(self, over: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.device_mesh = over  # type: ignore[attr-defined]


class FullySharded(FSDPModule, Spread):
    """A module of the class that `fully_shard` gives to a module."""

    def __new__(cls, *args: Any) -> Any:
        """Create a module, because `FSDPModule.__new__` would create one without `fully_shard`."""
        return nn.Module.__new__(cls)


def test_the_user_s_function_is_asked_for_every_rank_and_nobody_else() -> None:
    """If the user passes a function, it is called for every rank, and the mesh is not read."""
    found = topology_of(
        4,
        0,
        function=lambda rank: {"dp": rank // 2, "stage": rank % 2},
        mesh=mesh(4, names=("tensor_parallel",)),
    )
    assert {"data": 2, "pipeline": 2} == found.sizes
    assert {"data": 1, "pipeline": 0} == found.coordinates[2]


NOT_COORDINATES: list[tuple[Any, str]] = [
    (3, r"topology=3: pass a function that takes a rank and returns the coordinates of this rank"),
    (lambda rank: rank, r"topology\(0\) is 0: pass a function"),
    (lambda rank: {"data": rank - 1}, r"topology\(0\) is {'data': -1}: pass"),
    (lambda rank: {"data": float(rank)}, r"topology\(0\) is {'data': 0.0}: pass"),
    (lambda rank: {0: rank}, r"topology\(0\) is {0: 0}: pass"),
    (lambda rank: {"data": 1 // rank}, r"topology\(0\) raised ZeroDivisionError: .*: pass"),
    (
        lambda rank: {"data": rank} if rank else {"tensor": 0},
        r"topology\(1\) has data, but topology\(0\) has tensor: return the same keys",
    ),
    (
        lambda rank: {"tensor": 2 * rank},
        r"topology: the coordinates of 'tensor' are 0, 2, 4, 6: pass",
    ),
]


@pytest.mark.parametrize(("function", "problem"), NOT_COORDINATES)
def test_what_are_no_coordinates_is_refused(function: Any, problem: str) -> None:
    """A function that returns no valid coordinates is an error.

    The message names the rank, the wrong value and the accepted values.
    """
    with pytest.raises(CountError, match=problem):
        topology_of(4, 0, function=function)


def test_a_mesh_says_it_by_the_names_of_its_dimensions() -> None:
    """The names of a mesh's dimensions are the kinds of parallelism.

    The names are those of Lightning's strategy. The coordinate of the last dimension changes
    fastest.
    """
    found = topology_of(6, 0, mesh=mesh(2, 3, names=("data_parallel", "tensor_parallel")))
    assert {"data": 2, "tensor": 3} == found.sizes
    assert {"data": 1, "tensor": 2} == found.coordinates[5]


def test_replicas_of_shards_are_both_of_data() -> None:
    """Replicas and shards are both data parallelism: two replicas of three shards are six ranks.

    Context parallelism has a coordinate, but no field in `Run`.
    """
    found = topology_of(12, 0, mesh=mesh(2, 3, 2, names=("dp_replicate", "dp_shard", "cp")))
    assert {"data": 6, "context": 2} == found.sizes
    assert {"data": 5, "context": 1} == found.coordinates[11]
    facts = found.of(run())
    assert (12, 6, None) == (facts.world_size, facts.data_parallel_size, facts.tensor_parallel_size)


def test_replicas_of_shards_in_a_custom_loop_are_all_of_data() -> None:
    """Under `fully_shard`, both dimensions of a mesh are data parallelism, whatever their names.

    A dimension that is named `tp` is tensor parallelism.
    """
    for names in (("replica", "shard"), ("outer", "inner"), None):
        model = FullySharded(mesh(2, 2, names=names))
        found = topology_of(4, 0, model=model)
        assert {"data": 4} == found.sizes
        assert {"data": 3} == found.coordinates[3]
    both = topology_of(4, 0, model=FullySharded(mesh(2, 2, names=("outer", "tp"))))
    assert {"data": 2, "tensor": 2} == both.sizes


def test_the_parameters_are_asked_what_the_mesh_leaves_open() -> None:
    """Kinds of parallelism that the mesh does not have are read from the parameters.

    The mesh of the strategy has data parallelism. A parameter that is distributed over ranks 2 and
    3 gives the tensor coordinates of these two ranks.
    """
    model = Spread(mesh(2, names=("tp",), first=2))
    found = topology_of(4, 2, mesh=mesh(2, 2, names=("dp", "anything")), model=model)
    assert {"data": 2, "tensor": 2, "anything": 2} == found.sizes
    assert ({"data": 1, "anything": 1, "tensor": 1}, {"data": 0, "anything": 1}) == (
        found.coordinates[3],
        found.coordinates[1],
    )


def test_a_mesh_without_names_is_one_of_tensors_if_it_has_one_dimension() -> None:
    """A mesh without names is tensor parallelism if it has one dimension, and else unknown.

    This does not apply to modules of `fully_shard`, which have a different class.
    """
    assert {"tensor": 2, "data": 1} == topology_of(2, 0, model=Spread(mesh(2, names=None))).sizes
    assert {} == topology_of(4, 0, model=Spread(mesh(2, 2, names=None))).sizes


def test_ranks_that_all_share_one_batch_are_at_one_place_of_data() -> None:
    """If the other kinds of parallelism use all ranks, all ranks have the same batch.

    This is the case for a model that is split between two ranks. With four ranks, data parallelism
    is unknown.
    """
    found = topology_of(2, 1, model=Spread(mesh(2, names=("tp",))))
    assert ([{"tensor": 0, "data": 0}, {"tensor": 1, "data": 0}]) == [
        found.coordinates[rank] for rank in (0, 1)
    ]
    assert {"tensor": 2} == topology_of(4, 0, model=Spread(mesh(2, names=("tp",)))).sizes


def test_the_sampler_is_asked_last() -> None:
    """The sampler is the last source of data parallelism.

    It has the number of ranks among which batches are divided, and the number of this rank. It is
    not used if the mesh has data parallelism.
    """
    sampler = {"num_replicas": 4, "rank": 1}
    found = topology_of(8, 3, model=Spread(mesh(2, names=("tp",), first=2)), sampler=sampler)
    assert {"tensor": 2, "data": 4} == found.sizes
    assert {"tensor": 1, "data": 1} == found.coordinates[3]
    assert {"data": 8} == topology_of(8, 3, mesh=mesh(8, names=("dp",)), sampler=sampler).sizes


def test_of_one_rank_all_is_known() -> None:
    """With one rank, all sizes are 1. With several ranks and no source, the sizes are unknown."""
    assert {"data": 1, "tensor": 1} == topology_of(1, 0).sizes
    assert ({}, {}) == (topology_of(2, 0).sizes, topology_of(2, 0).coordinates)

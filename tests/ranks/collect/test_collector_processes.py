"""Test the collection of profiles in real processes, each with its own part of a model."""

from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import lflops
from lflops import Profile
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.store import shared_store
from lflops.ranks.collect.topology import topology_of
from tests.support.ports import free_port
from tests.support.processes import Ranks
from tests.support.profile_checks import macs
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    length,
    square,
    up,
    wide,
)
from tests.support.warm_python import Script, WarmPython

LONG = 200.0


def gathered(folder: Path, scenario: str, python: WarmPython) -> tuple[Profile, list[int]]:
    """Run a scenario of `tests.support.gather_rank` in four processes.

    Returns the profile that rank 0 saved, and the exit statuses of the processes.
    """
    port = free_port()
    file = folder / "whole.profile.json"
    script = "from tests.support.gather_rank import main; main()"
    ended = python.together([Script(script, (rank, port, file, scenario)) for rank in range(4)])
    return lflops.load(file), [each.status for each in ended]


@pytest.fixture(scope="module")
def sharded_twice(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Profile:
    """Return the profile of a model on 2 × 2 ranks, with tensor and data parallelism."""
    whole, ended = gathered(tmp_path_factory.mktemp("two_meshes"), "two_meshes", warm_python)
    assert [0] * 4 == ended
    return whole


def test_a_rank_of_both_meshes_has_its_half_of_the_products(sharded_twice: Profile) -> None:
    """Each rank executes half of each matmul.

    The layers are twice as wide as `up` and `down`, and tensor parallelism halves them. Data
    parallelism, which shards the weights as well, halves no matmul.
    """
    assert {"up": up, "down": down} == macs(sharded_twice, "forward")
    assert {"up": 2 * up, "down": 2 * down} == macs(sharded_twice, "backward")
    assert [3 * (up + down)] * 4 == [rank.macs for rank in sharded_twice.ranks]
    assert 2 * (up + down) == sharded_twice.modules[""].forward.logical_macs
    assert 2 * (2 * hidden * wide) + 2 * wide + hidden == sharded_twice.modules[""].parameters


def test_the_meshes_of_the_parameters_say_where_a_rank_stands(sharded_twice: Profile) -> None:
    """The coordinates of the ranks are read from the meshes of the parameters.

    The coordinate of the last dimension changes fastest.
    """
    at = [
        {"data": 0, "tensor": 0},
        {"data": 0, "tensor": 1},
        {"data": 1, "tensor": 0},
        {"data": 1, "tensor": 1},
    ]
    assert at == [rank.coordinates for rank in sharded_twice.ranks]
    run = sharded_twice.run
    assert 4 == run.world_size
    assert (2, 2) == (run.data_parallel_size, run.tensor_parallel_size)
    assert run.pipeline_parallel_size is None
    assert ["ok"] * 4 == [rank.status for rank in sharded_twice.ranks]
    assert False is run.partial


def test_a_script_of_ones_own_measures_on_each_rank_and_merges(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A user's script under torchrun measures on each rank, and `lflops.merge` merges the profiles.

    The second rank has two sequences and the first has one, so the work of the second is shown.
    """
    torchrun = "from torch.distributed.run import main; main()"
    ended = warm_python.run(
        torchrun,
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.support.torchrun_measure",
        tmp_path,
    )
    assert 0 == ended.status, ended.err
    whole = lflops.merge(
        {rank: lflops.load(tmp_path / f"rank{rank}.profile.json") for rank in range(2)}
    )
    forward = 2 * square + up + down
    backward = square + 2 * (up + down + square)
    assert [(forward + backward) // 2, forward + backward] == [rank.macs for rank in whole.ranks]
    assert {
        "module.0": square,
        "module.1.up": up,
        "module.1.down": down,
        "module.2": square,
    } == macs(whole, "forward")
    assert (2, 2) == (whole.run.world_size, whole.run.samples_per_step)
    assert ["ok", "ok"] == [rank.status for rank in whole.ranks]
    assert {("module.1.up", "forward"), ("module.1.up", "backward")} <= {
        (stat.module, stat.phase) for stat in whole.rank_stats
    }


def handed_in() -> Profile:
    """Send this rank's profile of a replicated model, in which rank 1 has the larger batch.

    Returns the merged profile on rank 0, and the profile of this rank on rank 1.
    """
    rank = distributed.get_rank()
    model = DistributedDataParallel(between_linears(Block()))
    profile = lflops.count(model, torch.randn(1 + rank, length, hidden), backward=True)
    gather = RankCollector(
        shared_store("lflops", timeout=LONG),
        rank,
        topology_of(2, rank, sampler={"num_replicas": 2, "rank": rank}),
        timeout=LONG,
    )
    gather.push(profile)
    return next(iter(gather.finish()), profile)


def test_ranks_that_meet_in_a_file_gather_there(tmp_path: Path) -> None:
    """Ranks can also use a file as their store.

    The work of the second rank is shown, because it has two of the three sequences.
    """
    with Ranks(2, tmp_path) as ranks:
        whole, second = ranks.run(handed_in)
    assert [{"data": 0}, {"data": 1}] == [rank.coordinates for rank in whole.ranks]
    assert (2, ["ok", "ok"]) == (
        whole.run.data_parallel_size,
        [rank.status for rank in whole.ranks],
    )
    assert second.modules == whole.modules


def test_a_killed_rank_is_missing_and_the_others_tell_of_their_own(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """If rank 1 is killed and rank 2 ends with an exception, the other ranks are still merged.

    The four ranks are two stages of a pipeline with two replicas each. Rank 0 has the layer `up`,
    and rank 3 has the layer `down`.
    """
    whole, ended = gathered(tmp_path, "one_killed", warm_python)
    assert [0, 1, 0, 0] == ended
    assert ["ok", "missing", "failed", "ok"] == [rank.status for rank in whole.ranks]
    assert {"up": up, "down": down} == macs(whole, "forward")
    assert [(0, 0), (0, 1), (1, 0), (1, 1)] == [
        (rank.coordinates["data"], rank.coordinates["pipeline"]) for rank in whole.ranks
    ]
    assert True is whole.run.partial
    assert [("1", 1)] == [
        (note.subject, note.values["missing"])
        for note in whole.notes
        if note.code == "ranks_missing"
    ]

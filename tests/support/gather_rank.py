"""Run one of four ranks, as torchrun would, and collect their profiles on rank 0.

The command is `python -c "..." RANK PORT FILE two_meshes|one_killed`. Rank 0 writes the merged
profile to FILE.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lflops
from lflops.profile.profile import Profile
from lflops.ranks.collect import collector as gather_module
from lflops.ranks.collect.collector import RankCollector
from lflops.ranks.collect.store import shared_store
from lflops.ranks.collect.topology import Topology, topology_of
from tests.support.small_models import hidden, sequence, wide

LONG = 600.0
"""A timeout in seconds that no rank should ever reach."""


class Wide(nn.Module):
    """A block with twice the usual width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * wide)
        self.down = nn.Linear(2 * wide, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def two_meshes(rank: int) -> tuple[RankCollector, Profile, Topology]:
    """Measure a model on 2 x 2 ranks: tensor parallel in one dimension, FSDP in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        Wide(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    found = topology_of(4, rank, model=model)
    profile = lflops.measure(
        model, sequence(requires_grad=True), backward=True, warmup=0, repeats=1, hardware=None
    )
    return of_rank(rank, found), profile, found


def one_killed(rank: int) -> tuple[RankCollector, Profile, Topology]:
    """Count the stages of a custom pipeline, of which two do not end normally.

    An even rank has the layer `up`, an odd rank has `down`. Rank 1 is killed, rank 2 is interrupted
    by an exception, and ranks 0 and 3 finish.
    """
    model = nn.Module()
    if rank % 2:
        model.down = nn.Linear(wide, hidden)
        width = wide
    else:
        model.up = nn.Linear(hidden, wide)
        width = hidden
    found = topology_of(4, rank, function=lambda each: {"data": each // 2, "pipeline": each % 2})
    if rank == 1:
        os._exit(1)
    with contextlib.suppress(ZeroDivisionError), lflops.counting(model) as counted:
        layer = next(model.children())
        layer(torch.zeros(6, width)).sum().backward()
        # On rank 2, this raises the exception.
        _ = 1 // (rank - 2)
    return of_rank(rank, found), counted.profile, found


def of_rank(rank: int, found: Topology) -> RankCollector:
    """Return the collector of this rank.

    If a rank is killed, rank 0 must not really wait for it. So the clock of the collector stands
    still until the reports of the other two ranks have arrived, and then jumps to the deadline.
    """
    store = shared_store("lflops", timeout=LONG)
    gather_module.EXIT_SECONDS = LONG
    gather = RankCollector(store, rank, found, timeout=LONG)
    if sys.argv[4] == "one_killed":
        moment = [0.0]

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            if int(store.add("None/None/reported/", 0)) == 2:
                moment[0] = min(gather._deadline, 100 * LONG)

        gather._clock = lambda: moment[0]
        gather._pause = pause
    return gather


def main() -> None:
    """Count a model, push its profile to the collector, and on rank 0 save the merged profile."""
    rank = int(sys.argv[1])
    port = sys.argv[2]
    file = Path(sys.argv[3])
    scenario = sys.argv[4]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="4")
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    # Without this barrier, rank 1 might end while another rank is still connecting to it, and that
    # rank would wait.
    distributed.barrier()
    scenarios = {"two_meshes": two_meshes, "one_killed": one_killed}
    gather, profile, _ = scenarios[scenario](rank)
    gather.push(profile)
    for whole in gather.finish(failed=scenario == "one_killed" and rank == 2):
        whole.save(file)
    # A normal exit would wait for the killed rank.
    os._exit(0)

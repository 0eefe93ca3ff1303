"""A script that runs once for each of four ranks, as with torchrun.

Rank 0 writes the gathered profile to the named file.

`sys.argv` is as in `python -c "..." RANK PORT FILE two_meshes|one_killed`.
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
"""Seconds that nobody is to wait."""


class Wide(nn.Module):
    """Twice as wide as a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * wide)
        self.down = nn.Linear(2 * wide, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def two_meshes(rank: int) -> tuple[RankCollector, Profile, Topology]:
    """Two times two ranks: tensors are spread over one dimension, data and what is left of the tensors over the other."""
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
    """Stages by hand: an even rank has `up`, an odd one `down`.

    One is killed, one is left by an exception, one goes on.
    """
    model = nn.Module()
    setattr(
        model,
        "down" if rank % 2 else "up",
        nn.Linear(wide, hidden) if rank % 2 else nn.Linear(hidden, wide),
    )
    found = topology_of(4, rank, function=lambda each: {"data": each // 2, "pipeline": each % 2})
    if rank == 1:
        os._exit(1)
    with contextlib.suppress(ZeroDivisionError), lflops.counting(model) as counted:
        layer = next(model.children())
        layer(torch.zeros(6, wide if rank % 2 else hidden)).sum().backward()
        _ = 1 // (rank - 2)  # the training of rank 2 is left here
    return of_rank(rank, found), counted.profile, found


def of_rank(rank: int, found: Topology) -> RankCollector:
    """That of the group; where rank 0 would wait for the killed one, time is over once the others have told."""
    store = shared_store("lflops", timeout=LONG)
    gather_module.EXIT_SECONDS = LONG
    gather = RankCollector(store, rank, found, timeout=LONG)
    if sys.argv[4] == "one_killed":
        moment = [0.0]

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            if int(store.add("None/None/reported/", 0)) == 2:
                moment[0] = min(gather._deadline, 100 * LONG)

        gather._clock, gather._pause = lambda: moment[0], pause
    return gather


def main() -> None:
    """Count, hand in, and on rank 0 write."""
    rank, port, file, scenario = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="4")
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    distributed.barrier()  # one that ends while another still connects to it would be waited for
    gather, profile, _ = {"two_meshes": two_meshes, "one_killed": one_killed}[scenario](rank)
    gather.push(profile)
    for whole in gather.finish(failed=scenario == "one_killed" and rank == 2):
        whole.save(file)
    os._exit(0)  # the group would wait for the killed one

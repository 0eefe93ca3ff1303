"""Train as one of two ranks on simulated devices, once for each SLOWER.

`python -m tests.simulated.ddp_rank RANK PORT SLOWER...`

The kernels of rank 1 take SLOWER times as long as usual. Each rank prints a JSON list with an entry
for each training run: the stragglers and the last unprofiled step of each profile.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import lflops
from lflops.timing.clock import HostClock, ThreadSchedule
from tests.simulated.trainings import RATE, ROWS, WIDTH, Layers
from tests.support import simulated
from tests.support.simulated.group import register

STEPS = 24


def trained(rank: int, slower: float) -> Any:
    """Train, and return the stragglers and the last unprofiled step of each profile."""
    simulated.plan_device(1, slower=slower)
    device = simulated.DEVICES[rank]
    model = DistributedDataParallel(Layers().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {
        "hardware": None,
        "on_error": "raise",
        "trace": False,
        "html": False,
        "ledger": False,
    }
    with lflops.monitor(model, optimizer, log=lambda _: None, **settings) as monitor:
        for batch in monitor.data([torch.randn(ROWS, WIDTH) for _ in range(STEPS)]):
            with monitor.step(batch):
                x = batch.to(device, non_blocking=True)
                (model(x) - x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    found: list[Any] = []
    for profile in monitor.profiles:
        rows = [(row.slow_rank, row.module, row.phase) for row in lflops.stragglers(profile).rows]
        steps = [step for step in profile.steps if step.kind == "unprofiled" and not step.marks]
        last = steps[-1]
        found.append(
            {
                "rows": rows,
                "seconds": last.seconds,
                "phases": last.phases,
                "waiting": last.waiting,
            }
        )
    return found


if __name__ == "__main__":
    rank, port, *slower = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    simulated.load()
    simulated.plan(macs_per_second=RATE)
    HostClock.mark = staticmethod(simulated.nanoseconds)  # type: ignore[assignment]
    # the system's scheduling of this process is no part of the test
    ThreadSchedule.read = partial(int)  # type: ignore[method-assign,assignment]
    register()
    distributed.init_process_group(simulated.NAME, rank=int(rank), world_size=2)
    torch.accelerator.set_device_index(int(rank))
    print(json.dumps([trained(int(rank), float(each)) for each in slower]))  # noqa: T201
    distributed.destroy_process_group()

"""Small trainings on a simulated device, whose times are worked out by hand."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lflops
from lflops import Profile, Schedule
from tests.support import simulated
from tests.support.simulated import FIRST

ROWS, WIDTH, HIDDEN = 64, 256, 512
MACS = ROWS * WIDTH * HIDDEN
"""Of each product of `Layers`."""
RATE = 1e10
"""MACs a second that tests plant, so that each product takes 0.839 ms.

All other kernels together take some µs.
"""
PRODUCT = MACS / RATE


class Layers(nn.Module):
    """Two products with an activation between them.

    Backward has three: nobody wants the gradient of the data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Trained(NamedTuple):
    """A training that is over.

    Its window, and how often the host waited for the device in each step.
    """

    profile: Profile
    waited: list[int]


def train(
    model: nn.Module,
    *,
    device: torch.device = FIRST,
    schedule: Schedule | None = None,
    steps: int = 20,
    each_step: Callable[[int], object] = lambda _: None,
    rows: Callable[[int], int] = lambda _: ROWS,
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    folder: Path | None = None,
    **settings: Any,
) -> Trained:
    """Train it in a loop, on batches that are copied to the device without waiting."""
    asked: dict[str, Any] = {
        "on_error": "raise",
        "log": lambda _: None,
        "trace": False,
        "html": False,
        "hardware": None,
        "ledger": False,
    }
    asked |= {
        "schedule": schedule or Schedule(wait=6, warmup=2, active=3, repeat=1),
        "dirpath": folder,
        **settings,
    }
    model.to(device)
    optimizer, waits = torch.optim.SGD(model.parameters(), lr=1e-3), [simulated.synchronisations()]
    with lflops.monitor(model, optimizer, **asked) as monitor:
        for step in range(steps):
            batch = torch.randn(rows(step), WIDTH)
            with monitor.step(batch):
                x = batch.to(device, non_blocking=True)
                (call(model, x) - x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                each_step(step)
            waits.append(simulated.synchronisations())
    (profile,) = monitor.profiles
    return Trained(profile, [after - before for before, after in pairwise(waits)])

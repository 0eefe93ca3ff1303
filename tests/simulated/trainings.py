"""A small training loop on a simulated device, whose expected times can be worked out by hand."""

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
"""MACs of each matmul of `Layers`."""
RATE = 1e10
"""MACs per second of the simulated device, if a test plans this rate."""
PRODUCT = MACS / RATE
"""Seconds of a matmul of `Layers` at this rate: 0.839 ms. All other kernels take only some µs."""


class Layers(nn.Module):
    """Two linear layers with an activation between them.

    Backward has three matmuls, because the data needs no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Trained(NamedTuple):
    """The profile of a training run, and how often the host waited for the device in each step."""

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
    """Train a model in a custom loop with a monitor.

    Batches are copied to the device without waiting.

    Args:
        model: The model.
        device: The device that trains.
        schedule: The schedule, by default one window with 3 module-timing steps.
        steps: Number of steps.
        each_step: Function that is called at the end of each step with its number.
        rows: Function that returns the number of rows in the batch of a step.
        call: Function that calls the model with a batch.
        folder: Folder for the files of the run, if there are any.
        settings: More arguments of `lflops.monitor`.
    """
    arguments: dict[str, Any] = {
        "on_error": "raise",
        "log": lambda _: None,
        "trace": False,
        "html": False,
        "hardware": None,
        "ledger": False,
        "schedule": schedule or Schedule(wait=6, warmup=2, active=3, repeat=1),
        "dirpath": folder,
    }
    arguments.update(settings)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    waits = [simulated.synchronisations()]
    with lflops.monitor(model, optimizer, **arguments) as monitor:
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

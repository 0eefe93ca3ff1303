"""Samples, tokens and MACs of all ranks with uneven batches, in each kind of loop and strategy.

Two real processes, figures by hand.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lflops
from lflops import Schedule
from lflops.analysis.analysis import analyze
from lflops.timing.clock import HostClock, ThreadSchedule
from tests.support.fake_clock import StillClock
from tests.support.processes import Ranks

IN, WIDE, OUT, LENGTH, STEPS = 16, 32, 4, 4, 16
ROWS = (3, 5)
"""Sequences of each rank's batch."""

TOKEN = 3 * (IN * WIDE + WIDE * OUT) - IN * WIDE
"""MACs of a token, forward and backward: the input needs no gradient."""


class Model(nn.Module):
    """Two products, in a hundredth of a second."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(0.01)
        return self.down(torch.relu(self.up(x)))


Made = tuple[nn.Module, Any, dict[str, Any], Callable[[Tensor], None]]


def replicated(own: nn.Module) -> Made:
    """DistributedDataParallel."""
    model = DistributedDataParallel(own)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), {"strategy": "ddp"}, Tensor.backward


def sharded(own: nn.Module) -> Made:
    """FSDP2."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for part in (*own.children(), own):
        fully_shard(part, mesh=mesh)
    return own, torch.optim.SGD(own.parameters(), lr=0.1), {}, Tensor.backward


def divided(own: nn.Module) -> Made:
    """Tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    parallelize_module(own, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return own, torch.optim.SGD(own.parameters(), lr=0.1, foreach=False), {}, Tensor.backward


def of_fabric(own: nn.Module) -> Made:
    """Fabric's."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    return model, optimizer, {"engine": fabric}, fabric.backward


def of_accelerate(own: nn.Module) -> Made:
    """Accelerate's."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    return model, optimizer, {"engine": accelerator}, accelerator.backward


def units(batch: Tensor) -> dict[str, int]:
    """Sequences and their tokens."""
    return {"samples": len(batch), "tokens": batch.shape[0] * batch.shape[1]}


def trained(
    make: Callable[[nn.Module], Made],
    rows: tuple[int, int],
    *,
    joined: bool = False,
    slow: bool = False,
) -> Any:
    """What the first rank says.

    Samples and tokens of a step and of a second, MACs of each rank, and who is slow.
    """
    rank = distributed.get_rank()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    torch.manual_seed(0)
    clock = StillClock()
    HostClock.mark = clock.nanoseconds  # type: ignore[assignment]
    # The real waits for a core are no part of times by this clock.
    ThreadSchedule.read = lambda _: None  # type: ignore[method-assign]
    model, optimizer, given, backward = make(Model(clock))
    given.pop("strategy", None)
    batches = [
        torch.randn(rows[rank], LENGTH, IN)
        for _ in range(STEPS + (4 * STEPS if joined else 0) + (9 * rank if joined else 0))
    ]
    schedule = Schedule(wait=2, warmup=1, active=2)
    with lflops.monitor(
        model,
        optimizer,
        log=list[str]().append,
        schedule=schedule,
        units=units,
        html=False,
        on_error="raise",
        **given,
    ) as monitor:
        join: Any = getattr(model, "join", None) if joined else None
        with torch.enable_grad() if join is None else join():
            for batch in monitor.data(batches):
                with monitor.step(batch):
                    clock.advance(0.005 if slow and rank else 0.0)
                    backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    if not monitor.profiles:
        return None
    profile = monitor.profiles[-1]
    speed = analyze(profile).step_times
    step = next(each for each in profile.steps if each.is_unprofiled)
    seconds = (speed.samples_per_second, speed.tokens_per_second)
    slow_ranks = [row.slow_rank for row in lflops.stragglers(profile).rows]
    return step.samples, step.tokens, seconds, [each.macs for each in profile.ranks], slow_ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Both processes."""
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize("make", [replicated, sharded, of_fabric, of_accelerate])
def test_uneven_batches_add_up_and_each_rank_has_its_work(
    make: Callable[[nn.Module], Made], two: Ranks
) -> None:
    """3 and 5 sequences of 4 tokens, in a hundredth of a second."""
    if make is of_accelerate:
        pytest.importorskip("accelerate")
    found: Any = two.run(partial(trained, make, ROWS))[0]
    samples, tokens, each_second, macs, slow = found
    assert (8, 32, [TOKEN * LENGTH * rows for rows in ROWS], []) == (samples, tokens, macs, slow)
    assert (pytest.approx(800.0), pytest.approx(3200.0)) == each_second


def test_a_model_that_two_ranks_share_has_one_batch_and_half_the_work_on_each(two: Ranks) -> None:
    """Three sequences, the same on both."""
    found: Any = two.run(partial(trained, divided, (3, 3)))[0]
    samples, tokens, each_second, macs, slow = found
    assert (3, 12, [TOKEN * LENGTH * 3 // 2] * 2, []) == (samples, tokens, macs, slow)
    assert (pytest.approx(300.0), pytest.approx(1200.0)) == each_second


@pytest.mark.parametrize(("slow", "expected"), [(False, []), (True, [1])])
def test_join_with_uneven_inputs_accuses_no_rank_but_a_slow_one(
    slow: bool, expected: list[int], two: Ranks
) -> None:
    """Rank 1 has nine batches more, for which the other one only answers collectives.

    Half as slow again, it is named.
    """
    found: Any = two.run(partial(trained, replicated, (3, 3), joined=True, slow=slow))[0]
    assert expected == found[-1]

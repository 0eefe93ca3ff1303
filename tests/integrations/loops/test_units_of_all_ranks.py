"""Test the samples, tokens and MACs of all ranks in custom loops, if ranks have uneven batches.

Two real processes train with each strategy and engine. The expected numbers are worked out by hand:
the clock stands still except where the model or the test advances it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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

IN, WIDE, OUT = 16, 32, 4
"""Widths of the two linear layers."""

LENGTH = 4
"""Tokens in a sequence."""

STEPS = 16
ROWS = (3, 5)
"""Number of sequences in a batch, by rank."""

TOKEN = 3 * (IN * WIDE + WIDE * OUT) - IN * WIDE
"""MACs of a token in forward and backward: three matmuls for each layer, but none for the gradient of
the input, which is not needed.
"""


class Model(nn.Module):
    """Two linear layers whose forward takes 10 ms."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.up = nn.Linear(IN, WIDE)
        self.down = nn.Linear(WIDE, OUT)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(0.01)
        return self.down(torch.relu(self.up(x)))


Made = tuple[nn.Module, Any, dict[str, Any], Callable[[Tensor], None]]
"""The model, its optimizer, arguments of `lflops.monitor`, and a function that runs backward."""


def replicated(own: nn.Module) -> Made:
    """Wrap the model in `DistributedDataParallel`."""
    model = DistributedDataParallel(own)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), {}, Tensor.backward


def sharded(own: nn.Module) -> Made:
    """Shard the model with FSDP2."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for part in (*own.children(), own):
        fully_shard(part, mesh=mesh)
    return own, torch.optim.SGD(own.parameters(), lr=0.1), {}, Tensor.backward


def divided(own: nn.Module) -> Made:
    """Divide the layers with tensor parallelism, so that both ranks work on the same batch."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    parallelize_module(own, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return own, torch.optim.SGD(own.parameters(), lr=0.1, foreach=False), {}, Tensor.backward


def of_fabric(own: nn.Module) -> Made:
    """Set up the model with Fabric's DDP strategy."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    return model, optimizer, {"engine": fabric}, fabric.backward


def of_accelerate(own: nn.Module) -> Made:
    """Prepare the model with Accelerate, which wraps it in DDP."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    return model, optimizer, {"engine": accelerator}, accelerator.backward


def units(batch: Tensor) -> dict[str, int]:
    """Return the number of sequences in a batch, and of their tokens."""
    sequences, length, _ = batch.shape
    return {"samples": sequences, "tokens": sequences * length}


def trained(
    make: Callable[[nn.Module], Made],
    rows: tuple[int, int],
    *,
    joined: bool = False,
    slow: bool = False,
) -> Any:
    """Train on this rank.

    Args:
        make: Function that wraps the model.
        rows: Number of sequences in a batch, by rank.
        joined: Whether rank 1 has nine batches more than rank 0, under DDP's `join`.
        slow: Whether each step of rank 1 takes 5 ms longer.

    Returns:
        Samples and tokens of a step, a pair with samples and tokens per second, the MACs of each
        rank, and the slow ranks. `None` on a rank without a profile.
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
    # The real waits for a core have nothing to do with the times of this clock.
    ThreadSchedule.read = lambda _: None  # type: ignore[method-assign]
    model, optimizer, given, backward = make(Model(clock))
    number = STEPS
    if joined:
        number = 5 * STEPS + 9 * rank
    batches = [torch.randn(rows[rank], LENGTH, IN) for _ in range(number)]
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
        join: Any = model.join if joined else nullcontext
        with join():
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
    each_second = (speed.samples_per_second, speed.tokens_per_second)
    macs = [each.macs for each in profile.ranks]
    slow_rank_sentences = [row.slow_rank for row in lflops.stragglers(profile).rows]
    return step.samples, step.tokens, each_second, macs, slow_rank_sentences


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return two processes with a process group."""
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize("make", [replicated, sharded, of_fabric, of_accelerate])
def test_uneven_batches_add_up_and_each_rank_has_its_work(
    make: Callable[[nn.Module], Made], two: Ranks
) -> None:
    """A step has the samples and tokens of both ranks, and each rank the MACs of its own batch.

    The ranks have 3 and 5 sequences of 4 tokens, and a step takes 10 ms. No rank is slow.
    """
    if make is of_accelerate:
        pytest.importorskip("accelerate")
    found: Any = two.run(partial(trained, make, ROWS))[0]
    samples, tokens, each_second, macs, slow = found
    assert (8, 32, [TOKEN * LENGTH * rows for rows in ROWS], []) == (samples, tokens, macs, slow)
    assert (pytest.approx(800.0), pytest.approx(3200.0)) == each_second


def test_a_model_that_two_ranks_share_has_one_batch_and_half_the_work_on_each(two: Ranks) -> None:
    """Under tensor parallelism, the batch counts once, and each rank has half of its MACs.

    Both ranks work on the same 3 sequences of 4 tokens, and a step takes 10 ms.
    """
    found: Any = two.run(partial(trained, divided, (3, 3)))[0]
    samples, tokens, each_second, macs, slow = found
    assert (3, 12, [TOKEN * LENGTH * 3 // 2] * 2, []) == (samples, tokens, macs, slow)
    assert (pytest.approx(300.0), pytest.approx(1200.0)) == each_second


@pytest.mark.parametrize(("slow", "expected"), [(False, []), (True, [1])])
def test_join_with_uneven_inputs_accuses_no_rank_but_a_slow_one(
    slow: bool, expected: list[int], two: Ranks
) -> None:
    """Under DDP's `join`, rank 1 is a straggler only if its steps take 15 ms instead of 10 ms.

    Rank 1 has nine batches more. During them, rank 0 only answers the collectives of DDP.
    """
    found: Any = two.run(partial(trained, replicated, (3, 3), joined=True, slow=slow))[0]
    assert expected == found[-1]

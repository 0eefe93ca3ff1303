"""Loops that use Lightning Fabric or Accelerate.

Their `backward` and clipping are phases, and their wrappers have no names.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from lightning.fabric import Fabric
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import lflops
from lflops import Schedule
from lflops.analysis.analysis import analyze
from lflops.integrations.loops.monitor import _wrappers_of_accelerate
from tests.support.process_state import bits
from tests.support.processes import Ranks

WIDTH, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8
FORWARD = BATCH * (WIDTH * HIDDEN + HIDDEN * CLASSES)
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN

Engine = tuple[Any, nn.Module, Any, Callable[[], None]]


def model() -> nn.Sequential:
    """Two products."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def with_fabric() -> Engine:
    """Clips by its own method."""
    fabric = Fabric(accelerator="cpu", devices=1)
    own = model()
    wrapped, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=0.01))
    return (
        fabric,
        wrapped,
        optimizer,
        lambda: fabric.clip_gradients(wrapped, optimizer, max_norm=1.0),
    )  # type: ignore[return-value]


def with_accelerate() -> Engine:
    """Clips by its own method."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    own = model()
    wrapped, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=0.01))
    return (
        accelerator,
        wrapped,
        optimizer,
        lambda: accelerator.clip_grad_norm_(wrapped.parameters(), 1.0),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(20)
    ]


def step(engine: Engine, x: Tensor, y: Tensor) -> None:
    """One of a loop as their documentation shows it."""
    own, wrapped, optimizer, clip = engine
    own.backward(F.cross_entropy(wrapped(x), y))
    clip()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("made", [with_fabric, with_accelerate])
def test_a_loop_with_an_engine_is_counted_and_timed(made: Callable[[], Engine]) -> None:
    """And trains as it does without the monitor."""
    plain, engine = made(), made()
    for x, y in batches():
        step(plain, x, y)
    before = set(vars(engine[0]))
    schedule = Schedule(wait=2, warmup=1, active=2, repeat=1)
    with lflops.monitor(
        engine[1],
        engine[2],
        engine=engine[0],
        schedule=schedule,
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for x, y in monitor.data(batches()):
            with monitor.step(x):
                step(engine, x, y)
    (profile,) = monitor.profiles
    assert (FORWARD, BACKWARD) == (
        profile.modules[""].forward.macs,
        profile.modules[""].backward.macs,
    )
    assert {"", "0", "1", "2"} == profile.modules.keys()
    assert {"data", "forward", "backward", "clip", "optimizer", "other"} == set(
        analyze(profile).step_times.phases
    )
    assert [bits(each) for each in plain[1].parameters()] == [
        bits(each) for each in engine[1].parameters()
    ]
    assert before == set(vars(engine[0]))


def on_two_ranks() -> tuple[int | None, str | None, set[int | None]]:
    """Train with Fabric's wrapper around DDP, and batches that no sampler divided."""
    rank = distributed.get_rank()
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ.update(
        {name: str(value) for name, value in place.items()}
    )  # of a launcher, so that Fabric starts no process
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    own = model()
    wrapped, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=0.01))
    schedule = Schedule(wait=2, warmup=1, active=2, repeat=1)
    with lflops.monitor(
        wrapped, optimizer, engine=fabric, schedule=schedule, log=lambda _: None, on_error="raise"
    ) as monitor:
        for x, y in batches():
            with monitor.step((x, y)):
                fabric.backward(F.cross_entropy(wrapped(x), y))
                optimizer.step()
                optimizer.zero_grad()
    (profile,) = monitor.profiles or (None,)
    return (
        (None, None, set())
        if profile is None
        else (
            profile.run.data_parallel_size,
            profile.run.strategy,
            {step.samples for step in profile.steps},
        )
    )


def test_ranks_of_fabric_have_batches_of_their_own(tmp_path: Path) -> None:
    """The samples of both are a step's."""
    with Ranks(2, tmp_path) as two:
        results: Any = two.run(on_two_ranks)  # type: ignore[arg-type]
    assert (2, "DistributedDataParallel", {2 * BATCH}) == results[0]


@pytest.mark.parametrize(
    ("kind", "sizes", "wrappers"),
    [
        ("MULTI_CPU", {}, {"DistributedDataParallel"}),
        ("MULTI_GPU", {"tp_size": 1, "cp_size": 1}, {"DistributedDataParallel"}),
        ("FSDP", {}, {"FullyShardedDataParallel"}),
        ("MULTI_GPU", {"tp_size": 2}, set()),
        ("NO", {}, set()),
        ("MEGATRON_LM", {}, set()),
    ],
)
def test_an_accelerator_says_whether_each_rank_has_a_batch_of_its_own(
    kind: str, sizes: dict[str, int], wrappers: set[str]
) -> None:
    """The Trainer of transformers hands over the model without its wrapper.

    Ranks that share a batch, as under tensor parallelism, are no data-parallel ranks.
    """
    engine = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        parallelism_config=SimpleNamespace(**sizes) if sizes else None,
    )
    assert wrappers == _wrappers_of_accelerate(engine)


def test_the_distributed_types_of_accelerate_are_those_that_are_known() -> None:
    """Their values are read by name."""
    values = {each.value for each in DistributedType}
    assert {"MULTI_CPU", "MULTI_GPU", "FSDP"} <= values
    assert set() == _wrappers_of_accelerate(Accelerator(cpu=True))
    assert set() == _wrappers_of_accelerate(None)

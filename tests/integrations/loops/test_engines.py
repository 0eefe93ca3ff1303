"""Test custom loops that use Lightning Fabric or Accelerate.

The `backward` and the clipping of these engines are phases, and their wrappers around the model do
not appear in module names.
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
from torch.utils.data import DataLoader

import lflops
from lflops import Schedule
from lflops.analysis.analysis import analyze
from lflops.integrations.loops.monitor import _wrappers_of_accelerate
from tests.support.process_state import bits
from tests.support.processes import Ranks

WIDTH, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8
FORWARD = BATCH * (WIDTH * HIDDEN + HIDDEN * CLASSES)
"""MACs of one forward pass of `model()`, worked out by hand: one matmul for each layer."""
BACKWARD = 2 * FORWARD - BATCH * WIDTH * HIDDEN
"""MACs of one backward pass: two matmuls for each layer, except that the data has no gradient."""

Engine = tuple[Any, nn.Module, Any, Callable[[], None]]
"""The engine, the wrapped model, the optimizer, and a function that clips gradients."""


def model() -> nn.Sequential:
    """Return two linear layers with an activation between them, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def with_fabric() -> Engine:
    """Set up a `Fabric`, which clips with `clip_gradients`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    own = model()
    wrapped, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=0.01))

    def clip() -> None:
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)

    return fabric, wrapped, optimizer, clip


def with_accelerate() -> Engine:
    """Set up an `Accelerator`, which clips with `clip_grad_norm_`."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    own = model()
    wrapped, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=0.01))

    def clip() -> None:
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)

    return accelerator, wrapped, optimizer, clip


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return 20 batches of inputs and classes, the same in each call."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(20)
    ]


def step(engine: Engine, x: Tensor, y: Tensor) -> None:
    """Run a training step as the documentation of Fabric and Accelerate shows it."""
    fabric_or_accelerator, wrapped, optimizer, clip = engine
    fabric_or_accelerator.backward(F.cross_entropy(wrapped(x), y))
    clip()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("made", [with_fabric, with_accelerate])
def test_a_loop_with_an_engine_is_counted_and_timed(made: Callable[[], Engine]) -> None:
    """The profile has MACs and phases, and the module names contain no wrapper.

    The weights equal those of a run without the monitor, and the engine keeps no new attributes.
    """
    plain = made()
    engine = made()
    for x, y in batches():
        step(plain, x, y)
    plain_model = plain[1]
    fabric_or_accelerator, wrapped, optimizer, _ = engine
    before = set(vars(fabric_or_accelerator))
    schedule = Schedule(wait=2, warmup=1, active=2, repeat=1)
    with lflops.monitor(
        wrapped,
        optimizer,
        engine=fabric_or_accelerator,
        schedule=schedule,
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for x, y in monitor.data(batches()):
            with monitor.step(x):
                step(engine, x, y)
    (profile,) = monitor.profiles
    root = profile.modules[""]
    assert (FORWARD, BACKWARD) == (root.forward.macs, root.backward.macs)
    assert {"", "0", "1", "2"} == profile.modules.keys()
    phases = set(analyze(profile).step_times.phases)
    assert {"data", "forward", "backward", "clip", "optimizer", "other"} == phases
    weights = [bits(each) for each in plain_model.parameters()]
    assert weights == [bits(each) for each in wrapped.parameters()]
    assert before == set(vars(fabric_or_accelerator))


@pytest.mark.parametrize("accumulation", [4, 1])
def test_the_last_batch_of_an_epoch_ends_a_step_of_accelerate(accumulation: int) -> None:
    """A step ends with each optimizer step, also if the epoch is no multiple of the accumulation.

    An epoch has 6 batches and gradients are accumulated over 4. So it has 2 steps, of 4 and of 2
    batches, and 3 epochs have 6 steps. The number of batches is known from the Accelerator alone.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    own = model()
    loader = DataLoader(torch.ones(6 * BATCH, WIDTH), batch_size=BATCH)
    wrapped, optimizer, loader = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=0.01), loader
    )
    updates = 0
    ends = []
    with lflops.monitor(
        wrapped,
        optimizer,
        engine=accelerator,
        accumulation=accumulation,
        schedule=Schedule(wait=1000),
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for _ in range(3):
            for x in monitor.data(loader):
                with monitor.step(x), accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                updates += accelerator.sync_gradients
                ends.append(monitor._steps_done == updates)
    assert 6 == updates
    assert all(ends)
    assert monitor.ledger is not None
    assert 6 == monitor.ledger.steps


def test_an_accelerator_without_accumulate_leaves_the_steps_to_the_loop() -> None:
    """If the loop does not use `accumulate`, the Accelerator always synchronizes gradients.

    The loop itself steps after 4 and 8 batches, so these are 2 steps.
    """
    accelerator = Accelerator(cpu=True)
    own = model()
    wrapped, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.01))
    with lflops.monitor(
        wrapped,
        optimizer,
        engine=accelerator,
        accumulation=4,
        schedule=Schedule(wait=1000),
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for number in range(1, 9):
            with monitor.step():
                accelerator.backward(wrapped(torch.ones(BATCH, WIDTH)).square().mean())
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    assert monitor.ledger is not None
    assert 2 == monitor.ledger.steps


def test_fabric_steps_end_with_the_step_of_its_optimizer() -> None:
    """Fabric does not know when a loop accumulates, but its optimizer makes the steps.

    Gradients are accumulated over 4 batches, and the loop also steps after the last of 6.
    """
    fabric, wrapped, optimizer, _ = with_fabric()
    with lflops.monitor(
        wrapped,
        optimizer,
        engine=fabric,
        accumulation=4,
        schedule=Schedule(wait=1000),
        log=lambda _: None,
        on_error="raise",
    ) as monitor:
        for number in [*range(1, 7)] * 2:
            accumulates = number not in {4, 6}
            with monitor.step(), fabric.no_backward_sync(wrapped, enabled=accumulates):
                fabric.backward(wrapped(torch.ones(BATCH, WIDTH)).square().mean())
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
    assert monitor.ledger is not None
    assert 4 == monitor.ledger.steps


def on_two_ranks() -> tuple[int | None, str | None, set[int | None]]:
    """Train with Fabric's DDP strategy, on batches that no sampler divided among the ranks.

    Returns:
        The data-parallel size, the strategy and the samples of steps in the profile. They are empty
        if this rank has no profile.
    """
    rank = distributed.get_rank()
    # With the environment variables of a launcher, Fabric starts no processes itself.
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ.update({name: str(value) for name, value in place.items()})
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
    if not monitor.profiles:
        return None, None, set()
    (profile,) = monitor.profiles
    run = profile.run
    return run.data_parallel_size, run.strategy, {step.samples for step in profile.steps}


def test_ranks_of_fabric_have_batches_of_their_own(tmp_path: Path) -> None:
    """The samples of a step are the sum over both ranks, because each rank has its own batch."""
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
    """The wrappers that lflops assumes follow from the Accelerator's distributed type and sizes.

    lflops needs this for the transformers Trainer, which passes the model without its wrapper.
    Ranks that share a batch, for example under tensor parallelism, are not data-parallel ranks.
    """
    engine = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        parallelism_config=SimpleNamespace(**sizes) if sizes else None,
    )
    assert wrappers == _wrappers_of_accelerate(engine)


def test_the_distributed_types_of_accelerate_are_those_that_are_known() -> None:
    """Accelerate still has the values of distributed types with which lflops compares.

    Without several ranks, and without an engine, there are no wrappers.
    """
    values = {each.value for each in DistributedType}
    assert {"MULTI_CPU", "MULTI_GPU", "FSDP"} <= values
    assert set() == _wrappers_of_accelerate(Accelerator(cpu=True))
    assert set() == _wrappers_of_accelerate(None)

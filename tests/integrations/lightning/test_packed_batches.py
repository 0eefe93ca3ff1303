"""Test batches of packed sequences, whose MACs depend on the lengths and not only on the shapes."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import lflops
from lflops import Hardware
from lflops.monitoring.schedule import Schedule
from lflops.monitoring.window.counting_step import CountingStepMode
from tests.integrations.lightning.test_outlets import Recorder
from tests.support.cpu_stand_ins import packed_attention_kernels
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, fit, watching

pytestmark = LIGHTNINGS_WARNINGS

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

WORDS, HEADS, WIDTH = 11, 2, 4
HIDDEN = HEADS * WIDTH
BATCHES = 30
SECONDS = 2.0
"""The time of a step."""
CHIP = Hardware("abacus", {"fp32": 1e9})
Batch = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    yield from packed_attention_kernels()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that the monitor reads."""
    clock = StillClock()
    use_clock(monkeypatch, clock)
    return clock


class Packed(LightningModule):
    """One attention layer of a language model on packed sequences."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, WORDS)
        self.clock = clock

    def forward(self, batch: Batch) -> Tensor:
        offsets = batch["cu_seqlens"]
        hidden = self.qkv(self.words(batch["input_ids"].flatten()))
        q, k, v = hidden.view(-1, 3, HEADS, WIDTH).unbind(1)
        longest = int(offsets.diff().max())
        attended = varlen.varlen_attn(
            q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0)
        )
        return self.out(attended.flatten(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.advance(SECONDS)
        return F.cross_entropy(self(batch), batch["input_ids"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(IterableDataset[Batch]):
    """The given batches, as if a collator had made them."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def packed_batches() -> list[Batch]:
    """Return batches of 64 tokens in four sequences of random lengths. All have the same shapes."""
    draw = random.Random(5)  # noqa: S311
    batches = []
    for _ in range(BATCHES):
        cuts = sorted(draw.sample(range(1, 64), 3))
        words = torch.randint(WORDS, (1, 64))
        batches.append({"input_ids": words, "cu_seqlens": torch.tensor([0, *cuts, 64]).int()})
    return batches


def work_of(model: Packed, batch: Batch) -> int:
    """Count the batch, and return its MACs of forward and backward."""
    profile = lflops.count(model, (batch,), backward=True)
    return profile.total() + profile.total(phase="backward")


def test_points_of_packed_batches_have_a_time_and_no_mfu(clock: StillClock) -> None:
    """Points of the curves have the step time, but no MFU and no other value that needs MACs.

    A batch with the same shapes was counted, but its sequences have other lengths.
    """
    logger = Recorder()
    fit(
        Packed(clock),
        watching(hardware=CHIP),
        data=DataLoader(Batches(packed_batches()), batch_size=None),
        logger=logger,
        log_every_n_steps=1,
    )
    points = [
        given
        for given in logger.given.values()
        if "lflops·train·step_ms" in given and "lflops·train·forward_ms" not in given
    ]
    assert len(points) > 10
    assert {SECONDS * 1e3} == {given["lflops·train·step_ms"] for given in points}
    for name in ("mfu", "tflops_per_device", "counted_share"):
        assert not any(f"lflops·train·{name}" in given for given in points)


def test_each_window_counts_its_own_packed_batch(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window counts a batch, although the batch of the first window had the same shapes."""
    counted: list[Any] = []
    begin = CountingStepMode.begin_batch

    def noted(self: CountingStepMode, batch: Batch, *, begins_step: bool) -> None:
        begin(self, batch, begins_step=begins_step)
        if self._counting is not None:
            counted.append(batch)

    monkeypatch.setattr(CountingStepMode, "begin_batch", noted)
    model = Packed(clock)
    monitor = watching(hardware=CHIP, schedule=Schedule(wait=3, warmup=2, active=2, repeat=2))
    fit(model, monitor, data=DataLoader(Batches(packed_batches()), batch_size=None))
    found = [profile.total() + profile.total(phase="backward") for profile in monitor.profiles]
    assert [work_of(model, batch) for batch in counted] == found
    assert 2 == len(set(found))

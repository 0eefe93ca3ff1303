"""Batches of packed sequences: each has its own work, which the curves know without counting it."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import lflops
from lflops import Hardware
from lflops.inputs.batch import BatchReader
from lflops.monitoring import session
from lflops.monitoring.window.counting_step import CountingSteps, HostBatch, lengths_of
from lflops.schedule import Schedule
from tests.integrations.lightning.test_outlets import Recorder
from tests.support.cpu_stand_ins import packed_attention_kernels
from tests.support.fake_clock import StillClock
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, fit, watching

pytestmark = LIGHTNINGS_WARNINGS

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

WORDS, HEADS, WIDTH = 11, 2, 4
HIDDEN = HEADS * WIDTH
BATCHES, SECONDS = 200, 2.0
CHIP = Hardware("abacus", {"fp32": 1e9})
Batch = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    yield from packed_attention_kernels()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """The one that the monitor reads."""
    clock = StillClock()
    monkeypatch.setattr(session, "HostClock", lambda: clock)
    return clock


class Packed(LightningModule):
    """A layer of a language model on sequences packed end to end."""

    def __init__(self, clock: StillClock, offsets: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, WORDS)
        self.clock = clock
        self.offsets = offsets

    def forward(self, batch: Batch) -> Tensor:
        offsets = self.offsets(batch)
        q, k, v = (
            self.qkv(self.words(batch["input_ids"].flatten())).view(-1, 3, HEADS, WIDTH).unbind(1)
        )
        longest = int(offsets.diff().max())
        return self.out(
            varlen.varlen_attn(
                q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0)
            ).flatten(1)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.advance(SECONDS)
        return F.cross_entropy(self(batch), batch["input_ids"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(IterableDataset[Batch]):
    """Batches as a collator makes them."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def by_offsets(batch: Batch) -> Tensor:
    """As collators for packed batches give them."""
    return batch["cu_seqlens"]


def by_positions(batch: Batch) -> Tensor:
    """Positions that begin again, as transformers' models take them."""
    positions = batch["position_ids"].flatten()
    begins = (positions == 0).nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([len(positions)])]).int()


def batch_of(lengths: list[int], key: str) -> Batch:
    """Words of sequences of these lengths, in one row."""
    words = torch.randint(WORDS, (1, sum(lengths)))
    if key == "cu_seqlens":
        return {"input_ids": words, key: torch.tensor([0, *lengths]).cumsum(0).int()}
    return {"input_ids": words, key: torch.cat([torch.arange(length) for length in lengths])[None]}


def packings(*, full: bool) -> list[list[int]]:
    """The lengths of each batch: cut from 64 tokens, or drawn."""
    draw = random.Random(5)  # noqa: S311
    if full:
        cuts = [sorted(draw.sample(range(1, 64), draw.randint(1, 6))) for _ in range(BATCHES)]
        return [
            [end - begin for begin, end in zip([0, *each], [*each, 64], strict=True)]
            for each in cuts
        ]
    return [[draw.randint(1, 30) for _ in range(draw.randint(1, 6))] for _ in range(BATCHES)]


def first_of_their_shape(batches: list[Batch]) -> list[int]:
    """Steps of a shape that was not there before; the first few of them are no measure of time."""
    shapes = [tuple(tensor.shape for tensor in batch.values()) for batch in batches]
    return [step for step, shape in enumerate(shapes) if shape not in shapes[:step]]


def work_of(model: Packed, batch: Batch) -> int:
    """MACs of the batch, forward and backward, by counting it."""
    profile = lflops.count(model, (batch,), backward=True)
    return profile.total() + profile.total(phase="backward")


@pytest.mark.parametrize(
    ("key", "offsets", "full"),
    [("cu_seqlens", by_offsets, True), ("position_ids", by_positions, False)],
    ids=["rows filled up", "rows of any length"],
)
def test_each_point_has_its_own_batchs_work(
    key: str,
    offsets: Callable[[Batch], Tensor],
    full: bool,
    clock: StillClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 batches, a point a step.

    Two are counted while the window warms up; every clean step after them has the work of its
    batch.
    """
    counted: list[Any] = []
    begin = CountingSteps.begin_batch

    def noted(self: CountingSteps, batch: Batch) -> None:
        begin(self, batch)
        counted.extend([batch] * (self._counting is not None))

    monkeypatch.setattr(CountingSteps, "begin_batch", noted)
    lengths = packings(full=full)
    batches = [batch_of(each, key) for each in lengths]
    logger = Recorder()
    model = Packed(clock, offsets)
    monitor = watching(hardware=CHIP, schedule=Schedule(wait=3, warmup=2, active=2))
    fit(
        model,
        monitor,
        data=DataLoader(Batches(batches), batch_size=None),
        logger=logger,
        log_every_n_steps=1,
    )
    points = {
        step: given
        for step, given in logger.given.items()
        if step >= 7 and "lflops·train·step_ms" in given
    }
    works = {
        step: given["lflops·train·tflops_per_device"] * 1e12 * SECONDS / 2
        for step, given in points.items()
    }
    expected = {step: work_of(model, batches[step]) for step in works}
    assert (2, set(range(7, BATCHES)) - set(first_of_their_shape(batches)[:16])) == (
        len(counted),
        works.keys(),
    )
    assert pytest.approx(expected, rel=1e-12) == works
    assert len(set(expected.values())) > BATCHES // 2
    assert {1.0} == {given["lflops·train·counted_share"] for given in points.values()}


def test_a_curve_that_cannot_know_is_absent(clock: StillClock) -> None:
    """The lengths are nowhere in the batch.

    Every point has its time, and none an MFU that would be another batch's.
    """
    lengths = packings(full=True)[:30]
    rows = iter(lengths * 2)

    def drawn(batch: Batch) -> Tensor:
        return torch.tensor([0, *next(rows)]).cumsum(0).int()

    logger = Recorder()
    data = DataLoader(
        Batches([{"input_ids": torch.randint(WORDS, (1, 64))} for _ in lengths]), batch_size=None
    )
    fit(
        Packed(clock, drawn), watching(hardware=CHIP), data=data, logger=logger, log_every_n_steps=1
    )
    points = [
        given
        for given in logger.given.values()
        if "lflops·train·step_ms" in given and "lflops·train·forward_ms" not in given
    ]
    assert len(points) > 10
    assert not any("lflops·train·mfu" in given for given in points)


def test_lengths_are_read_on_the_host_before_the_transfer() -> None:
    """On the device nothing is read, which would be to wait for it.

    Here the device is meta, where to read raises.
    """
    batch = batch_of([3, 5, 2], "cu_seqlens")
    there = {name: tensor.to("meta") for name, tensor in batch.items()}
    host = HostBatch()
    assert {} == host.of(there)
    host.enter("transfer", (batch,))
    assert {"cu_seqlens": 9 + 25 + 4} == host.of(there)
    host.forget()
    assert {} == host.of(there)


MEANINGS: dict[str, tuple[Any, dict[str, int]]] = {
    "offsets": ({"cu_seq_lens_q": torch.tensor([0, 3, 8])}, {"cu_seq_lens_q": 9 + 25}),
    "offsets without a name": ((torch.zeros(8, 4), torch.tensor([0, 3, 8])), {"1": 9 + 25}),
    "lengths": ({"seq_lens": torch.tensor([3, 5])}, {"seq_lens": 9 + 25}),
    "positions in two rows": (
        {"position_ids": torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])},
        {"position_ids": 9 + 1 + 1 + 9},
    ),
    "documents": ({"doc_ids": torch.tensor([[4, 4, 7, 7], [1, 1, 1, 1]])}, {"doc_ids": 4 + 4 + 16}),
    "a padding mask": (
        {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])},
        {"attention_mask": 9 + 4},
    ),
    "a mask that numbers sequences": (
        {"attention_mask": torch.tensor([[1, 1, 2, 0]])},
        {"attention_mask": 4 + 1},
    ),
    "within": ({"inputs": {"cu_seqlens": torch.tensor([0, 2])}}, {"inputs.cu_seqlens": 4}),
    "a jagged tensor": (
        [torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(5, 2)], layout=torch.jagged)],
        {"0.cu_seqlens": 9 + 25},
    ),
    "nothing": ({"x": torch.zeros(3), "y": torch.tensor([5, 1, 4]), "name": "text"}, {}),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_what_a_batch_tells_of_its_lengths(case: str) -> None:
    """The sum of their squares, by where it was found."""
    batch, expected = MEANINGS[case]
    assert expected == lengths_of(BatchReader().read(batch))

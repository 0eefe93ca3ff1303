"""Estimates from few of many equal blocks are those of the whole model, in every field."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lflops.estimation.equal_blocks import folds_of, run_alike
from lflops.estimation.estimate import Estimator, Subject
from lflops.flop_counter.memory_record import Birth, MemoryRecord
from lflops.model.module_tree import blocks_in
from lflops.profile.profile import Profile

BLOCKS = 12
WIDTH = 8
FLOAT = 4


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The residual of the two layers."""
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """An embedding, equal blocks, and a head."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        """One block after the other."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TakesNumbers(Net):
    """The parent does something else for one block in the middle."""

    def forward(self, ids: Tensor) -> Tensor:
        """The seventh block gets twice its input."""
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(2 * x if number == 7 else x)
        return self.head(x)


class Skips(Net):
    """The second half gets what the first half left."""

    def forward(self, ids: Tensor) -> Tensor:
        """As in a U-Net."""
        x = self.embedding(ids)
        left = []
        for number, block in enumerate(self.blocks):
            if number >= BLOCKS // 2:
                x = x + left.pop()
            x = block(x)
            if number < BLOCKS // 2:
                left.append(x)
        return self.head(x)


class OneIsWider(Net):
    """One block has another setting."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].norm = nn.LayerNorm(WIDTH, eps=1e-3)


def run(build: Callable[[], nn.Module], *, unrolls: bool, **options: Any) -> Profile:
    """A training step of two sequences of six tokens."""
    ids = torch.zeros(2, 6, dtype=torch.long)

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    how = {"optimizer": "adamw", "hardware": "H100 SXM", **options}
    estimator = Estimator(caller="test", backward=True, unrolls=unrolls, **how)
    profile = estimator.run(lambda: Subject(build(), (ids,), {}, loss))
    return replace(profile, run=replace(profile.run, created=""))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="lists"),
        pytest.param({"hardware": None}, id="one parameter after the other"),
        pytest.param({"optimizer": "sgd", "round_to": 512}, id="rounded"),
        pytest.param({"optimizer": None, "allocator": "expandable_segments:True"}, id="segments"),
        pytest.param({"in_backward": True}, id="optimizer in backward"),
        pytest.param({"grad_scaler": True}, id="scaled"),
        pytest.param({"mesh": {"data": 4}}, id="FSDP2"),
        pytest.param({"mesh": {"replica": 2, "data": 2}}, id="HSDP"),
        pytest.param({"mesh": {"data": 4}, "offload": True}, id="offloaded"),
        pytest.param({"mesh": {"replica": 4}}, id="DDP"),
    ],
)
def test_the_estimate_from_few_blocks_is_that_of_all(options: dict[str, Any]) -> None:
    """Work, memory, the timeline and the allocator."""
    assert run(Net, unrolls=True, **options) == run(Net, unrolls=False, **options)


@pytest.mark.parametrize("build", [TakesNumbers, Skips, OneIsWider])
def test_a_model_whose_blocks_differ_runs_as_a_whole(build: Callable[[], nn.Module]) -> None:
    """Nothing is repeated that does not repeat."""
    assert run(build, unrolls=True) == run(build, unrolls=False)


@pytest.mark.parametrize(("build", "alike"), [(Net, True), (TakesNumbers, False), (Skips, False)])
def test_stand_ins_show_whether_blocks_are_called_alike(
    build: Callable[[], nn.Module], alike: bool
) -> None:
    """Their inputs, their order, and what runs between them."""
    model = build()
    (fold,) = folds_of(blocks_in(model))
    assert (fold.container, fold.first, fold.length) == ("blocks", 0, BLOCKS)
    forward = model.blocks[3].forward
    ids = torch.zeros(2, 6, dtype=torch.long)
    assert run_alike(model, lambda: model(ids), fold) is alike
    assert model.blocks[3].forward == forward
    assert "forward" not in vars(model.blocks[3])


def test_only_equal_blocks_are_a_run() -> None:
    """Five, one with another setting, and six: none is long enough."""
    assert folds_of(blocks_in(OneIsWider())) == []


def test_parameters_of_all_blocks_are_there() -> None:
    """By hand: weights and biases of a block, and what is outside of them."""
    a_block = 2 * WIDTH + 2 * 4 * WIDTH * WIDTH + 4 * WIDTH + WIDTH
    found = run(lambda: Net(100), unrolls=True)
    assert found.modules[""].parameters == 100 * a_block + 50 * WIDTH + 50 * WIDTH + 50
    assert found.modules["blocks.99.up"].forward.macs == 12 * WIDTH * 4 * WIDTH
    assert found.modules["blocks"].forward.macs == 100 * 2 * 12 * WIDTH * 4 * WIDTH
    assert found.modules["blocks.57"].calls == 1
    assert found.memory is not None
    assert found.memory.by_category["parameters"] == FLOAT * found.modules[""].parameters


def test_a_record_s_peak_is_its_highest_moment() -> None:
    """10 bytes are alive, then 30, then 20 are freed, and 25 come: 35 are the peak."""
    births = [Birth(nbytes, "other", "make", "a", "forward") for nbytes in (10, 20, 25)]
    record = MemoryRecord(
        births=births,
        events=[0, 1, ~1, 2],
        moments=[("first", "a", "forward", 1), ("second", "b", "forward", 3)],
    )
    memory = record.memory()
    assert memory.peak_bytes == 35
    assert memory.peak_index == 1
    assert [moment.live_bytes for moment in memory.timeline] == [10, 10]
    assert [moment.highest_bytes for moment in memory.timeline] == [30, 35]
    assert record.peak_of_rows() == {"": 35, "a": 35, "b": 35}

"""Test that estimates from a few of many equal blocks equal estimates of the whole model.

All fields of the profiles are compared.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import lflops
from lflops.estimation.equal_blocks import WORTHWHILE, folds_of, run_alike
from lflops.estimation.estimate import Estimator, Subject
from lflops.flop_counter.memory_record import Birth, MemoryRecord
from lflops.model.module_tree import blocks_in
from lflops.profile.profile import Profile

# The fewest equal blocks of which an estimate leaves some out. It runs at most six of them.
BLOCKS = WORTHWHILE
# Number of a block that such an estimate leaves out.
LEFT_OUT = BLOCKS // 2
WIDTH = 8
FLOAT = 4

FUSED = partial(torch.optim.AdamW, fused=True)
"""An optimizer with one operator per step, so it is estimated faster than one with `foreach`."""


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        # Only one of the three has a bias, because FSDP2 makes each further parameter expensive.
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input."""
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """An embedding, equal blocks, and a head."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        """Call one block after the other."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(Block):
    """A block without a norm. In backward, it frees memory of both neighbours at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input."""
        return x + self.down(self.up(x).relu())


class WithoutNorms(Net):
    """A model of blocks without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(BLOCKS))


class Copied(Net):
    """A model whose blocks are deep copies, as in `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(BLOCKS))


class TakesNumbers(Net):
    """A model that doubles the input of one block in the middle."""

    def forward(self, ids: Tensor) -> Tensor:
        """Pass twice its input to one block."""
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(2 * x if number == LEFT_OUT else x)
        return self.head(x)


class Skips(Net):
    """A model whose second half also receives the results of the first half, as in a U-Net."""

    def forward(self, ids: Tensor) -> Tensor:
        """Add the input of each block of the first half to a block of the second half."""
        x = self.embedding(ids)
        left = []
        for number, block in enumerate(self.blocks):
            if number >= BLOCKS // 2:
                x = x + left.pop()
            x = block(x)
            if number < BLOCKS // 2:
                left.append(x)
        return self.head(x)


class Compares(Net):
    """A model that multiplies the results of all pairs of blocks.

    The number of pairs is quadratic in the number of blocks.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Add the sum of all products to the output."""
        x = self.embedding(ids)
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(x.mean())
        means = torch.stack(results)
        return self.head(x) + (means[:, None] * means).sum()


class OneIsWider(Net):
    """A model in which one block's norm has a different `eps`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[LEFT_OUT].norm = nn.LayerNorm(WIDTH, eps=1e-3, bias=False)


def run(build: Callable[[], nn.Module], *, unrolls: bool, **options: Any) -> Profile:
    """Estimate a training step of two sequences of six tokens."""
    ids = torch.zeros(2, 6, dtype=torch.long)

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    how = {"optimizer": FUSED, "hardware": "H100 SXM", **options}
    estimator = Estimator(caller="test", backward=True, unrolls=unrolls, **how)
    profile = estimator.run(lambda: Subject(build(), (ids,), {}, loss))
    return replace(profile, run=replace(profile.run, created=""))


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which an estimate fails if it runs the whole model."""

    def forbid() -> None:
        monkeypatch.setattr(Estimator, "_whole", lambda *_: pytest.fail("the whole model ran"))

    return forbid


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimizer": "adamw"}, id="lists"),
        pytest.param({"optimizer": "adamw", "hardware": None}, id="one parameter after the other"),
        pytest.param({"optimizer": "sgd", "round_to": 512}, id="rounded"),
        pytest.param({"optimizer": None, "allocator": "expandable_segments:True"}, id="segments"),
        pytest.param({"optimizer": "adamw", "in_backward": True}, id="optimizer in backward"),
        pytest.param({"grad_scaler": True}, id="scaled"),
        pytest.param({"optimizer": "adamw", "mesh": {"data": 4}}, id="FSDP2"),
        pytest.param({"mesh": {"replica": 2, "data": 2}}, id="HSDP"),
        pytest.param({"mesh": {"data": 4}, "offload": True}, id="offloaded"),
    ],
)
def test_the_estimate_from_few_blocks_is_that_of_all(
    options: dict[str, Any], never_whole: Callable[[], None]
) -> None:
    """The estimate has the work, memory, timeline and allocator figures of the whole model.

    It never runs the whole model.
    """
    whole = run(Net, unrolls=False, **options)
    never_whole()
    assert run(Net, unrolls=True, **options) == whole


@pytest.mark.parametrize("mesh", [{}, {"data": 4}], ids=["one GPU", "FSDP2"])
@pytest.mark.parametrize("build", [WithoutNorms, Copied])
def test_only_a_few_blocks_run(
    build: Callable[[], nn.Module], mesh: dict[str, int], never_whole: Callable[[], None]
) -> None:
    """Blocks without a norm and blocks that are copies are estimated from a few blocks as well."""
    whole = run(build, unrolls=False, mesh=mesh)
    never_whole()
    assert run(build, unrolls=True, mesh=mesh) == whole


def test_all_blocks_run_under_ddp() -> None:
    """With DDP, whose buckets hold parameters of several blocks, the whole model is estimated."""
    mesh = {"replica": 4}
    assert run(Net, unrolls=True, mesh=mesh) == run(Net, unrolls=False, mesh=mesh)


@pytest.mark.parametrize("build", [TakesNumbers, Skips, Compares, OneIsWider])
def test_a_model_whose_blocks_differ_runs_as_a_whole(build: Callable[[], nn.Module]) -> None:
    """If the blocks differ or depend on each other, the estimate runs all of them."""
    assert run(build, unrolls=True) == run(build, unrolls=False)


@pytest.mark.parametrize(("build", "alike"), [(Net, True), (TakesNumbers, False), (Skips, False)])
def test_stand_ins_show_whether_blocks_are_called_alike(
    build: Callable[[], nn.Module], alike: bool
) -> None:
    """Stand-ins compare the blocks' inputs, their order and the code that runs between them.

    Afterwards each block has its own `forward` again.
    """
    model = build()
    (fold,) = folds_of(blocks_in(model))
    assert (fold.container, fold.first, fold.length) == ("blocks", 0, BLOCKS)
    forward = model.blocks[3].forward
    ids = torch.zeros(2, 6, dtype=torch.long)
    assert run_alike(model, lambda: model(ids), fold) is alike
    assert model.blocks[3].forward == forward
    assert "forward" not in vars(model.blocks[3])


def test_a_module_is_not_changed() -> None:
    """An estimate does not change the blocks, their names, their attributes or their gradients."""
    model = Net()
    before = dict(model.named_modules())
    attributes = {name: set(vars(module)) for name, module in before.items()}
    ids = torch.zeros(2, 6, dtype=torch.long)
    found = lflops.estimate(model, ids, backward=True, optimizer="adamw", hardware="H100 SXM")
    assert found.modules[f"blocks.{BLOCKS - 1}"].calls == 1
    after = dict(model.named_modules())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert attributes == {name: set(vars(module)) for name, module in after.items()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_only_equal_blocks_are_a_run() -> None:
    """Five and four equal blocks, separated by a different block, are too few to fold."""
    assert folds_of(blocks_in(OneIsWider())) == []


def test_parameters_of_all_blocks_are_there() -> None:
    """An estimate of 100 blocks includes the parameters and the work of all of them.

    The expected numbers are worked out by hand from the weights and biases of a block, the
    embedding and the head.
    """
    a_block = WIDTH + 2 * 4 * WIDTH * WIDTH + 4 * WIDTH
    found = run(lambda: Net(100), unrolls=True)
    assert found.modules[""].parameters == 100 * a_block + 50 * WIDTH + 50 * WIDTH + 50
    assert found.modules["blocks.99.up"].forward.macs == 12 * WIDTH * 4 * WIDTH
    assert found.modules["blocks"].forward.macs == 100 * 2 * 12 * WIDTH * 4 * WIDTH
    assert found.modules["blocks.57"].calls == 1
    assert found.memory is not None
    assert found.memory.by_category["parameters"] == FLOAT * found.modules[""].parameters


def test_a_record_s_peak_is_its_highest_moment() -> None:
    """The peak is the highest moment, also between two operators.

    10 bytes are alive, then 30; then 20 are freed and 25 are allocated, so the peak is 35.
    """
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

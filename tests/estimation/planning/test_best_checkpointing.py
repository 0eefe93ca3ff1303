"""Test the choice of blocks to recompute.

It is compared with every other choice, and with estimates of the chosen model.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lflops
from lflops.estimation.changes import POLICIES, Policy, checkpointed, recomputable
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.planning.block_chain import Chain, cheapest_choice, lowest_peak
from lflops.estimation.planning.block_trials import (
    BlockTrials,
    Fold,
    folds_of,
    memory_of,
    policies_of,
)
from lflops.memory.peak import USABLE, memory_fit, memory_fit_of

ROWS = 32
HIDDEN = 8


class Block(nn.Module):
    """An MLP of a given width beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Narrowing(nn.Module):
    """A block that keeps neither its input nor its result for backward, although a neighbor may."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReLU(), nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def squared(out: Tensor) -> Tensor:
    """Return the mean square of the output, as a loss."""
    return out.square().mean()


def rows() -> Tensor:
    """Return a batch."""
    return torch.zeros(ROWS, HIDDEN)


def stack(kind: type[nn.Module], widths: Sequence[int]) -> nn.Sequential:
    """Build blocks between two linear layers."""
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), *(kind(width) for width in widths), nn.Linear(HIDDEN, HIDDEN)
    )


class Tried:
    """A chain computed from trials, and the peaks of whole estimates to compare it with."""

    def __init__(self, build: Callable[[], nn.Module], *, fold: bool = False, **how: Any) -> None:
        self.model = build()
        estimator = Estimator(caller="test", backward=True, **how)
        with estimator.started() as run:
            trials = BlockTrials(
                estimator, run, lambda: Subject(self.model, (rows(),), {}, squared)
            )
            found = trials.chain(fold=fold)
        assert found is not None
        self.chain: Chain = found
        self.units = trials.units
        self.made = trials.made
        self.how = how

    def peak(self, choices: Sequence[Policy]) -> int:
        """Return the peak of a whole estimate in which each block has the given policy."""
        policies = policies_of(self.units, choices)
        with checkpointed({name: self.model.get_submodule(name) for name in policies}, policies):
            return memory_of(
                lflops.estimate(self.model, rows(), backward=True, loss=squared, **self.how)
            ).peak_bytes


def test_every_choice_has_the_peak_that_the_chain_says() -> None:
    """For all 27 choices of three blocks, the chain's peak is exact to the byte.

    A tensor between two blocks is kept if either of them keeps it.
    """
    tried = Tried(lambda: stack(Narrowing, (64, 160, 96)))
    some = list(product(POLICIES, repeat=3))
    assert {each: tried.peak(each) for each in some} == {
        each: tried.chain.peak(each) for each in some
    }


def test_the_choice_for_twelve_blocks_is_the_best_of_all() -> None:
    """The choice is the cheapest of all 4,096, at budgets from the lowest peak to the highest.

    The costs are worked out by hand: a block recomputes its first matmul, the bias and the ReLU,
    and for each row and each element of its width they are 8 MACs and two other operations. Some
    choices are compared with whole estimates.
    """
    widths = [64 * (3 + 5 * place % 12) for place in range(12)]
    tried = Tried(lambda: stack(Block, widths), optimizer=partial(torch.optim.SGD, lr=0.1))
    chain, both = tried.chain, ("none", "full")
    by_hand = [ROWS * width * (2 * HIDDEN + 2) for width in widths]
    peaks = {each: chain.peak(each) for each in product(both, repeat=12)}
    costs = {}
    for choices in peaks:
        recomputed = [policy == "full" for policy in choices]
        costs[choices] = sum(compress(by_hand, recomputed))
    lowest = min(peaks.values())
    highest = max(peaks.values())
    assert lowest == lowest_peak(chain, both)
    assert highest == chain.peak(["none"] * 12)
    assert cheapest_choice(chain, both, lowest - 1) is None
    for budget in range(lowest, highest + 1, (highest - lowest) // 7):
        found = cheapest_choice(chain, both, budget)
        assert found is not None
        assert peaks[found] <= budget
        assert min(cost for each, cost in costs.items() if peaks[each] <= budget) == costs[found]
    mixed: list[Policy] = ["full", "none", "none", "selective"]
    assert tried.peak(mixed * 3) == chain.peak(mixed * 3)
    assert found is not None
    assert tried.peak(found) == chain.peak(found)


def test_a_deep_model_is_tried_with_fewer_blocks() -> None:
    """Trials with six of ten equal blocks give the same peaks as whole estimates.

    An eleventh, different block precedes the ten. Afterwards the model has all its blocks again.
    """
    short = Tried(
        lambda: stack(Block, (512, *[128] * 10)),
        fold=True,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
    )
    assert [(str(number),) for number in range(1, 12)] == short.units
    assert [str(number) for number in range(13)] == [
        name for name, _ in short.model.named_children()
    ]
    mixed: list[Policy] = ["full", *["none", "none", "full", "selective", "full"] * 2]
    for choices in (mixed, *([each] * 11 for each in POLICIES)):
        assert short.peak(choices) == short.chain.peak(choices)


def test_what_differs_is_not_taken_for_alike() -> None:
    """A different width, a different setting or a missing number ends a run of equal blocks.

    An attribute that counts the blocks does not end it.
    """
    blocks = {str(number): Block(64) for number in range(40)}
    for number, block in blocks.items():
        block.index = int(number)  # type: ignore[assignment]
    assert [Fold("", 0, 40)] == folds_of(blocks)
    assert range(3, 37) == folds_of(blocks)[0].removed
    blocks["12"] = Block(65)
    blocks["30"].dropout = 0.5  # type: ignore[assignment]
    assert [Fold("", 0, 12), Fold("", 13, 17)] == folds_of(blocks)
    del blocks["6"]
    assert [Fold("", 13, 17)] == folds_of(blocks)


def test_the_plan_fits_and_its_code_does_what_it_says() -> None:
    """The plan fits, and its code, if pasted, builds the model that was estimated.

    The passed model is unchanged.
    """
    widths = (128, 512, 256)
    model = stack(Block, widths)
    attributes = [set(vars(each)) for each in model]
    none = estimated(model, "none")
    full = estimated(model, "full")
    plan = lflops.best_checkpointing(model, rows(), memory_bytes=none - 1, loss=squared)
    assert plan.fits
    assert full <= plan.predicted_bytes == plan.peak_bytes < none
    assert [none, full] == [
        each.peak_bytes for each in plan.alternatives if each.policy in {"none", "full"}
    ]
    assert attributes == [set(vars(each)) for each in model]
    # To recompute the narrowest block is enough: 128 numbers for each of 32 rows.
    assert {"1": "full", "2": "none", "3": "none"} == dict(plan.policies)
    assert ROWS * (2 * HIDDEN + 2) * 128 == plan.alternatives[-1].flops
    exec(plan.code(), {"model": model})  # noqa: S102 - users paste this code
    assert plan.peak_bytes == estimated(model, "none")
    assert "fits: " in plan.table()


def test_a_budget_that_nothing_fits_gives_the_lowest_peak() -> None:
    """If no choice fits, the plan has the lowest peak, and its table says so."""
    model = stack(Block, (128, 512))
    plan = lflops.best_checkpointing(model, rows(), memory_bytes=1, loss=squared)
    assert not plan.fits
    assert plan.peak_bytes == min(each.peak_bytes for each in plan.alternatives)
    assert "does not fit: " in plan.table()
    assert plan.table().endswith("No other choice has a lower peak.")


def test_a_chip_has_one_verdict() -> None:
    """The plan has the same verdict as an estimate of its profile on the chip.

    In particular, a lowest peak that is tight is not reported as one that does not fit.
    """
    model = stack(Block, (128, 512))
    lowest = lflops.best_checkpointing(model, rows(), memory_bytes=1, loss=squared).peak_bytes
    needed = memory_fit(
        lowest, lflops.Hardware(name="any", peak_flops_per_second={"bf16": 1e12}, memory_bytes=1e12)
    )
    assert needed is not None
    for share, verdict in ((0.9, "fits"), (0.97, "tight"), (1.1, "does not fit")):
        memory_bytes = needed.needed_bytes / share / USABLE
        chip = lflops.Hardware(
            name="small", peak_flops_per_second={"bf16": 1e12}, memory_bytes=memory_bytes
        )
        plan = lflops.best_checkpointing(model, rows(), loss=squared, hardware=chip)
        found = memory_fit_of(plan.profile, chip)
        assert found is not None
        assert verdict == found.verdict
        assert plan.fits == (verdict == "fits")
        last_line = plan.table().splitlines()[-1]
        if plan.fits:
            assert last_line.startswith(f"{verdict}: ")
        else:
            assert last_line.startswith(f"{verdict}: ")
            assert last_line.endswith("No other choice has a lower peak.")


def estimated(model: nn.Module, policy: Policy) -> int:
    """Return the peak with one policy for all blocks."""
    blocks = recomputable("test", model)
    with checkpointed(blocks, dict.fromkeys(blocks, policy)):
        return memory_of(lflops.estimate(model, rows(), backward=True, loss=squared)).peak_bytes


def keep_some(_: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save matmuls and recompute all other operators, as a policy for torch."""
    if operator is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """A block under a selective checkpointing policy."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.body = Block(512)
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            self.body,
            x,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, self.policy),
        )


@pytest.mark.parametrize(
    "policy",
    [
        keep_some,
        [torch.ops.aten.relu.default],
        [torch.ops.aten.addmm.default, torch.ops.aten.relu.default],
    ],
)
def test_an_estimate_under_a_policy_of_torchs_is_what_a_real_step_keeps(policy: Any) -> None:
    """With a policy of torch, an estimate has the live bytes of a real step at each moment.

    If the policy does not save matmuls, a block's first matmul, 512 wide, runs again.
    """
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *(Selective(policy) for _ in range(3)))
    found = lflops.estimate(model, rows(), backward=True, loss=squared)
    real = lflops.count(model, rows(), backward=True, loss=squared)
    real_bytes = [moment.live_bytes for moment in memory_of(real).timeline]
    found_bytes = [moment.live_bytes for moment in memory_of(found).timeline]
    assert real_bytes == found_bytes
    saves_matmuls = policy is keep_some or torch.ops.aten.addmm.default in policy
    again = 0 if saves_matmuls else 3 * ROWS * HIDDEN * 512
    assert again == found.total(phase="recompute")
    assert again == real.total(phase="recompute")


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "no budget": ({}, "pass memory_bytes=, or hardware= with a chip whose memory is known"),
    "no size": ({"memory_bytes": "40GB"}, "memory_bytes='40GB': pass a positive number of bytes"),
    "no blocks": (
        {"model": nn.Sequential(nn.Linear(HIDDEN, 3)), "memory_bytes": 1e9},
        "Sequential has no blocks",
    ),
    "no module": ({"model": 3, "memory_bytes": 1e9}, "3 is not a torch.nn.Module"),
    "a mesh of what is built": (
        {"mesh": {"data": 2}, "memory_bytes": 1e9},
        "pass a function that builds the model",
    ),
}


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(given: dict[str, Any], said: str) -> None:
    """The error contains the wrong argument and the accepted values."""
    with pytest.raises(lflops.CountError, match=r"^best_checkpointing: ") as caught:
        lflops.best_checkpointing(**{"model": stack(Block, [64]), "args": rows()} | given)
    assert said in str(caught.value)


def test_a_chip_gives_its_memory_and_counts_time() -> None:
    """A chip sets the memory budget and gives the time of recomputation.

    On a chip of 80 GB a small model recomputes nothing, so this time is 0.
    """
    plan = lflops.best_checkpointing(
        stack(Block, [64, 64]), rows(), loss=squared, hardware="NVIDIA H100 80GB HBM3"
    )
    assert plan.fits
    assert {"1": "none", "2": "none"} == dict(plan.policies)
    assert 0.0 == plan.alternatives[-1].seconds
    assert 60e9 < plan.memory_bytes < 80e9
    assert "# nothing to recompute\n" == plan.code()

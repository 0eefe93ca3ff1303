"""What activation checkpointing runs again: apart from backward, and its module's own."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lflops
from lflops import Profile
from tests.support.processes import Scenario, anywhere, as_a_device_would
from tests.support.profile_checks import calls, flops, macs
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.body = body
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Functional(nn.Module):
    """Products that are no module's, within a function without a name."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, wide))
        self.down = nn.Parameter(torch.randn(wide, hidden))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda x: torch.relu(x @ self.up) @ self.down, x, use_reentrant=self.reentrant
        )


either_way = pytest.mark.parametrize("reentrant", [False, True])


@either_way
def test_recomputation_is_apart_from_backward(reentrant: bool) -> None:
    """Forward once, backward as without checkpoint.

    Recomputation without reentry stops before the last product, which nobody needs.
    """
    profile = lflops.count(
        between_linears(Checkpointed(Block(), reentrant=reentrant)), sequence(), backward=True
    )
    assert {"0": square, "1.body.up": up, "1.body.down": down, "2": square} == macs(
        profile, "forward"
    )
    assert {"1.body.up": up, **({"1.body.down": down} if reentrant else {})} == macs(
        profile, "recompute"
    )
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
    assert {"": 1, "0": 1, "1": 1, "1.body": 1, "1.body.up": 1, "1.body.down": 1, "2": 1} == calls(
        profile
    )


@either_way
def test_recomputation_outside_of_a_module_is_its_checkpoints(reentrant: bool) -> None:
    """A function of products belongs to the module that checkpoints it, in every phase."""
    profile = lflops.count(
        between_linears(Functional(reentrant=reentrant)), sequence(), backward=True
    )
    assert {"0": square, "1": up + down, "2": square} == macs(profile, "forward")
    assert {"1": up + (down if reentrant else 0)} == macs(profile, "recompute")
    assert {"0": square, "1": 2 * (up + down), "2": 2 * square} == macs(profile, "backward")


@either_way
def test_recomputation_outside_of_every_module_is_the_roots(reentrant: bool) -> None:
    """As in a training step that checkpoints a function of its own."""
    model = nn.Linear(hidden, hidden)
    weight = torch.randn(hidden, wide, requires_grad=True)
    with lflops.counting(model) as counted:
        y = checkpoint(
            lambda x: torch.sigmoid(x @ weight), model(sequence()), use_reentrant=reentrant
        )
        y.sum().backward()
    assert {"": square + up} == macs(counted.profile, "forward")
    assert {"": up} == macs(counted.profile, "recompute")
    assert {"": square + 2 * up} == macs(counted.profile, "backward")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@either_way
def test_a_checkpoint_within_a_checkpoint_is_recomputed_twice(reentrant: bool) -> None:
    """Once when the outer one is, to go on from, and once for itself.

    Without reentry each stops before its last product.
    """
    inner = between_linears(Checkpointed(Block(), reentrant=reentrant))
    model = nn.Sequential(nn.Linear(hidden, hidden), Checkpointed(inner, reentrant=reentrant))
    profile = lflops.count(model, sequence(), backward=True)
    forward = {
        "0": square,
        "1.body.0": square,
        "1.body.1.body.up": up,
        "1.body.1.body.down": down,
        "1.body.2": square,
    }
    assert forward == macs(profile, "forward")
    again = {"1.body.0": square, "1.body.1.body.up": 2 * up, "1.body.1.body.down": down}
    if reentrant:
        again |= {"1.body.1.body.down": 2 * down, "1.body.2": square}
    assert again == macs(profile, "recompute")
    assert {row: cost if row == "0" else 2 * cost for row, cost in forward.items()} == macs(
        profile, "backward"
    )


@either_way
def test_a_module_that_is_checkpointed_itself_has_its_own_work(reentrant: bool) -> None:
    """Not only that of the modules below it.

    Backward belongs to the layer, and nothing to the module that checkpoints it.
    """
    profile = lflops.count(
        between_linears(Checkpointed(nn.Linear(hidden, hidden), reentrant=reentrant)),
        sequence(),
        backward=True,
    )
    assert {"0": square, "1.body": 2 * square, "2": 2 * square} == macs(profile, "backward")


def test_a_checkpoint_wrapper_is_no_level_of_the_model() -> None:
    """Names and calls are those of the model without it."""
    profile = lflops.count(between_linears(checkpoint_wrapper(Block())), sequence(), backward=True)
    assert {"1.up": up} == macs(profile, "recompute")
    assert {"0": square, "1.up": 2 * up, "1.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
    assert {"": 1, "0": 1, "1": 1, "1.up": 1, "1.down": 1, "2": 1} == calls(profile)


class Selective(nn.Module):
    """Keeps the results of products, and computes what is between them again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()

    def forward(self, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(self.body, x, use_reentrant=False, context_fn=kept)


def test_a_selective_checkpoint_recomputes_only_what_it_did_not_keep() -> None:
    """The ReLU, which is the block's own; no product runs again."""
    profile = lflops.count(between_linears(Selective()), sequence(), backward=True)
    assert {} == macs(profile, "recompute")
    assert {"1.body": tokens * wide} == flops(profile, "recompute")
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )


class Handmade(torch.autograd.Function):
    """A checkpoint as libraries write their own."""

    @staticmethod
    def forward(ctx: Any, body: nn.Module, x: Tensor) -> Tensor:
        ctx.body = body
        ctx.save_for_backward(x)
        with torch.no_grad():
            return body(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.body(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class HandmadeCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block()

    def forward(self, x: Tensor) -> Tensor:
        return Handmade.apply(self.body, x)


def test_modules_called_in_backward_are_recomputation_whoever_calls_them() -> None:
    """Not torch's own checkpoint alone."""
    profile = lflops.count(between_linears(HandmadeCheckpoint()), sequence(), backward=True)
    assert {"0": square, "1.body.up": up, "1.body.down": down, "2": square} == macs(
        profile, "forward"
    )
    assert {"1.body.up": up, "1.body.down": down} == macs(profile, "recompute")
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )


def test_every_operation_of_a_checkpoint_is_counted_once() -> None:
    """Bias and ReLU: an operation an element forward; the hidden ones again in recomputation."""
    profile = lflops.count(
        between_linears(Checkpointed(Block(), reentrant=False)), sequence(), backward=True
    )
    assert {
        "0": 2 * square + tokens * hidden,
        "1.body": tokens * wide,
        "1.body.up": 2 * up + tokens * wide,
        "1.body.down": 2 * down + tokens * hidden,
        "2": 2 * square + tokens * hidden,
    } == flops(profile, "forward")
    assert {"1.body": tokens * wide, "1.body.up": 2 * up + tokens * wide} == flops(
        profile, "recompute"
    )


def steps_with_backward_elsewhere(reentrant: bool) -> Profile:
    """Two steps of a model with two checkpoints; the backward passes run on one other thread."""
    model = between_linears(
        nn.Sequential(Checkpointed(Block(), reentrant=reentrant), Functional(reentrant=reentrant))
    )
    with ThreadPoolExecutor(1) as device, lflops.counting(model) as counted:
        for _ in range(2):
            loss = model(sequence()).sum()
            as_a_device_would(device, loss.backward)
    return counted.profile


def reentrant_checkpoints_elsewhere() -> Profile:
    """Recomputation is a backward pass within the backward pass."""
    return steps_with_backward_elsewhere(reentrant=True)


def other_checkpoints_elsewhere() -> Profile:
    """Recomputation is part of fetching what backward needs."""
    return steps_with_backward_elsewhere(reentrant=False)


@anywhere
@pytest.mark.parametrize("scenario", [reentrant_checkpoints_elsewhere, other_checkpoints_elsewhere])
def test_a_device_thread_changes_nothing(run: Any, scenario: Scenario) -> None:
    """Recomputation there numbers its nodes as that thread does.

    They are not taken for those of forward with the same number.
    """
    profile = run(scenario)
    stops = scenario is other_checkpoints_elsewhere
    forward = {"0": square, "1.0.body.up": up, "1.0.body.down": down, "1.1": up + down, "2": square}
    again = (
        {"1.0.body.up": up, "1.1": up}
        if stops
        else {"1.0.body.up": up, "1.0.body.down": down, "1.1": up + down}
    )
    assert {row: 2 * cost for row, cost in forward.items()} == macs(profile, "forward")
    assert {row: 2 * cost for row, cost in again.items()} == macs(profile, "recompute")
    assert {row: (2 if row == "0" else 4) * cost for row, cost in forward.items()} == macs(
        profile, "backward"
    )

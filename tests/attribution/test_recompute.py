"""Test that recomputation of activation checkpoints is separate from backward.

Recomputed work is counted in the phase recompute, in the module that runs again.
"""

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
    """A module that checkpoints a lambda with two matmuls, which belong to no submodule."""

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
    """Recomputed MACs are in the phase recompute; forward and backward are as without a checkpoint.

    Non-reentrant recomputation stops before the last matmul, because backward does not need its
    result.
    """
    profile = lflops.count(
        between_linears(Checkpointed(Block(), reentrant=reentrant)), sequence(), backward=True
    )
    assert {"0": square, "1.body.up": up, "1.body.down": down, "2": square} == macs(
        profile, "forward"
    )
    again = {"1.body.up": up}
    if reentrant:
        again["1.body.down"] = down
    assert again == macs(profile, "recompute")
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
    assert {"": 1, "0": 1, "1": 1, "1.body": 1, "1.body.up": 1, "1.body.down": 1, "2": 1} == calls(
        profile
    )


@either_way
def test_recomputation_outside_of_a_module_is_its_checkpoints(reentrant: bool) -> None:
    """In every phase, matmuls of a checkpointed function belong to the checkpointing module."""
    profile = lflops.count(
        between_linears(Functional(reentrant=reentrant)), sequence(), backward=True
    )
    assert {"0": square, "1": up + down, "2": square} == macs(profile, "forward")
    assert {"1": up + (down if reentrant else 0)} == macs(profile, "recompute")
    assert {"0": square, "1": 2 * (up + down), "2": 2 * square} == macs(profile, "backward")


@either_way
def test_recomputation_outside_of_every_module_is_the_roots(reentrant: bool) -> None:
    """Recomputation of a function belongs to the root if no module checkpoints the function.

    A training step may checkpoint a function in this way.
    """
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
    """The inner checkpoint runs again twice.

    It runs once when the outer checkpoint is recomputed, and once for its own backward. Without
    reentry, each recomputation stops before its last matmul.
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
    backward = {row: 2 * cost for row, cost in forward.items()}
    # The input of the first layer needs no gradient.
    backward["0"] = square
    assert backward == macs(profile, "backward")


@either_way
def test_a_module_that_is_checkpointed_itself_has_its_own_work(reentrant: bool) -> None:
    """The backward of a checkpointed layer belongs to the layer, not to its parent.

    Here the checkpointed module has no submodules, so the work is its own.
    """
    profile = lflops.count(
        between_linears(Checkpointed(nn.Linear(hidden, hidden), reentrant=reentrant)),
        sequence(),
        backward=True,
    )
    assert {"0": square, "1.body": 2 * square, "2": 2 * square} == macs(profile, "backward")


def test_a_checkpoint_wrapper_is_no_level_of_the_model() -> None:
    """`checkpoint_wrapper` adds no level: names and calls are as in the model without it."""
    profile = lflops.count(between_linears(checkpoint_wrapper(Block())), sequence(), backward=True)
    assert {"1.up": up} == macs(profile, "recompute")
    assert {"0": square, "1.up": 2 * up, "1.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )
    assert {"": 1, "0": 1, "1": 1, "1.up": 1, "1.down": 1, "2": 1} == calls(profile)


class Selective(nn.Module):
    """A module that keeps the results of matmuls, and recomputes the operators between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()

    def forward(self, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(self.body, x, use_reentrant=False, context_fn=kept)


def test_a_selective_checkpoint_recomputes_only_what_it_did_not_keep() -> None:
    """Only the ReLU is recomputed, which belongs to the block itself; no matmul runs again."""
    profile = lflops.count(between_linears(Selective()), sequence(), backward=True)
    assert {} == macs(profile, "recompute")
    assert {"1.body": tokens * wide} == flops(profile, "recompute")
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )


class Handmade(torch.autograd.Function):
    """A checkpoint that does not use torch's checkpoint, as in some libraries."""

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
    """A module that is called during backward is recomputed, also without torch's checkpoint."""
    profile = lflops.count(between_linears(HandmadeCheckpoint()), sequence(), backward=True)
    assert {"0": square, "1.body.up": up, "1.body.down": down, "2": square} == macs(
        profile, "forward"
    )
    assert {"1.body.up": up, "1.body.down": down} == macs(profile, "recompute")
    assert {"0": square, "1.body.up": 2 * up, "1.body.down": 2 * down, "2": 2 * square} == macs(
        profile, "backward"
    )


def test_every_operation_of_a_checkpoint_is_counted_once() -> None:
    """Forward and recompute each count every operator once.

    Biases and the ReLU are one operation per element. Only the matmul up to the hidden layer, its
    bias and the ReLU are recomputed.
    """
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
    """Run two steps of a model with two checkpoints, with backward on another thread."""
    model = between_linears(
        nn.Sequential(Checkpointed(Block(), reentrant=reentrant), Functional(reentrant=reentrant))
    )
    with ThreadPoolExecutor(1) as device, lflops.counting(model) as counted:
        for _ in range(2):
            loss = model(sequence()).sum()
            as_a_device_would(device, loss.backward)
    return counted.profile


def reentrant_checkpoints_elsewhere() -> Profile:
    """Run the steps so that recomputation is a backward pass inside the backward pass."""
    return steps_with_backward_elsewhere(reentrant=True)


def other_checkpoints_elsewhere() -> Profile:
    """Run the steps so that recomputation happens when backward unpacks saved tensors."""
    return steps_with_backward_elsewhere(reentrant=False)


@anywhere
@pytest.mark.parametrize("scenario", [reentrant_checkpoints_elsewhere, other_checkpoints_elsewhere])
def test_a_device_thread_changes_nothing(run: Any, scenario: Scenario) -> None:
    """Backward on a device thread has the same counts as backward on the main thread.

    Recomputation on that thread numbers its autograd nodes separately. Nodes of forward may have
    the same numbers, but are not confused with them.
    """
    profile = run(scenario)
    forward = {"0": square, "1.0.body.up": up, "1.0.body.down": down, "1.1": up + down, "2": square}
    again = {"1.0.body.up": up, "1.0.body.down": down, "1.1": up + down}
    if scenario is other_checkpoints_elsewhere:
        # Recomputation stops before the last matmul of each checkpoint.
        again = {"1.0.body.up": up, "1.1": up}
    assert {row: 2 * cost for row, cost in forward.items()} == macs(profile, "forward")
    assert {row: 2 * cost for row, cost in again.items()} == macs(profile, "recompute")
    backward = {row: 4 * cost for row, cost in forward.items()}
    # The input of the first layer needs no gradient.
    backward["0"] = 2 * square
    assert backward == macs(profile, "backward")

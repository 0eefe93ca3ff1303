"""Blocks that run again in backward, because their activations were not kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Saves, Training, model_case


def with_block(
    clock: StillClock, block: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]
) -> Training:
    """Return a model that runs a block in a certain way, between two other parts."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(run(self.block, self.first(x)))

    return Training(Model(clock, first=Part(clock, 1, 2), block=block, last=Part(clock, 4, 8)))


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in a checkpoint."""
    return checkpoint(block, x, use_reentrant=False)


@model_case(
    forward={"0": 1, "0.layer": 4, "1": 16},
    backward={"0": 2, "0.layer": 8, "1": 32},
    recompute={"0.layer": 4},
)
def method_in_a_checkpoint(clock: StillClock) -> Training:
    """A module checkpoints its own method, of which only the call of a submodule runs again."""

    class Residual(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=False)

        def run(self, x: Tensor) -> Tensor:
            return x + self.take(self.layer(x), 1, 2)

    return Training(nn.Sequential(Residual(clock, layer=Saves(clock, 4, 8)), Part(clock, 16, 32)))


def nested(clock: StillClock, *, use_reentrant: bool) -> Training:
    """Return a model with a checkpoint in a checkpoint."""

    class Block(Itself):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.inner, x, use_reentrant=use_reentrant)
            return self.outer(x)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=use_reentrant)

    block = Block(clock, inner=Saves(clock, 16, 32), outer=Saves(clock, 64, 128))
    return with_block(clock, block, run)


@model_case(
    forward={"first": 1, "block.inner": 16, "block.outer": 64, "last": 4},
    backward={"first": 2, "block.inner": 32, "block.outer": 128, "last": 8},
    recompute={"block.inner": 16 + 16, "block.outer": 64},
)
def nested_checkpoints(clock: StillClock) -> Training:
    """The inner block runs again when the outer block does, and again in its own backward."""
    return nested(clock, use_reentrant=False)


@model_case(
    forward={"first": 1, "block.inner": 16, "block.outer": 64, "last": 4},
    backward={"first": 2, "block.inner": 32, "block.outer": 128, "last": 8},
    recompute={"block.inner": 16 + 16, "block.outer": 64},
)
def nested_reentrant_checkpoints(clock: StillClock) -> Training:
    """Both checkpoints are reentrant: they run a backward pass within the backward pass."""
    return nested(clock, use_reentrant=True)


class TwoOutputs(Itself):
    """A module whose second output has the newest node."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.take(x, 16, 32) * self.weight
        return first, self.take(x, 64, 128) * self.weight


@model_case(
    forward={"first": 1, "block": 16 + 64, "last": 4},
    backward={"first": 2, "block": 32 + 128, "last": 8},
    recompute={"block": 16 + 64},
)
def checkpoint_with_an_unused_output(clock: StillClock) -> Training:
    """A reentrant checkpoint runs backward for both outputs of its block, also for an unused one."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        used, _unused = checkpoint(block, x, use_reentrant=True)
        return used

    return with_block(clock, TwoOutputs(clock), run)


@model_case(
    forward={"first": 1, "block.two": 16 + 64, "block.layer": 256, "last": 4},
    backward={"first": 2, "block.two": 32, "block.layer": 512, "last": 8},
    recompute={"block.two": 16 + 64, "block.layer": 256},
)
def unused_output_within_a_checkpoint(clock: StillClock) -> Training:
    """Within a checkpoint, backward does not reach the newest node of a module."""

    class Block(Itself):
        def forward(self, x: Tensor) -> Tensor:
            used, _unused = self.two(x)
            return self.layer(used)

    block = Block(clock, two=TwoOutputs(clock), layer=Saves(clock, 256, 512))
    return with_block(clock, block, recomputed)


class EndsWithWork(Itself):
    """A module that takes time after the last operation whose tensors backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.clock.advance(64)
        return x


@model_case(
    forward={"first": 1, "block": 64, "block.layer": 16, "last": 4},
    backward={"first": 2, "block.layer": 32, "last": 8},
    recompute={"block.layer": 16},
)
def checkpoint_that_stops_early(clock: StillClock) -> Training:
    """A checkpoint stops as soon as it has computed all tensors that backward needs."""
    block = EndsWithWork(clock, layer=Saves(clock, 16, 32))
    return with_block(clock, block, recomputed)


@model_case(
    forward={"first": 1, "block": 64, "block.layer": 16, "last": 4},
    backward={"first": 2, "block.layer": 32, "last": 8},
    recompute={"block": 64, "block.layer": 16},
)
def checkpoint_that_runs_to_its_end(clock: StillClock) -> Training:
    """With `set_checkpoint_early_stop(False)`, the whole block runs again."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(enable=False):
            return recomputed(block, x)

    block = EndsWithWork(clock, layer=Saves(clock, 16, 32))
    return with_block(clock, block, run)


@model_case(
    forward={"first": 1, "block.0": 16, "block.2": 64, "last": 4},
    backward={"first": 2, "block.0": 32, "block.2": 128, "last": 8},
    recompute={"block.0": 16, "block.2": 64},
)
def selective_checkpoint(clock: StillClock) -> Training:
    """The results of matmuls are kept, and everything else runs again."""

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    block = nn.Sequential(Saves(clock, 16, 32), nn.Linear(4, 4), Saves(clock, 64, 128))
    return with_block(clock, block, run)


class Reversible(torch.autograd.Function):
    """Run a block without a graph, and build its graph in backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.block(x)
        inputs = (x, *ctx.block.parameters())
        return None, *torch.autograd.grad(output, inputs, gradients)


@model_case(
    forward={"first": 1, "block.0": 16, "block.1": 64, "last": 4},
    backward={"first": 2, "block.0": 32, "block.1": 128, "last": 8},
    recompute={"block.0": 16, "block.1": 64},
)
def reversible_block(clock: StillClock) -> Training:
    """A custom autograd function calls the modules again in its backward."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return Reversible.apply(block, x, *block.parameters())

    block = nn.Sequential(Saves(clock, 16, 32), Saves(clock, 64, 128))
    return with_block(clock, block, run)

"""Test how much memory checkpointing each block would save.

The tests use a model of two blocks and a head with round numbers, and a real model.
"""

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.memory.peak import Checkpointed, checkpointed
from lflops.profile.profile import Profile
from tests.support.profile_builders import product, profile, small_memory, weights

ROWS: dict[str, dict[str, Any]] = {
    "": weights(0, 1000),
    "layers": weights(0, 800),
    "layers.0": weights(0, 300),
    "layers.0.0": weights(300),
    "layers.1": weights(500),
    "head": weights(200),
}
FORWARD = (
    product("layers.0.0", "mm", "forward", macs=70, bytes_moved=1),
    product("layers.1", "mm", "forward", macs=90, bytes_moved=1),
)
CELLS = (*FORWARD, product("layers.1", "mm", "backward", macs=180, bytes_moved=1))


def planned() -> Profile:
    """Return a profile in which 5,000 of the live bytes are activations.

    The first block has 1,000 of them, its part 500, the second block 3,000 and the head 500.
    """
    memory = replace(
        small_memory(),
        by_category={
            "parameters": 4000,
            "optimizer_state": 8002,
            "gradients": 100,
            "activations": 5000,
            "temporary": 60,
            "other": 7,
        },
        activations_by_module={"layers.0": 1000, "layers.0.0": 500, "layers.1": 3000, "head": 500},
    )
    return profile(ROWS, CELLS, memory=memory)


def test_a_block_saves_what_was_made_in_it_and_costs_its_forward() -> None:
    """A checkpointed block saves the activations in it and below it, and costs its forward.

    A part of a block and the head are not blocks.
    """
    assert (
        Checkpointed(module="layers.1", saved_bytes=3000, macs=90, flops=180),
        Checkpointed(module="layers.0", saved_bytes=1500, macs=70, flops=140),
    ) == checkpointed(planned())


def test_without_a_backward_nothing_is_kept_for_it() -> None:
    """Without a backward pass checkpointing saves nothing."""
    assert () == checkpointed(profile(ROWS, FORWARD, memory=planned().memory))


def test_without_memory_nothing_is_known() -> None:
    """Without counted memory the result is empty, which does not mean a saving of 0."""
    assert () == checkpointed(profile(ROWS, CELLS))


class Deep(nn.Module):
    """Blocks whose activations are much larger than their results."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def test_checkpointing_every_block_comes_to_what_was_foretold() -> None:
    """The real saving with every block checkpointed is close to the predicted one.

    The blocks' results stay in memory, and so do two gradients inside the recomputed block. Its
    last matmul is not recomputed.
    """
    plain = lflops.estimate(Deep(again=False), torch.zeros(64, 8), backward=True)
    again = lflops.estimate(Deep(again=True), torch.zeros(64, 8), backward=True)
    assert plain.memory is not None
    assert again.memory is not None
    blocks = checkpointed(plain)
    assert [f"blocks.{place}" for place in range(6)] == sorted(each.module for each in blocks)
    most = sum(each.saved_bytes for each in blocks[1:])
    results = 6 * 64 * 8 * 4
    wide = 64 * 512 * 4
    saved = plain.memory.peak_bytes - again.memory.peak_bytes
    assert most - results - 2 * wide <= saved <= most
    assert sum(each.macs for each in blocks) == plain.total()
    assert plain.total() // 2 == again.total(phase="recompute")

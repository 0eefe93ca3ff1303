"""An estimate hands its allocations to the allocator's simulation.

Those of both steps, in their order.
"""

from typing import Any

import pytest
import torch
from torch import nn

import lflops
from lflops.profile.profile import Memory, Reserved

MIB = 2**20
WIDE = 1024  # floats: a square of them is 4 MiB


def of(model: nn.Module, samples: int, **how: Any) -> Reserved:
    """What the allocator reserves."""
    memory = lflops.estimate(model, torch.zeros(samples, WIDE), **how).memory
    assert isinstance(memory, Memory)
    assert memory.reserved is not None
    return memory.reserved


def layer() -> nn.Linear:
    """4 MiB of weights."""
    return nn.Linear(WIDE, WIDE, bias=False)


def test_a_forward_pass_by_hand() -> None:
    """Weights of 4 MiB, a batch of 1 and a result of 1.

    The weights in a segment of 20 MiB, the two small ones in one of 2.
    """
    with torch.no_grad():
        found = of(layer(), 256, allocator="")
    assert (
        Reserved(
            settings="",
            requested_bytes=6 * MIB,
            allocated_bytes=6 * MIB,
            reserved_bytes=22 * MIB,
            unused_bytes=16 * MIB,
        )
        == found
    )


def test_both_steps_of_a_training_are_one_sequence() -> None:
    """By hand, of 4 MiB each: weights, gradients, two of state, and what AdamW's lists need besides.

    The batch and the result are small.

    In the second step the state is not allocated again: five at least, and no second state, which
    would be seven.
    """
    found = of(layer(), 8, backward=True, optimizer=torch.optim.SGD, allocator="")
    momentum = of(
        layer(),
        8,
        backward=True,
        optimizer=lambda weights: torch.optim.SGD(weights, momentum=0.9),
        allocator="",
    )
    assert 4 * MIB == momentum.requested_bytes - found.requested_bytes
    assert [2 * 4, 3 * 4] == [each.requested_bytes // MIB for each in (found, momentum)]


def test_settings_are_the_allocators() -> None:
    """21 MiB of weights are 22 in a segment, and 40 in pages of 20; the small ones 2 in both."""
    model = nn.Linear(WIDE, 21 * 256, bias=False)
    with torch.no_grad():
        assert [22 + 2, 40 + 2] == [
            of(model, 1, allocator=each).reserved_bytes // MIB
            for each in ("", "expandable_segments:True")
        ]


def test_a_listed_chip_has_one_without_being_asked() -> None:
    """No other has, and what is wrong is named."""
    model, x = layer(), torch.zeros(1, WIDE)
    with torch.no_grad():
        listed, unlisted = (
            lflops.estimate(model, x, hardware=chip).memory for chip in ("NVIDIA H200", None)
        )
    assert isinstance(listed, Memory)
    assert isinstance(unlisted, Memory)
    assert (True, None) == (isinstance(listed.reserved, Reserved), unlisted.reserved)
    with pytest.raises(lflops.CountError, match="'expandable' is unknown"):
        lflops.estimate(model, x, allocator="expandable:True")

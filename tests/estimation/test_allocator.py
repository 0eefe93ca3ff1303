"""An estimate hands its allocations to the allocator's simulation.

Those of both steps, in their order.
"""

from typing import Any

import pytest
import torch
from torch import nn

import lflops
from lflops import Hardware
from lflops.memory.peak import memory_fit, memory_fit_of
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
    with pytest.raises(lflops.CountError, match="unknown setting 'expandable'"):
        lflops.estimate(model, x, allocator="expandable:True")


def test_a_step_fits_with_retries_if_the_allocator_frees_its_cache() -> None:
    """A chip that has 1 MiB less than the allocator would reserve, and more than is allocated."""

    def build() -> nn.Module:
        widths = [(1000, 3000), (3000, 700), (700, 2100), (2100, 900)]
        return nn.Sequential(*(nn.Linear(*each) for each in widths))

    def on(chip: Hardware) -> lflops.Profile:
        x = torch.zeros(1500, 1000)
        return lflops.estimate(
            build, x, backward=True, optimizer="adamw", hardware=chip, allocator=""
        )

    def of(memory_bytes: int) -> Hardware:
        return Hardware("round", {"fp32": 1e12}, 1e12, memory_bytes, usable_bytes=memory_bytes)

    plenty = on(of(1 << 40))
    assert plenty.memory is not None
    reserved = plenty.memory.reserved
    assert reserved is not None
    assert reserved.retries == 0
    assert reserved.reserved_bytes - (1 << 20) > reserved.allocated_bytes
    empty = memory_fit(0, of(1 << 40))
    assert empty is not None
    scarce = on(of(reserved.reserved_bytes - (1 << 20) + empty.needed_bytes))
    fit = memory_fit_of(scarce, scarce.run.hardware)
    assert fit is not None
    assert fit.verdict == "fits, with retries"
    assert fit.needed_bytes <= fit.usable_bytes
    too_little = on(of(reserved.allocated_bytes - (1 << 20) + empty.needed_bytes))
    fit = memory_fit_of(too_little, too_little.run.hardware)
    assert fit is not None
    assert fit.verdict == "does not fit"

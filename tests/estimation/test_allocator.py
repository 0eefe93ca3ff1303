"""Test that an estimate simulates the allocator on the allocations of both steps, in order."""

from typing import Any

import pytest
import torch
from torch import nn

import lflops
from lflops import Hardware
from lflops.memory.peak import memory_fit, memory_fit_of
from lflops.profile.profile import Memory, Reserved

MIB = 2**20
# A square matrix of this width, in float32, has 4 MiB.
WIDE = 1024


def reserved_by(model: nn.Module, samples: int, **how: Any) -> Reserved:
    """Return the allocator's result in an estimate of the model with a batch of zeros."""
    memory = lflops.estimate(model, torch.zeros(samples, WIDE), **how).memory
    assert isinstance(memory, Memory)
    assert memory.reserved is not None
    return memory.reserved


def layer() -> nn.Linear:
    """Build a layer with 4 MiB of weights."""
    return nn.Linear(WIDE, WIDE, bias=False)


def test_a_forward_pass_by_hand() -> None:
    """The weights need 4 MiB, the batch 1 MiB and the result 1 MiB.

    The allocator puts the weights into a segment of 20 MiB, and the two small tensors into a
    segment of 2 MiB.
    """
    with torch.no_grad():
        found = reserved_by(layer(), 256, allocator="")
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
    """The second step uses the optimizer state that the first step allocated.

    Weights and gradients need 4 MiB each, and momentum another 4 MiB. The batch and the result are
    small. If the second step allocated its own state, momentum would need 8 MiB.
    """
    plain = reserved_by(layer(), 8, backward=True, optimizer=torch.optim.SGD, allocator="")
    momentum = reserved_by(
        layer(),
        8,
        backward=True,
        optimizer=lambda weights: torch.optim.SGD(weights, momentum=0.9),
        allocator="",
    )
    assert 4 * MIB == momentum.requested_bytes - plain.requested_bytes
    assert 2 * 4 == plain.requested_bytes // MIB
    assert 3 * 4 == momentum.requested_bytes // MIB


def test_settings_are_the_allocators() -> None:
    """21 MiB of weights need one segment of 22 MiB, or two expandable pages of 20 MiB each.

    With either setting, the small tensors need 2 MiB.
    """
    model = nn.Linear(WIDE, 21 * 256, bias=False)
    with torch.no_grad():
        default = reserved_by(model, 1, allocator="")
        expandable = reserved_by(model, 1, allocator="expandable_segments:True")
    assert 22 + 2 == default.reserved_bytes // MIB
    assert 40 + 2 == expandable.reserved_bytes // MIB


def test_a_listed_chip_has_one_without_being_asked() -> None:
    """A chip of the table gets an allocator simulation by default; without a chip there is none.

    An unknown allocator setting is named in the error.
    """
    model = layer()
    x = torch.zeros(1, WIDE)
    with torch.no_grad():
        listed = lflops.estimate(model, x, hardware="NVIDIA H200").memory
        unlisted = lflops.estimate(model, x, hardware=None).memory
    assert isinstance(listed, Memory)
    assert isinstance(unlisted, Memory)
    assert isinstance(listed.reserved, Reserved)
    assert unlisted.reserved is None
    with pytest.raises(lflops.CountError, match="the setting 'expandable' is unknown"):
        lflops.estimate(model, x, allocator="expandable:True")


def test_a_step_fits_with_retries_if_the_allocator_frees_its_cache() -> None:
    """The verdict is "fits, with retries" if the chip has 1 MiB less than the reserved memory.

    With 1 MiB less than the allocated memory, the step does not fit.
    """

    def build() -> nn.Module:
        widths = [(1000, 3000), (3000, 700), (700, 2100), (2100, 900)]
        return nn.Sequential(*(nn.Linear(*each) for each in widths))

    def estimate_on(chip: Hardware) -> lflops.Profile:
        x = torch.zeros(1500, 1000)
        return lflops.estimate(
            build, x, backward=True, optimizer="adamw", hardware=chip, allocator=""
        )

    def chip_with(memory_bytes: int) -> Hardware:
        return Hardware("round", {"fp32": 1e12}, 1e12, memory_bytes, usable_bytes=memory_bytes)

    plenty = estimate_on(chip_with(1 << 40))
    assert plenty.memory is not None
    reserved = plenty.memory.reserved
    assert reserved is not None
    assert reserved.retries == 0
    assert reserved.reserved_bytes - (1 << 20) > reserved.allocated_bytes
    # The memory that the chip needs besides the step.
    empty = memory_fit(0, chip_with(1 << 40))
    assert empty is not None
    scarce = estimate_on(chip_with(reserved.reserved_bytes - (1 << 20) + empty.needed_bytes))
    fit = memory_fit_of(scarce, scarce.run.hardware)
    assert fit is not None
    assert fit.verdict == "fits, with retries"
    assert fit.needed_bytes <= fit.usable_bytes
    too_little = estimate_on(chip_with(reserved.allocated_bytes - (1 << 20) + empty.needed_bytes))
    fit = memory_fit_of(too_little, too_little.run.hardware)
    assert fit is not None
    assert fit.verdict == "does not fit"

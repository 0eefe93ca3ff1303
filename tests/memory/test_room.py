"""Test whether a step fits on a chip, including the memory of driver, libraries and allocator."""

import pytest

from lflops.hardware.chips import Hardware, lookup
from lflops.memory.peak import (
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    HOPPER_CUBLAS_BYTES,
    NCCL_BYTES,
    MemoryFit,
    memory_fit,
    memory_fit_of,
)
from tests.support.profile_builders import profile, small_memory

GIB = 2**30
CHIP = Hardware("a chip", {"bf16": 1.0}, memory_bytes=100 * GIB, usable_bytes=90 * GIB)


def fit_of(tensor_bytes: int, chip: Hardware | None = CHIP, **how: int) -> MemoryFit:
    """Return the memory fit, which must be known."""
    found = memory_fit(tensor_bytes, chip, **how)
    assert found is not None
    return found


def test_the_parts_add_up() -> None:
    """The needed bytes are the sum of tensors, fragmentation, CUDA context, cuBLAS and NCCL.

    60 GiB of tensors have a twentieth of fragmentation. The context needs 750 MiB, and cuBLAS two
    workspaces. NCCL's buffers are only needed with several ranks.
    """
    alone = fit_of(60 * GIB)
    one_of_two = fit_of(60 * GIB, ranks=2)
    assert 63 * GIB + 750 * 1024**2 + 2 * 8320 * 1024 == alone.needed_bytes
    assert NCCL_BYTES == one_of_two.needed_bytes - alone.needed_bytes == one_of_two.collective_bytes
    assert 3 * GIB == alone.fragmentation_bytes
    assert alone.fragmentation_simulated is False


def test_a_simulated_allocator_takes_the_place_of_the_assumption() -> None:
    """If the allocator was simulated, its reserved bytes replace the assumed fragmentation.

    The reserved bytes include the tensors.
    """
    found = fit_of(60 * GIB, reserved_bytes=61 * GIB)
    assert GIB == found.fragmentation_bytes
    assert found.fragmentation_simulated is True
    assert 61 * GIB + CONTEXT_BYTES + 2 * CUBLAS_BYTES == found.needed_bytes


def test_the_last_twentieth_is_tight() -> None:
    """A step that needs more than 95 % of the usable memory is tight.

    85.5 of 90 GiB still fit; all limits are exact to the byte.
    """
    besides = CONTEXT_BYTES + 2 * CUBLAS_BYTES
    most_that_fits = 85 * GIB + GIB // 2 - besides
    everything = 90 * GIB - besides
    assert "fits" == fit_of(1, reserved_bytes=most_that_fits).verdict
    assert "tight" == fit_of(1, reserved_bytes=most_that_fits + 1).verdict
    assert "tight" == fit_of(1, reserved_bytes=everything).verdict
    assert "does not fit" == fit_of(1, reserved_bytes=everything + 1).verdict


def test_what_is_sold_as_80_gb_has_no_room_for_75_gib() -> None:
    """75 GiB of tensors do not fit on an A100 with 80 GB, of which 79.15 GiB are usable.

    A twentieth of fragmentation and more than half a GiB for context and libraries are added.
    """
    found = fit_of(75 * GIB, lookup("NVIDIA A100-SXM4-80GB"))
    assert "does not fit" == found.verdict
    assert int(79.15 * GIB) == found.usable_bytes


def test_an_unlisted_share_is_assumed_and_hopper_has_a_larger_workspace() -> None:
    """If the usable memory of a chip is not listed, it is assumed to be 98.5 %.

    On Hopper each of two threads has a cuBLAS workspace of 32 MiB, as a real H100 SXM shows. Its
    usable memory is listed: 79.18 GiB.
    """
    assumed = fit_of(GIB, lookup("NVIDIA H100 PCIe"))
    listed = fit_of(GIB, lookup("NVIDIA H100 80GB HBM3"))
    assert int(0.985 * 80 * GIB) == assumed.usable_bytes
    assert 2 * HOPPER_CUBLAS_BYTES == assumed.workspace_bytes
    assert int(79.18 * GIB) == listed.usable_bytes
    assert 64 * 2**20 == listed.workspace_bytes


@pytest.mark.parametrize("chip", [None, Hardware("unknown", {"bf16": 1.0})])
def test_a_chip_of_unknown_memory_has_no_verdict(chip: Hardware | None) -> None:
    """If the memory of the chip or of the step is unknown, there is no verdict.

    The result is None, which does not mean "does not fit".
    """
    assert memory_fit(1, chip) is None
    assert memory_fit_of(profile({"": {}}, ()), CHIP) is None
    assert memory_fit_of(profile({"": {}}, (), memory=small_memory()), CHIP) is not None

"""Whether a step fits on a chip, with what the driver, libraries and the allocator take."""

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


def of(tensor_bytes: int, chip: Hardware | None = CHIP, **how: int) -> MemoryFit:
    """The room, which is known."""
    found = memory_fit(tensor_bytes, chip, **how)
    assert found is not None
    return found


def test_the_parts_add_up() -> None:
    """60 GiB of tensors, a twentieth more by fragmentation, 750 MiB of context, cuBLAS twice, and NCCL's buffers on several ranks."""
    alone, one_of_two = of(60 * GIB), of(60 * GIB, ranks=2)
    assert 63 * GIB + 750 * 1024**2 + 2 * 8320 * 1024 == alone.needed_bytes
    assert NCCL_BYTES == one_of_two.needed_bytes - alone.needed_bytes == one_of_two.collective_bytes
    assert (3 * GIB, False) == (alone.fragmentation_bytes, alone.fragmentation_simulated)


def test_a_simulated_allocator_takes_the_place_of_the_assumption() -> None:
    """Of what it reserves, the tensors are a part."""
    found = of(60 * GIB, reserved_bytes=61 * GIB)
    assert (GIB, True, 61 * GIB + CONTEXT_BYTES + 2 * CUBLAS_BYTES) == (
        found.fragmentation_bytes,
        found.fragmentation_simulated,
        found.needed_bytes,
    )


def test_the_last_twentieth_is_tight() -> None:
    """Of 90 GiB 85.5 fit well; the limits are to the byte."""
    besides = CONTEXT_BYTES + 2 * CUBLAS_BYTES
    well, all_of_it = 85 * GIB + GIB // 2 - besides, 90 * GIB - besides
    verdicts = [
        of(1, reserved_bytes=reserved).verdict
        for reserved in (well, well + 1, all_of_it, all_of_it + 1)
    ]
    assert ["fits", "tight", "tight", "does not fit"] == verdicts


def test_what_is_sold_as_80_gb_has_no_room_for_75_gib() -> None:
    """93.5 % of 80 GiB: an A100 shows 79.15 of them, and a twentieth of 75 and more than half a GiB come on top."""
    found = of(75 * GIB, lookup("NVIDIA A100-SXM4-80GB"))
    assert ("does not fit", int(79.15 * GIB)) == (found.verdict, found.usable_bytes)


def test_an_unlisted_share_is_assumed_and_hopper_has_a_larger_workspace() -> None:
    """98.5 % of what is sold.

    And 32 MiB for each of two threads, as on an H100 SXM, which showed 79.18 GiB.
    """
    found, seen = (of(GIB, lookup(name)) for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"))
    assert (int(0.985 * 80 * GIB), 2 * HOPPER_CUBLAS_BYTES) == (
        found.usable_bytes,
        found.workspace_bytes,
    )
    assert (int(79.18 * GIB), 64 * 2**20) == (seen.usable_bytes, seen.workspace_bytes)


@pytest.mark.parametrize("chip", [None, Hardware("unknown", {"bf16": 1.0})])
def test_a_chip_of_unknown_memory_has_no_verdict(chip: Hardware | None) -> None:
    """None, which is not "does not fit"; nor has a step whose memory was not counted."""
    assert memory_fit(1, chip) is None
    assert memory_fit_of(profile({"": {}}, ()), CHIP) is None
    assert memory_fit_of(profile({"": {}}, (), memory=small_memory()), CHIP) is not None

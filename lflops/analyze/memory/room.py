"""Whether a step fits on a chip: what tensors need, and what the driver, libraries and the allocator take besides.

The constants are bounds for a plan. Each has its source; none was measured by lflops.
"""

from typing import Literal

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.profile.model import Memory, Profile

Verdict = Literal["fits", "tight", "does not fit"]

USABLE = 0.985
"""Share of a chip's memory that a process sees, where the table of chips has no figure. Its chips with HBM are at 0.985 to 0.992."""

CONTEXT_BYTES = 512 * 2**20
"""CUDA's context with torch's kernels loaded as they are needed: 426 MiB with torch 2.10 on an RTX 6000 Ada before any kernel
(https://github.com/unslothai/unsloth-zoo/pull/1053), about 400 MiB in https://github.com/pytorch/pytorch/issues/109888."""

CUBLAS_BYTES = 8320 * 2**10
HOPPER_CUBLAS_BYTES = 32 * 2**20
"""cuBLAS's workspace for one stream, which torch allocates: `:4096:2:16:8` is two of 4096 KiB and eight of 16 KiB; more on Hopper, as
cuBLAS's documentation recommends (https://github.com/pytorch/pytorch/pull/89027)."""

NCCL_BYTES = 1_600_000_000
"""Buffers of one NCCL communicator after an all-reduce (https://github.com/NVIDIA/nccl/issues/864). They grow with the channels: fewer on
PCIe, more where ranks also send to each other."""

FRAGMENTATION = 0.05  # share of the peak that the allocator reserves besides, where it was not simulated

TIGHT = 0.05  # a step that leaves a smaller share than this of the usable memory is tight: a longer batch or another version may not fit

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


class Room(Struct, frozen=True, kw_only=True):
    """What a step needs of a chip's memory, and whether that fits. The parts add up to `needed_bytes`."""

    verdict: Verdict  # `tight` leaves less than 5 % of the usable memory
    chip: str  # the chip's name
    usable_bytes: int  # what a process sees as the device's memory
    needed_bytes: int
    tensor_bytes: int  # the peak of live tensors
    fragmentation_bytes: int  # what the allocator reserves besides: simulated, or a share of the peak
    fragmentation_simulated: bool  # whether the allocator was simulated
    context_bytes: int  # the driver's, for this process; 0 for a chip that is not NVIDIA's, whose share is unknown
    workspace_bytes: int  # cuBLAS's
    collective_bytes: int  # NCCL's; 0 on one rank


def room(tensor_bytes: int, chip: Hardware | None, *, ranks: int = 1, reserved_bytes: int | None = None) -> Room | None:
    """The room for a peak of live tensors on a chip; `None` where its memory is unknown. `reserved` is the allocator's, if simulated."""
    if chip is None or chip.memory_bytes is None:
        return None
    usable = int(chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes * USABLE)
    fragmentation = int(tensor_bytes * FRAGMENTATION) if reserved_bytes is None else reserved_bytes - tensor_bytes
    cublas = HOPPER_CUBLAS_BYTES if chip.name.split()[0] in _HOPPER else CUBLAS_BYTES
    nccl = NCCL_BYTES if ranks > 1 else 0
    needed = tensor_bytes + fragmentation + CONTEXT_BYTES + cublas + nccl
    return Room(
        verdict="does not fit" if needed > usable else "tight" if needed > usable * (1 - TIGHT) else "fits",
        chip=chip.name,
        usable_bytes=usable,
        needed_bytes=needed,
        tensor_bytes=tensor_bytes,
        fragmentation_bytes=fragmentation,
        fragmentation_simulated=reserved_bytes is not None,
        context_bytes=CONTEXT_BYTES,
        workspace_bytes=cublas,
        collective_bytes=nccl,
    )


def room_for(profile: Profile, chip: Hardware | None) -> Room | None:
    """The room for a profile's step; `None` where its memory was not counted or the chip's is unknown."""
    memory: Memory | None = profile.memory
    if memory is None:
        return None
    reserved = memory.reserved.reserved_bytes if memory.reserved is not None else None
    return room(memory.peak_bytes, chip, ranks=profile.run.world_size, reserved_bytes=reserved)

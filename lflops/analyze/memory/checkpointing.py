"""The blocks of a model, its repeated parts, and the memory that a step would need with them checkpointed."""

from collections import defaultdict

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry

__all__ = ["Checkpointed", "blocks_of", "checkpointed"]


def blocks_of(profile: Profile) -> list[str]:
    """The modules that their container numbers, outside of any other."""
    numbered = [row for row in profile.modules if row.rpartition(".")[2].isdecimal()]
    return [row for row in numbered if not any(above.rpartition(".")[2].isdecimal() for above in ancestry(row)[1:])]


class Checkpointed(Struct, frozen=True, kw_only=True):
    """Activation checkpointing of one block.

    Attributes:
        saved_bytes: Its activations that are alive at the peak: the most that can be saved. Its output stays where a later operator needs
            it, and all its activations exist while it is recomputed.
        macs: Those that run once more, which are its forward's. So are `flops`.
    """

    module: str
    saved_bytes: int
    macs: int
    flops: int


def checkpointed(profile: Profile) -> tuple[Checkpointed, ...]:
    """Each block by itself, those that save the most first; none where memory was not counted, or nothing went backward.

    A block is a module that its container numbers, outside of any other.
    """
    if profile.memory is None or all(cell.phase != "backward" for cell in profile.cells):
        return ()
    below: dict[str, int] = defaultdict(int)
    for row, nbytes in profile.memory.activations_by_module.items():
        for above in ancestry(row):
            below[above] += nbytes
    forwards = ((block, profile.modules[block].forward) for block in blocks_of(profile))
    blocks = [
        Checkpointed(module=block, saved_bytes=below[block], macs=forward.macs, flops=forward.flops)
        for block, forward in forwards
        if below.get(block)
    ]
    return tuple(sorted(blocks, key=lambda each: -each.saved_bytes))

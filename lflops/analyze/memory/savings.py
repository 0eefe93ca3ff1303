"""What would lower the peak of a step's memory, and by how much at the most."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lflops.analyze.memory.checkpointing import Checkpointed
from lflops.profile.model import Memory, Moment
from lflops.profile.series import grouped

__all__ = ["Saving", "savings"]


class Saving(Struct, frozen=True, kw_only=True):
    """One way to lower the peak.

    Attributes:
        kind: Checkpoint a block or the blocks of one place; free gradients before the forward; an optimizer that updates in place.
        module: The block, repeated ones as their pattern; empty for all others.
        modules: How many blocks.
        bytes: The most that it saves; another moment may then be the peak.
        macs: MACs that a step does besides.
    """

    kind: Literal["checkpoint", "gradients", "fused_optimizer"]
    module: str
    modules: int
    bytes: int
    macs: int


def savings(
    memory: Memory | None, reached: Moment | None, checkpointed: Sequence[Checkpointed], patterns: Mapping[str, str]
) -> tuple[Saving, ...]:
    """The ways that are known, those that save the most first; `reached` is the operator that reached the peak."""
    if memory is None:
        return ()
    found = list(_checkpoints(checkpointed, patterns))
    gradients, temporary = (memory.by_category.get(name, 0) for name in ("gradients", "temporary"))
    if reached is not None and reached.phase == "forward" and gradients:
        found.append(Saving(kind="gradients", module="", modules=0, bytes=gradients, macs=0))
    if reached is not None and reached.phase == "optimizer" and temporary:
        found.append(Saving(kind="fused_optimizer", module="", modules=0, bytes=temporary, macs=0))
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


def _checkpoints(checkpointed: Sequence[Checkpointed], patterns: Mapping[str, str]) -> list[Saving]:
    """The blocks of one place together: while one of them is recomputed, its activations exist, so the largest saves nothing."""
    made = []
    for pattern, blocks in grouped(checkpointed, lambda block: patterns.get(block.module, block.module)).items():
        together = sum(block.saved_bytes for block in blocks)
        saved = together - max(block.saved_bytes for block in blocks) if len(blocks) > 1 else together
        name = pattern if len(blocks) > 1 else blocks[0].module
        made.append(Saving(kind="checkpoint", module=name, modules=len(blocks), bytes=saved, macs=sum(block.macs for block in blocks)))
    return [saving for saving in made if saving.bytes]

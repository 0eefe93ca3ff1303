"""The peak of a step's live memory: the operator that reached it, and the modules that hold it.

What checkpointing each of the blocks saves, which are a model's repeated parts; and what else would lower the peak.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lflops.profile.model import Memory, Moment, Profile
from lflops.profile.module_names import ancestry, fold_repeats
from lflops.profile.records import Phase
from lflops.profile.series import grouped, summed


class Holder(Struct, frozen=True, kw_only=True):
    """A module, or modules that repeat at one place, as `layers.*.mlp`, and the bytes that they made or own."""

    name: str
    modules: int
    bytes: int


class Storages(Struct, frozen=True, kw_only=True):
    """Storages of the same size and origin, of one module or of modules that repeat at one place."""

    category: str
    operator: str
    phase: Phase
    module: str
    pattern: str
    number: int
    each_bytes: int


def fold_storages(memory: Memory, patterns: Mapping[str, str]) -> tuple[Storages, ...]:
    """Storages, those of repeated modules together, the largest first."""
    held = {module: label for label, modules in _folded(memory, patterns) for module, _ in modules}
    folded = fold_repeats(memory.alive, lambda each: (each.module, each.category, each.operator, each.phase, each.bytes), patterns)
    rows = [
        Storages(
            pattern=held.get(first.module, first.module),
            category=first.category,
            operator=first.operator,
            phase=first.phase,
            module=label,
            number=1 + len(more),
            each_bytes=first.bytes,
        )
        for label, (first, *more) in folded
    ]
    return tuple(sorted(rows, key=lambda storages: -storages.each_bytes))


def holders(memory: Memory, patterns: Mapping[str, str]) -> tuple[Holder, ...]:
    """Modules that hold any bytes, repeated ones together, the most bytes first."""
    rows = [Holder(name=label, modules=len(items), bytes=sum(nbytes for _, nbytes in items)) for label, items in _folded(memory, patterns)]
    return tuple(sorted(rows, key=lambda holder: -holder.bytes))


def _folded(memory: Memory, patterns: Mapping[str, str]) -> list[tuple[str, list[tuple[str, int]]]]:
    return fold_repeats(((module, nbytes) for module, nbytes in memory.by_module.items() if nbytes), lambda item: item[:1], patterns)


def peak_moment(memory: Memory) -> Moment | None:
    """The operator that reached the peak, and what was alive before it ran; `None` where the timeline does not have it."""
    return next((moment for moment in memory.timeline if moment.index == memory.peak_index), None)


def blocks_of(profile: Profile) -> list[str]:
    """The modules that their container numbers, outside of any other."""
    numbered = [row for row in profile.modules if row.rpartition(".")[2].isdecimal()]
    return [row for row in numbered if not any(above.rpartition(".")[2].isdecimal() for above in ancestry(row)[1:])]


class Checkpointed(Struct, frozen=True, kw_only=True):
    """Activation checkpointing of one block: its output stays where a later operator needs it; recomputing makes all its activations."""

    module: str
    saved_bytes: int  # its activations that are alive at the peak: the most that can be saved
    macs: int  # those that run once more, which are its forward's. So are `flops`.
    flops: int


def checkpointed(profile: Profile) -> tuple[Checkpointed, ...]:
    """Each block by itself, those that save the most first; none where memory was not counted, or nothing went backward."""
    if profile.memory is None or all(cell.phase != "backward" for cell in profile.cells):
        return ()
    below = summed((above, nbytes) for row, nbytes in profile.memory.activations_by_module.items() for above in ancestry(row))
    forwards = ((block, profile.modules[block].forward) for block in blocks_of(profile))
    blocks = [
        Checkpointed(module=block, saved_bytes=below[block], macs=forward.macs, flops=forward.flops)
        for block, forward in forwards
        if below.get(block)
    ]
    return tuple(sorted(blocks, key=lambda each: -each.saved_bytes))


class Saving(Struct, frozen=True, kw_only=True):
    """One way to lower the peak: checkpoint blocks, free gradients before the forward, update in place, or compute the loss in chunks."""

    kind: Literal["checkpoint", "gradients", "fused_optimizer", "chunked_loss"]
    module: str  # the block, repeated ones as their pattern; empty for all others
    modules: int  # how many blocks
    bytes: int  # the most that it saves; another moment may then be the peak
    macs: int  # MACs that a step does besides


LARGE = 0.25  # the share of the peak from which logits and the loss are reported as large


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
    if (logits := _of_logits(memory)) >= LARGE * memory.peak_bytes:
        found.append(Saving(kind="chunked_loss", module="", modules=0, bytes=logits, macs=0))
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


def _of_logits(memory: Memory) -> int:
    """The bytes of logits and loss: storages of the loss's softmax, and those as large, half or twice as large: casts and gradients."""
    sizes = {each.bytes for each in memory.alive if each.operator.startswith("_log_softmax")}
    logits = {size * times // 2 for size in sizes for times in (1, 2, 4)}
    return sum(each.bytes for each in memory.alive if each.bytes in logits and each.category in ("activations", "temporary"))


def _checkpoints(checkpointed: Sequence[Checkpointed], patterns: Mapping[str, str]) -> list[Saving]:
    """The blocks of one place together: while one of them is recomputed, its activations exist, so the largest saves nothing."""
    made = []
    for pattern, blocks in grouped(checkpointed, lambda block: patterns.get(block.module, block.module)).items():
        together = sum(block.saved_bytes for block in blocks)
        saved = together - max(block.saved_bytes for block in blocks) if len(blocks) > 1 else together
        name = pattern if len(blocks) > 1 else blocks[0].module
        made.append(Saving(kind="checkpoint", module=name, modules=len(blocks), bytes=saved, macs=sum(block.macs for block in blocks)))
    return [saving for saving in made if saving.bytes]

"""Memory that a step would need with its blocks checkpointed, or with its state sharded over ranks."""

from collections import defaultdict
from typing import Literal

from msgspec import Struct

from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry

__all__ = ["Checkpointed", "Sharded", "checkpointed", "sharded"]

Strategy = Literal["ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP2"]


class Checkpointed(Struct, frozen=True, kw_only=True):
    """Activation checkpointing of one block.

    Attributes:
        module: The block's row.
        saved_bytes: Its activations that are alive at the peak: the most that can be saved. Its output stays where a later operator needs
            it, and all its activations exist while it is recomputed.
        macs: MACs that run once more, those of its forward.
        flops: FLOPs that do.
    """

    module: str
    saved_bytes: int
    macs: int
    flops: int


class Sharded(Struct, frozen=True, kw_only=True):
    """Bytes that each rank holds.

    Attributes:
        parameter_bytes: While no module is gathered.
        gradient_bytes: When all exist, each of the size of its parameter.
        optimizer_state_bytes: As at the peak.
        gathered_bytes: The largest block's parameters, which are gathered while it runs; 0 where parameters are not sharded.
        rest_bytes: Activations, temporary and other tensors at the peak, which no strategy divides.
    """

    strategy: Strategy
    ranks: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    gathered_bytes: int
    rest_bytes: int


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
    forwards = ((block, profile.modules[block].forward) for block in _blocks(profile))
    blocks = [
        Checkpointed(module=block, saved_bytes=below[block], macs=forward.macs, flops=forward.flops)
        for block, forward in forwards
        if below.get(block)
    ]
    return tuple(sorted(blocks, key=lambda each: -each.saved_bytes))


def sharded(profile: Profile, ranks: int) -> tuple[Sharded, ...]:
    """Each strategy over a number of data-parallel ranks; none where memory was not counted.

    Uneven parts are rounded up.

    Raises:
        ValueError: There are no ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give at least 1")
    if profile.memory is None:
        return ()
    root, held = profile.modules[""], profile.memory.by_category
    state = held.get("optimizer_state", 0)
    gathered = max((profile.modules[block].parameter_bytes for block in _blocks(profile)), default=root.parameter_bytes)
    rest = sum(nbytes for category, nbytes in held.items() if category not in {"parameters", "gradients", "optimizer_state"})
    return tuple(
        Sharded(
            strategy=strategy,
            ranks=ranks,
            parameter_bytes=_part(root.parameter_bytes, ranks if level >= 3 else 1),
            gradient_bytes=_part(root.trainable_parameter_bytes, ranks if level >= 2 else 1),
            optimizer_state_bytes=_part(state, ranks),
            gathered_bytes=gathered if level >= 3 else 0,
            rest_bytes=rest,
        )
        for level, strategy in enumerate(_STRATEGIES, 1)
    )


_STRATEGIES: tuple[Strategy, ...] = ("ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP2")


def _blocks(profile: Profile) -> list[str]:
    """The outermost rows whose last name is a number."""
    numbered = [row for row in profile.modules if row.rpartition(".")[2].isdecimal()]
    return [row for row in numbered if not any(above.rpartition(".")[2].isdecimal() for above in ancestry(row)[1:])]


def _part(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)

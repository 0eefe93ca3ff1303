"""The peak of a step's live memory: the operator that reached it, and the modules that hold it.

What checkpointing each of the blocks saves, which are a model's repeated parts; and what else would
lower the peak. Each rank's under DeepSpeed's ZeRO is the step replayed with what that divides and
gathers. For DDP and FSDP2 an estimate wraps the model.

Whether a step fits on a chip: what tensors need, and what the driver, libraries and the allocator
take besides. The constants are bounds for a plan. Each has its source.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.hardware.chips import HOPPER, Hardware
from lflops.profile.module_names import ancestry, fold_repeats
from lflops.profile.profile import Memory, Moment, Profile
from lflops.profile.records import PASS_PHASES, ByCategory, Phase
from lflops.profile.series import grouped, summed

Verdict = Literal["fits", "tight", "does not fit"]

USABLE = 0.985
"""Share of a chip's memory that a process sees, where the table of chips has no figure.

Its chips with HBM are at 0.985 to 0.992.
"""

CONTEXT_BYTES = 750 * 2**20
"""CUDA's context with torch's kernels loaded as they are needed.

Measured 619 MiB on an H100 with torch 2.11, CUDA 13.0, after one kernel,
and 749 MiB after products in two dtypes. Others: 426 MiB with torch 2.10 on an RTX 6000 Ada before
any kernel (https://github.com/unslothai/unsloth-zoo/pull/1053), about 400 MiB in
https://github.com/pytorch/pytorch/issues/109888.
"""

CUBLAS_BYTES = 8320 * 2**10
HOPPER_CUBLAS_BYTES = 32 * 2**20
"""cuBLAS's workspace for one stream, which torch allocates:

`:4096:2:16:8` is two of 4096 KiB and eight of 16 KiB; more on Hopper, as
cuBLAS's documentation recommends (https://github.com/pytorch/pytorch/pull/89027). Backward's thread
has another: measured on an H100.
"""

NCCL_BYTES = 1_600_000_000
"""Buffers of one NCCL communicator after an all-reduce (https://github.com/NVIDIA/nccl/issues/864).

They grow with the channels: fewer on
PCIe, more where ranks also send to each other.
"""

FRAGMENTATION = (
    # share of the peak that the allocator reserves besides, where it was not simulated
    0.05
)

# a step that leaves a smaller share than this of the usable memory is tight: a longer batch or
# another version may not fit
TIGHT = 0.05


class MemoryFit(Struct, frozen=True, kw_only=True):
    """What a step needs of a chip's memory, and whether that fits.

    The parts add up to `needed_bytes`.
    """

    # `tight` leaves less than 5 % of the usable memory
    verdict: Verdict
    # the chip's name
    chip: str
    # what a process sees as the device's memory
    usable_bytes: int
    needed_bytes: int
    # the peak of live tensors
    tensor_bytes: int
    fragmentation_bytes: (
        # what the allocator reserves besides: simulated, or a share of the peak
        int
    )
    # whether the allocator was simulated
    fragmentation_simulated: bool
    # the driver's, for this process; 0 for a chip that is not NVIDIA's, whose share is unknown
    context_bytes: int
    # cuBLAS's, of forward's thread and of backward's
    workspace_bytes: int
    # NCCL's; 0 on one rank
    collective_bytes: int


def room(
    tensor_bytes: int, chip: Hardware | None, *, ranks: int = 1, reserved_bytes: int | None = None
) -> MemoryFit | None:
    """The room for a peak of live tensors on a chip.

    `None` where its memory is unknown. `reserved` is the allocator's, if simulated.
    """
    if chip is None or chip.memory_bytes is None:
        return None
    usable = int(chip.usable_bytes if chip.usable_bytes is not None else chip.memory_bytes * USABLE)
    fragmentation = (
        int(tensor_bytes * FRAGMENTATION)
        if reserved_bytes is None
        else reserved_bytes - tensor_bytes
    )
    cublas = 2 * (HOPPER_CUBLAS_BYTES if chip.name.split()[0] in HOPPER else CUBLAS_BYTES)
    nccl = NCCL_BYTES if ranks > 1 else 0
    needed = tensor_bytes + fragmentation + CONTEXT_BYTES + cublas + nccl
    return MemoryFit(
        verdict="does not fit"
        if needed > usable
        else "tight"
        if needed > usable * (1 - TIGHT)
        else "fits",
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


def room_for(profile: Profile, chip: Hardware | None) -> MemoryFit | None:
    """The room for a profile's step.

    `None` where its memory was not counted or the chip's is unknown.
    """
    memory: Memory | None = profile.memory
    if memory is None:
        return None
    reserved = memory.reserved.reserved_bytes if memory.reserved is not None else None
    return room(memory.peak_bytes, chip, ranks=profile.run.world_size, reserved_bytes=reserved)


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
    folded = fold_repeats(
        memory.alive,
        lambda each: (each.module, each.category, each.operator, each.phase, each.bytes),
        patterns,
    )
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
    rows = [
        Holder(name=label, modules=len(items), bytes=sum(nbytes for _, nbytes in items))
        for label, items in _folded(memory, patterns)
    ]
    return tuple(sorted(rows, key=lambda holder: -holder.bytes))


def _folded(memory: Memory, patterns: Mapping[str, str]) -> list[tuple[str, list[tuple[str, int]]]]:
    return fold_repeats(
        ((module, nbytes) for module, nbytes in memory.by_module.items() if nbytes),
        lambda item: item[:1],
        patterns,
    )


def peak_moment(memory: Memory) -> Moment | None:
    """The operator that reached the peak, and what was alive before it ran.

    `None` where the timeline does not have it.
    """
    return next((moment for moment in memory.timeline if moment.index == memory.peak_index), None)


def blocks_of(profile: Profile) -> list[str]:
    """The modules that their container numbers, outside of any other."""
    numbered = [row for row in profile.modules if row.rpartition(".")[2].isdecimal()]
    return [
        row
        for row in numbered
        if not any(above.rpartition(".")[2].isdecimal() for above in ancestry(row)[1:])
    ]


class Checkpointed(Struct, frozen=True, kw_only=True):
    """Activation checkpointing of one block.

    Its output stays where a later operator needs it; recomputing makes all its activations.
    """

    module: str
    # its activations that are alive at the peak: the most that can be saved
    saved_bytes: int
    # those that run once more, which are its forward's. So are `flops`.
    macs: int
    flops: int


def checkpointed(profile: Profile) -> tuple[Checkpointed, ...]:
    """Each block by itself, those that save the most first.

    None where memory was not counted, or nothing went backward.
    """
    if profile.memory is None or all(cell.phase != "backward" for cell in profile.op_counts):
        return ()
    below = summed(
        (above, nbytes)
        for row, nbytes in profile.memory.activations_by_module.items()
        for above in ancestry(row)
    )
    forwards = ((block, profile.modules[block].forward) for block in blocks_of(profile))
    blocks = [
        Checkpointed(module=block, saved_bytes=below[block], macs=forward.macs, flops=forward.flops)
        for block, forward in forwards
        if below.get(block)
    ]
    return tuple(sorted(blocks, key=lambda each: -each.saved_bytes))


class Saving(Struct, frozen=True, kw_only=True):
    """One way to lower the peak.

    Checkpoint blocks, free gradients before the forward, update in place, or compute the loss in
    chunks.
    """

    kind: Literal["checkpoint", "gradients", "fused_optimizer", "chunked_loss"]
    # the block, repeated ones as their pattern; empty for all others
    module: str
    # how many blocks
    modules: int
    # the most that it saves; another moment may then be the peak
    bytes: int
    # MACs that a step does besides
    macs: int


# the share of the peak from which logits and the loss are reported as large
LARGE = 0.25


def savings(
    memory: Memory | None,
    reached: Moment | None,
    checkpointed: Sequence[Checkpointed],
    patterns: Mapping[str, str],
) -> tuple[Saving, ...]:
    """The ways that are known, those that save the most first.

    `reached` is the operator that reached the peak.
    """
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
    """The bytes of logits and loss.

    Storages of the loss's softmax, and those as large, half or twice as large: casts and gradients.
    """
    sizes = {each.bytes for each in memory.alive if each.operator.startswith("_log_softmax")}
    logits = {size * times // 2 for size in sizes for times in (1, 2, 4)}
    return sum(
        each.bytes
        for each in memory.alive
        if each.bytes in logits and each.category in ("activations", "temporary")
    )


def _checkpoints(checkpointed: Sequence[Checkpointed], patterns: Mapping[str, str]) -> list[Saving]:
    """The blocks of one place together.

    While one of them is recomputed, its activations exist, so the largest saves nothing.
    """
    made = []
    for pattern, blocks in grouped(
        checkpointed, lambda block: patterns.get(block.module, block.module)
    ).items():
        together = sum(block.saved_bytes for block in blocks)
        saved = (
            together - max(block.saved_bytes for block in blocks) if len(blocks) > 1 else together
        )
        name = pattern if len(blocks) > 1 else blocks[0].module
        made.append(
            Saving(
                kind="checkpoint",
                module=name,
                modules=len(blocks),
                bytes=saved,
                macs=sum(block.macs for block in blocks),
            )
        )
    return [saving for saving in made if saving.bytes]


Strategy = Literal["ZeRO-1", "ZeRO-2", "ZeRO-3"]
STRATEGIES: tuple[Strategy, ...] = ("ZeRO-1", "ZeRO-2", "ZeRO-3")


class Sharded(Struct, frozen=True, kw_only=True):
    """The peak of one rank. The parts are those of that moment and add up to `total_bytes`."""

    strategy: Strategy
    ranks: int
    # when the peak is reached
    phase: Phase
    total_bytes: int
    # the rank's own
    parameter_bytes: int
    # the rank's own, in parts after they are reduced
    gradient_bytes: int
    # the rank's own
    optimizer_state_bytes: int
    # whole parameters and gradients of the blocks at work, and the buffers of their collectives
    gathered_bytes: int
    # activations, temporary and other tensors
    rest_bytes: int
    # whether that fits on the chip; `None` without one
    room: MemoryFit | None = None


class _Moment(NamedTuple):
    """What is alive in the step of one rank, unsharded."""

    phase: Phase
    live: ByCategory
    # bytes alive for a part of the operator, besides those by category
    more: int
    # bytes of the gradients that modules outside of blocks have by now
    root_gradients: int
    # whether a block is at work
    is_in_block: bool


class _Sizes(NamedTuple):
    parameters: int
    gradients: int
    # the largest block's parameters
    block: int
    # those of them that are trained
    block_gradients: int
    # parameters outside of all blocks
    rest: int
    # those of them that are trained
    rest_gradients: int
    # the optimizer's, once it has all of it
    state: int


def sharded(profile: Profile, ranks: int, chip: Hardware | None = None) -> tuple[Sharded, ...]:
    """Each strategy's peak over a number of data-parallel ranks.

    None where live memory by operator is unknown.

    Uneven parts are rounded up. ZeRO-3 is taken to divide as FSDP2 does: each block and the rest,
    with one block prefetched, and whole parameters freed after forward. A `ValueError` where there
    are no ranks, or the model is sharded already.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give at least 1")
    root = profile.modules[""]
    if root.local_parameter_bytes != root.parameter_bytes:
        raise ValueError(
            f"ranks={ranks}: the model is sharded already, and its memory is that of one rank"
        )
    moments = tuple(_moments(profile))
    if not moments:
        return ()
    sizes = _sizes(profile, max(each.live.optimizer_state for each in moments))
    peaks = (
        max(
            (_on_a_rank(each, sizes, level, ranks) for each in _and_the_end(moments, sizes, level)),
            key=lambda each: each.total_bytes,
        )
        for level in (1, 2, 3)
    )
    return tuple(replace(each, room=room(each.total_bytes, chip, ranks=ranks)) for each in peaks)


def _moments(profile: Profile) -> Iterator[_Moment]:
    if profile.memory is None:
        return
    blocks = set(blocks_of(profile))
    seen: set[str] = set()
    gradients = 0
    for each in profile.memory.timeline:
        row = each.module
        is_in_block = not blocks.isdisjoint(ancestry(row))
        if (
            each.phase == "backward"
            and not is_in_block
            and row not in seen
            and row in profile.modules
        ):
            seen.add(row)
            gradients += _own_trained(profile, row)
        more = max((each.highest_bytes or 0) - each.live_bytes, 0)
        yield _Moment(each.phase, each.by_category, more, gradients, is_in_block)
        if each.phase == "optimizer":
            gradients = 0


def _own_trained(profile: Profile, row: str) -> int:
    below = (
        name for name in profile.modules if name and name.rpartition(".")[0] == row and name != row
    )
    module = profile.modules[row]
    return max(
        module.trainable_parameter_bytes
        - sum(profile.modules[name].trainable_parameter_bytes for name in below),
        0,
    )


def _sizes(profile: Profile, state: int) -> _Sizes:
    root = profile.modules[""]
    blocks = [profile.modules[block] for block in blocks_of(profile)]
    return _Sizes(
        parameters=root.parameter_bytes,
        gradients=root.trainable_parameter_bytes,
        block=max((block.parameter_bytes for block in blocks), default=0),
        block_gradients=max((block.trainable_parameter_bytes for block in blocks), default=0),
        rest=root.parameter_bytes - sum(block.parameter_bytes for block in blocks),
        rest_gradients=root.trainable_parameter_bytes
        - sum(block.trainable_parameter_bytes for block in blocks),
        state=state,
    )


def _and_the_end(moments: tuple[_Moment, ...], sizes: _Sizes, level: int) -> Iterator[_Moment]:
    """The moments, and the end of backward in which ZeRO-3 reduces the gradients outside of blocks, with a buffer as large."""
    yield from moments
    last = next((each for each in reversed(moments) if each.phase == "backward"), None)
    if last is not None and level == 3:
        live = last.live._replace(
            gradients=sizes.gradients, temporary=last.live.temporary + sizes.rest_gradients
        )
        # By then the parameters outside of blocks are sharded again, and no block is at work.
        yield _Moment("other", live, 0, sizes.rest_gradients, is_in_block=False)


def _on_a_rank(moment: _Moment, sizes: _Sizes, level: int, ranks: int) -> Sharded:
    """One moment under a stage of ZeRO.

    1 divides the optimizer's state, 2 also gradients, 3 also parameters.
    """
    phase, live, more, root_gradients, is_in_block = moment
    in_optimizer = phase == "optimizer"
    divided = ranks if in_optimizer else 1
    working = phase in PASS_PHASES
    gathered = 0
    if level == 3:
        gathered = root_gradients
        # The last collective's buffer stays until the next; a block at work is gathered besides.
        gathered += sizes.rest + sizes.block if working else 0
        if working and is_in_block:
            # In backward also its gradients so far, and the buffer that reduces the last block's.
            gathered += sizes.block + min(
                max(live.gradients - root_gradients, 0), 2 * sizes.block_gradients
            )
    elif level == 2 and phase in ("backward", "recompute"):
        gathered = sizes.block_gradients
    parameters = _part(sizes.parameters, ranks if level == 3 else 1)
    gradients = _part(live.gradients, ranks if level >= 2 else 1)
    state = _part(sizes.state, ranks)
    rest = live.activations + live.other + _part(live.temporary + more, divided)
    gathered = gathered if ranks > 1 else 0
    return Sharded(
        strategy=STRATEGIES[level - 1],
        ranks=ranks,
        phase="backward" if phase == "other" else phase,
        total_bytes=parameters + gradients + state + gathered + rest,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_state_bytes=state,
        gathered_bytes=gathered,
        rest_bytes=rest,
    )


def _part(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)

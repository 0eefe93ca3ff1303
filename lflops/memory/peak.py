"""Analyze the peak memory of a step: the modules that hold it, and ways to lower it.

The ways to lower the peak include activation checkpointing of each block (a repeated module such as
`layers.0`).

For DeepSpeed's ZeRO, the peak of one rank is computed from the recorded step of an unsharded model:
at each operator, the parts of the model that ZeRO shards are divided by the number of ranks, and
the parts that ZeRO gathers are added. For DDP and FSDP2, this computation is not necessary, because
an estimate runs the model with the real wrapper.

This module also checks whether a step fits on a chip. A step needs memory for tensors, the driver,
libraries and the allocator. The constants for the driver and the libraries are upper bounds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.hardware.chips import HOPPER, Hardware
from lflops.profile.module_names import ancestry, fold_repeats
from lflops.profile.profile import Memory, Moment, Profile
from lflops.profile.records import PASS_PHASES, ByCategory, Phase
from lflops.profile.series import grouped, sums

Verdict = Literal["fits", "tight", "fits, with retries", "does not fit"]

USABLE = 0.985
"""Share of a chip's memory that a process can use.

It is a default for chips whose usable memory is not in the table of chips. For chips with HBM, the
table has shares from 0.985 to 0.992.
"""

CONTEXT_BYTES = 750 * 2**20
"""Bytes of the CUDA context if torch loads kernels only when they are needed.

Measured on an H100 with torch 2.11 and CUDA 13.0: 619 MiB after one kernel, and 749 MiB after
matmuls in two dtypes. Others report 426 MiB with torch 2.10 on an RTX 6000 Ada before any kernel
(https://github.com/unslothai/unsloth-zoo/pull/1053), and about 400 MiB
(https://github.com/pytorch/pytorch/issues/109888).
"""

CUBLAS_BYTES = 8320 * 2**10
HOPPER_CUBLAS_BYTES = 32 * 2**20
"""Bytes of cuBLAS's workspace for one stream, which torch allocates.

`CUBLAS_BYTES` is for all chips except Hopper. It is torch's default, `:4096:2:16:8`: two buffers of
4096 KiB and eight of 16 KiB. torch uses more on Hopper, as the documentation of cuBLAS recommends
(https://github.com/pytorch/pytorch/pull/89027). The thread that runs backward has a second
workspace, as measured on an H100.
"""

NCCL_BYTES = 1_600_000_000
"""Bytes of one NCCL communicator after an all-reduce (https://github.com/NVIDIA/nccl/issues/864).

The bytes grow with the number of NCCL's channels. Over PCIe, NCCL uses fewer channels. If ranks
also send to each other directly, NCCL uses more memory.
"""

FRAGMENTATION = 0.05
"""Additional memory that the allocator reserves because of fragmentation, as a share of the peak.

This estimate is used only if the allocator was not simulated.
"""

TIGHT = 0.05
"""A step is a tight fit if less than this share of the usable memory is left.

A tight step might not fit with longer sequences, or with another version of a library.
"""


class MemoryFit(Struct, frozen=True, kw_only=True):
    """The memory that a step needs on a chip, and whether the chip has enough memory.

    Attributes:
        verdict: `fits`; `does not fit`; `tight` if less than 5 % of the usable memory is left; or
            `fits, with retries` if the allocator must free its cache and try again, while the
            device waits.
        chip: Name of the chip.
        usable_bytes: Memory of the device that a process can use.
        needed_bytes: The sum of the bytes of all the following parts.
        tensor_bytes: Peak of live tensors.
        fragmentation_bytes: Memory that the allocator reserves beyond the peak. It is simulated, or
            a fixed share of the peak.
        fragmentation_simulated: Whether the allocator was simulated.
        context_bytes: Memory of the driver for this process.
        workspace_bytes: Workspaces of cuBLAS, for the threads of forward and backward.
        collective_bytes: Memory of NCCL; 0 for a run with one rank.
    """

    verdict: Verdict
    chip: str
    usable_bytes: int
    needed_bytes: int
    tensor_bytes: int
    fragmentation_bytes: int
    fragmentation_simulated: bool
    context_bytes: int
    workspace_bytes: int
    collective_bytes: int


def usable_bytes(chip: Hardware) -> int | None:
    """Return the memory of a chip that a process can use; `None` if it is unknown."""
    if chip.usable_bytes is not None:
        return int(chip.usable_bytes)
    if chip.memory_bytes is None:
        return None
    return int(chip.memory_bytes * USABLE)


def memory_fit(
    tensor_bytes: int,
    chip: Hardware | None,
    *,
    ranks: int = 1,
    reserved_bytes: int | None = None,
    retries: int | None = 0,
) -> MemoryFit | None:
    """Compare the peak of live tensors with the memory of a chip.

    Return `None` if the memory of the chip is unknown.

    Args:
        tensor_bytes: The peak of live tensors in bytes.
        chip: The chip.
        ranks: The number of ranks. With several ranks, the memory of NCCL is added.
        reserved_bytes: The memory that a simulated allocator reserves; `None` if the allocator was
            not simulated.
        retries: Number of times that the simulated allocator freed its cache to get memory.
    """
    if chip is None or chip.memory_bytes is None:
        return None
    usable = usable_bytes(chip) or 0
    fragmentation = int(tensor_bytes * FRAGMENTATION)
    if reserved_bytes is not None:
        fragmentation = reserved_bytes - tensor_bytes
    is_hopper = chip.name.split()[0] in HOPPER
    # One workspace for the thread of forward, and one for the thread of backward.
    cublas = 2 * (HOPPER_CUBLAS_BYTES if is_hopper else CUBLAS_BYTES)
    nccl = NCCL_BYTES if ranks > 1 else 0
    needed = tensor_bytes + fragmentation + CONTEXT_BYTES + cublas + nccl
    verdict: Verdict = "fits"
    if needed > usable:
        verdict = "does not fit"
    elif retries:
        verdict = "fits, with retries"
    elif needed > usable * (1 - TIGHT):
        verdict = "tight"
    return MemoryFit(
        verdict=verdict,
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


def memory_fit_of(profile: Profile, chip: Hardware | None) -> MemoryFit | None:
    """Compare the memory that the step of a profile needs with the memory of a chip.

    Returns `None` if the memory of the step was not counted, or the memory of the chip is unknown.
    """
    memory = profile.memory
    if memory is None:
        return None
    ranks = profile.run.world_size
    reserved = memory.reserved
    if reserved is None:
        return memory_fit(memory.peak_bytes, chip, ranks=ranks)
    return memory_fit(
        memory.peak_bytes,
        chip,
        ranks=ranks,
        reserved_bytes=reserved.reserved_bytes,
        retries=reserved.retries,
    )


def allocator_limit(chip: Hardware | None, *, ranks: int = 1) -> int | None:
    """Return the bytes that the allocator can reserve on a chip, or `None` if they are unknown."""
    empty = memory_fit(0, chip, ranks=ranks)
    if empty is None:
        return None
    return empty.usable_bytes - empty.needed_bytes


class Holder(Struct, frozen=True, kw_only=True):
    """The memory that a module holds at the peak: its parameters and the tensors that it allocated.

    Repeated modules such as `layers.*.mlp` are merged into one entry. It contains the number of
    modules and the sum of their bytes.
    """

    name: str
    modules: int
    bytes: int


class Storages(Struct, frozen=True, kw_only=True):
    """Storages that are alive at the peak and have the same size and origin.

    The origin is the operator, phase and module that allocated them. Repeated modules such as
    `layers.*.mlp` count as one module.

    Attributes:
        module: The module that holds the storages, or the common name of repeated modules.
        pattern: Name of the entry in the result of `memory_holders` that includes these modules.
        number: Number of storages.
        each_bytes: Bytes of each storage.
    """

    category: str
    operator: str
    phase: Phase
    module: str
    pattern: str
    number: int
    each_bytes: int


def fold_storages(memory: Memory, patterns: Mapping[str, str]) -> tuple[Storages, ...]:
    """Return the storages that are alive at the peak, sorted by size in descending order.

    Storages of the same size and origin in repeated modules are merged into one entry.

    Args:
        memory: The memory of the step.
        patterns: The common name of repeated modules, such as `layers.*.mlp`, keyed by module.
    """
    held: dict[str, str] = {}
    for label, modules in _folded(memory, patterns):
        for module, _ in modules:
            held[module] = label
    folded = fold_repeats(
        memory.alive,
        lambda each: (each.module, each.category, each.operator, each.phase, each.bytes),
        patterns,
    )
    rows = []
    for label, same in folded:
        first = same[0]
        row = Storages(
            pattern=held.get(first.module, first.module),
            category=first.category,
            operator=first.operator,
            phase=first.phase,
            module=label,
            number=len(same),
            each_bytes=first.bytes,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda storages: -storages.each_bytes))


def memory_holders(memory: Memory, patterns: Mapping[str, str]) -> tuple[Holder, ...]:
    """Return the modules that hold memory at the peak, sorted by bytes in descending order.

    Repeated modules are merged into one entry.

    Args:
        memory: The memory of the step.
        patterns: The common name of repeated modules, such as `layers.*.mlp`, keyed by module.
    """
    rows = []
    for label, items in _folded(memory, patterns):
        held = sum(nbytes for _, nbytes in items)
        rows.append(Holder(name=label, modules=len(items), bytes=held))
    return tuple(sorted(rows, key=lambda holder: -holder.bytes))


def _folded(memory: Memory, patterns: Mapping[str, str]) -> list[tuple[str, list[tuple[str, int]]]]:
    return fold_repeats(
        ((module, nbytes) for module, nbytes in memory.by_module.items() if nbytes),
        lambda item: item[:1],
        patterns,
    )


def peak_moment(memory: Memory) -> Moment | None:
    """Return the operator that reached the peak, or `None` if the timeline does not contain it."""
    for moment in memory.timeline:
        if moment.index == memory.peak_index:
            return moment
    return None


def blocks_of(profile: Profile) -> list[str]:
    """Return the blocks of the model, such as `layers.0`.

    These are the outermost modules with a number as the last part of their name.
    """
    blocks = []
    for name in profile.modules:
        if _is_numbered(name) and not any(map(_is_numbered, ancestry(name)[1:])):
            blocks.append(name)
    return blocks


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdecimal()


class Checkpointed(Struct, frozen=True, kw_only=True):
    """The effect of activation checkpointing on one block.

    Attributes:
        module: Name of the block.
        saved_bytes: Bytes of the block's activations that are alive at the peak. This is an upper
            bound on the saving.
        macs: MACs of the block's forward, which runs a second time.
        flops: FLOPs of the block's forward, which runs a second time.
    """

    module: str
    saved_bytes: int
    macs: int
    flops: int


def checkpointed(profile: Profile) -> tuple[Checkpointed, ...]:
    """Return the effect of checkpointing each block alone, sorted by saving in descending order.

    A block that is already checkpointed is left out. The result is empty if memory was not counted,
    or if the step has no backward.
    """
    if profile.memory is None or all(count.phase != "backward" for count in profile.op_counts):
        return ()
    activations: Counter[str] = Counter()
    for owner, nbytes in profile.memory.activations_by_module.items():
        for name in ancestry(owner):
            activations[name] += nbytes
    blocks: list[Checkpointed] = []
    for name in blocks_of(profile):
        module = profile.modules[name]
        forward = module.forward
        # A little recomputation is no sign of checkpointing: fused attention always recomputes a
        # part of its work.
        is_checkpointed = 2 * module.recompute.macs >= forward.macs > 0
        if activations[name] and not is_checkpointed:
            block = Checkpointed(
                module=name, saved_bytes=activations[name], macs=forward.macs, flops=forward.flops
            )
            blocks.append(block)
    return tuple(sorted(blocks, key=lambda block: -block.saved_bytes))


class Saving(Struct, frozen=True, kw_only=True):
    """A way to lower the peak.

    Attributes:
        kind: The method. `checkpoint`: checkpoint blocks. `gradients`: free gradients before the
            forward. `fused_optimizer`: update parameters in place. `chunked_loss`: compute the loss
            in chunks.
        module: For `checkpoint`, the block, or the common name of repeated blocks such as
            `layers.*`. Empty for the other methods.
        modules: For `checkpoint`, the number of blocks. 0 for the other methods.
        bytes: An upper bound on the saving. The real saving may be smaller, because the memory may
            then have its peak at another operator.
        macs: Additional MACs in a step.
    """

    kind: Literal["checkpoint", "gradients", "fused_optimizer", "chunked_loss"]
    module: str
    modules: int
    bytes: int
    macs: int


# Smallest share of the peak that the logits must take for a chunked loss to be suggested.
LARGE = 0.25


def memory_savings(
    memory: Memory | None,
    reached: Moment | None,
    checkpointed: Sequence[Checkpointed],
    patterns: Mapping[str, str],
) -> tuple[Saving, ...]:
    """Return the ways to lower the peak, sorted by saving in descending order.

    Args:
        memory: The memory of the step. If it is `None`, the result is empty.
        reached: The operator that reached the peak.
        checkpointed: The effect of checkpointing each block.
        patterns: The common name of repeated modules, such as `layers.*`, keyed by module.
    """
    if memory is None:
        return ()
    found = list(_checkpoints(checkpointed, patterns))
    gradients = memory.by_category.get("gradients", 0)
    temporary = memory.by_category.get("temporary", 0)
    logits = _of_logits(memory)
    if reached is not None and reached.phase == "forward" and gradients:
        found.append(Saving(kind="gradients", module="", modules=0, bytes=gradients, macs=0))
    if reached is not None and reached.phase == "optimizer" and temporary:
        found.append(Saving(kind="fused_optimizer", module="", modules=0, bytes=temporary, macs=0))
    if logits >= LARGE * memory.peak_bytes:
        found.append(Saving(kind="chunked_loss", module="", modules=0, bytes=logits, macs=0))
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


def _of_logits(memory: Memory) -> int:
    """Return how many bytes the logits take at the memory peak.

    The softmax of the logits, and their casts and gradients, are included.

    The softmax is recognized by the name of its operator. A tensor counts as the logits, or as a
    cast or gradient of the logits, if it has the size of the softmax, half of this size, or twice
    this size.
    """
    sizes: set[int] = set()
    for each in memory.alive:
        if each.operator.startswith("_log_softmax"):
            sizes |= {each.bytes // 2, each.bytes, 2 * each.bytes}
    nbytes = 0
    for each in memory.alive:
        if each.bytes in sizes and each.category in ("activations", "temporary"):
            nbytes += each.bytes
    return nbytes


def _checkpoints(checkpointed: Sequence[Checkpointed], patterns: Mapping[str, str]) -> list[Saving]:
    """Return the savings by checkpointing, with one entry for all repeated blocks.

    While a checkpointed block is recomputed, its activations take memory again. Therefore the
    saving for repeated blocks is the memory of all their activations, minus the activations of the
    largest block.
    """
    savings: list[Saving] = []
    places = grouped(checkpointed, lambda block: patterns.get(block.module, block.module))
    for pattern, blocks in places.items():
        name = blocks[0].module
        totals = sums(blocks, "saved_bytes", "macs")
        saved = totals["saved_bytes"]
        if len(blocks) > 1:
            name = pattern
            saved -= max(block.saved_bytes for block in blocks)
        if saved:
            saving = Saving(
                kind="checkpoint",
                module=name,
                modules=len(blocks),
                bytes=saved,
                macs=totals["macs"],
            )
            savings.append(saving)
    return savings


Strategy = Literal["ZeRO-1", "ZeRO-2", "ZeRO-3"]
STRATEGIES: tuple[Strategy, ...] = ("ZeRO-1", "ZeRO-2", "ZeRO-3")


class Sharded(Struct, frozen=True, kw_only=True):
    """The peak memory of one rank under a stage of ZeRO.

    Attributes:
        strategy: The stage of ZeRO.
        ranks: Number of data-parallel ranks.
        phase: The phase in which the peak is reached.
        total_bytes: The sum of all the following parts, at the peak.
        parameter_bytes: The rank's part of the parameters.
        gradient_bytes: The rank's part of the gradients, after they are reduced.
        optimizer_state_bytes: The rank's part of the optimizer's state.
        gathered_bytes: Unsharded parameters and gradients of the running blocks, and the buffers of
            their collectives.
        rest_bytes: Activations, temporary and other tensors.
        memory_fit: Whether the peak fits on the chip; `None` without a chip.
    """

    strategy: Strategy
    ranks: int
    phase: Phase
    total_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    gathered_bytes: int
    rest_bytes: int
    memory_fit: MemoryFit | None = None


class _Moment(NamedTuple):
    """The memory of the unsharded model while one operator of the step runs.

    Attributes:
        phase: The phase of the step.
        live: Live bytes by category, before the operator runs.
        more: The most additional bytes that are alive at one time while the operator runs.
        root_gradients: Bytes of the gradients that backward has already computed for modules
            outside the blocks.
        is_in_block: Whether the operator runs in a block, such as `layers.0`.
    """

    phase: Phase
    live: ByCategory
    more: int
    root_gradients: int
    is_in_block: bool


class _Sizes(NamedTuple):
    """The sizes of a model's parameters, gradients and optimizer state, in bytes.

    Attributes:
        parameters: All parameters.
        gradients: All gradients.
        block: Parameters of the largest block.
        block_gradients: Gradients of the largest block.
        rest: Parameters outside the blocks.
        rest_gradients: Gradients outside the blocks.
        state: The complete state of the optimizer.
    """

    parameters: int
    gradients: int
    block: int
    block_gradients: int
    rest: int
    rest_gradients: int
    state: int


def sharded(profile: Profile, ranks: int, chip: Hardware | None = None) -> tuple[Sharded, ...]:
    """Return the peak of one rank under each stage of ZeRO.

    The result is empty if live memory by operator is unknown. If a size is not divisible by the
    number of ranks, each rank's part is rounded up. ZeRO-3 is assumed to work in the same way as
    FSDP2: it shards each block and the rest of the model separately, prefetches one block, and
    frees unsharded parameters after forward.

    Raises:
        ValueError: `ranks` is less than 1, or the model is already sharded.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: pass at least 1")
    root = profile.modules[""]
    if root.local_parameter_bytes != root.parameter_bytes:
        raise ValueError(
            f"ranks={ranks}: the model is already sharded, so its memory is already the memory of "
            "one rank: leave ranks out"
        )
    moments = tuple(_moments(profile))
    if not moments:
        return ()
    sizes = _sizes(profile, max(each.live.optimizer_state for each in moments))
    peaks: list[Sharded] = []
    for level in (1, 2, 3):
        step = _with_end_of_backward(moments, sizes, level)
        on_rank = [_on_a_rank(moment, sizes, level, ranks) for moment in step]
        peak = max(on_rank, key=lambda each: each.total_bytes)
        peaks.append(replace(peak, memory_fit=memory_fit(peak.total_bytes, chip, ranks=ranks)))
    return tuple(peaks)


def _moments(profile: Profile) -> Iterator[_Moment]:
    if profile.memory is None:
        return
    blocks = set(blocks_of(profile))
    seen: set[str] = set()
    gradients = 0
    for each in profile.memory.timeline:
        name = each.module
        is_in_block = not blocks.isdisjoint(ancestry(name))
        is_new = name not in seen and name in profile.modules
        if each.phase == "backward" and not is_in_block and is_new:
            seen.add(name)
            gradients += _self_trainable_bytes(profile, name)
        more = max((each.highest_bytes or 0) - each.live_bytes, 0)
        yield _Moment(each.phase, each.by_category, more, gradients, is_in_block)
        if each.phase == "optimizer":
            gradients = 0


def _self_trainable_bytes(profile: Profile, name: str) -> int:
    """Return the bytes of a module's trainable parameters, without its submodules."""
    nbytes = profile.modules[name].trainable_parameter_bytes
    for other, module in profile.modules.items():
        if other and other.rpartition(".")[0] == name:
            nbytes -= module.trainable_parameter_bytes
    return max(nbytes, 0)


def _sizes(profile: Profile, state: int) -> _Sizes:
    root = profile.modules[""]
    parameters = [0]
    gradients = [0]
    for name in blocks_of(profile):
        block = profile.modules[name]
        parameters.append(block.parameter_bytes)
        gradients.append(block.trainable_parameter_bytes)
    return _Sizes(
        parameters=root.parameter_bytes,
        gradients=root.trainable_parameter_bytes,
        block=max(parameters),
        block_gradients=max(gradients),
        rest=root.parameter_bytes - sum(parameters),
        rest_gradients=root.trainable_parameter_bytes - sum(gradients),
        state=state,
    )


def _with_end_of_backward(
    moments: tuple[_Moment, ...], sizes: _Sizes, level: int
) -> Iterator[_Moment]:
    """Yield the memory at each operator and, for ZeRO-3, the memory at the end of backward.

    At the end of backward, no operator of the model runs. But ZeRO-3 then reduces the gradients of
    the parameters that are in no block. This needs a buffer as large as these gradients.
    """
    yield from moments
    if level < 3:
        return
    for moment in reversed(moments):
        if moment.phase == "backward":
            temporary = moment.live.temporary + sizes.rest_gradients
            live = moment.live._replace(gradients=sizes.gradients, temporary=temporary)
            # The parameters outside the blocks are sharded again, and no block runs.
            yield _Moment("other", live, 0, sizes.rest_gradients, is_in_block=False)
            return


def _on_a_rank(moment: _Moment, sizes: _Sizes, level: int, ranks: int) -> Sharded:
    """Return the memory of one rank while one operator runs, under a stage of ZeRO.

    Stage 1 shards the optimizer's state. Stage 2 also shards gradients, and stage 3 also shards
    parameters.
    """
    phase = moment.phase
    live = moment.live
    gathered = 0
    if ranks > 1:
        gathered = _gathered(moment, sizes, level)
    parameters = sizes.parameters
    if level == 3:
        parameters = _part(parameters, ranks)
    gradients = live.gradients
    if level >= 2:
        gradients = _part(gradients, ranks)
    state = _part(sizes.state, ranks)
    temporary = live.temporary + moment.more
    if phase == "optimizer":
        temporary = _part(temporary, ranks)
    rest = live.activations + live.other + temporary
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


def _gathered(moment: _Moment, sizes: _Sizes, level: int) -> int:
    """Return the bytes that a rank holds in addition to its own part of the sharded tensors.

    These are the unsharded parameters and gradients of the running blocks, and the buffers of their
    collectives.
    """
    if level == 2 and moment.phase in ("backward", "recompute"):
        return sizes.block_gradients
    if level < 3:
        return 0
    gathered = moment.root_gradients
    if moment.phase not in PASS_PHASES:
        return gathered
    # The buffer of the last collective, with the size of a block, stays until the next collective.
    gathered += sizes.rest + sizes.block
    if moment.is_in_block:
        # The parameters of the running block. In backward, its gradients so far and the buffer for
        # reducing the gradients of the previous block are added.
        gradients = max(moment.live.gradients - moment.root_gradients, 0)
        gathered += sizes.block + min(gradients, 2 * sizes.block_gradients)
    return gathered


def _part(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)

"""What each rank needs under DeepSpeed's ZeRO, by arithmetic: parameters, gradients and optimizer state are divided over ranks.

The step of one rank is replayed: at each operator the bytes that a strategy divides are divided, and what it gathers is added. For DDP
and FSDP2 an estimate wraps the model for real, which is more exact; ZeRO needs DeepSpeed's engine.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analyze.memory.peak import blocks_of
from lflops.analyze.memory.room import Room, room
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile
from lflops.profile.module_names import ancestry
from lflops.profile.records import ByCategory, Phase

Strategy = Literal["ZeRO-1", "ZeRO-2", "ZeRO-3"]
STRATEGIES: tuple[Strategy, ...] = ("ZeRO-1", "ZeRO-2", "ZeRO-3")


class Sharded(Struct, frozen=True, kw_only=True):
    """The peak of one rank. The parts are those of that moment and add up to `total_bytes`."""

    strategy: Strategy
    ranks: int
    phase: Phase  # when the peak is reached
    total_bytes: int
    parameter_bytes: int  # the rank's own
    gradient_bytes: int  # the rank's own, in parts after they are reduced
    optimizer_state_bytes: int  # the rank's own
    gathered_bytes: int  # whole parameters and gradients of the blocks at work, and the buffers of their collectives
    rest_bytes: int  # activations, temporary and other tensors
    room: Room | None = None  # whether that fits on the chip; `None` without one


class _Moment(NamedTuple):
    """What is alive in the step of one rank, unsharded."""

    phase: Phase
    live: ByCategory
    more: int  # bytes alive for a part of the operator, besides those by category
    root_gradients: int  # bytes of the gradients that modules outside of blocks have by now
    is_in_block: bool  # whether a block is at work


class _Sizes(NamedTuple):
    parameters: int
    gradients: int
    block: int  # the largest block's parameters
    block_gradients: int  # those of them that are trained
    rest: int  # parameters outside of all blocks
    rest_gradients: int  # those of them that are trained
    state: int  # the optimizer's, once it has all of it


def sharded(profile: Profile, ranks: int, chip: Hardware | None = None) -> tuple[Sharded, ...]:
    """Each strategy's peak over a number of data-parallel ranks; none where live memory by operator is unknown.

    Uneven parts are rounded up. ZeRO-3 is taken to divide as FSDP2 does: each block and the rest, with one block prefetched, and
    whole parameters freed after forward. A `ValueError` where there are no ranks, or the model is sharded already.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give at least 1")
    root = profile.modules[""]
    if root.local_parameter_bytes != root.parameter_bytes:
        raise ValueError(f"ranks={ranks}: the model is sharded already, and its memory is that of one rank")
    moments = tuple(_moments(profile))
    if not moments:
        return ()
    sizes = _sizes(profile, max(each.live.optimizer_state for each in moments))
    peaks = (
        max((_on_a_rank(each, sizes, level, ranks) for each in _and_the_end(moments, sizes, level)), key=lambda each: each.total_bytes)
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
        if each.phase == "backward" and not is_in_block and row not in seen and row in profile.modules:
            seen.add(row)
            gradients += _own_trained(profile, row)
        more = max((each.highest_bytes or 0) - each.live_bytes, 0)
        yield _Moment(each.phase, each.by_category, more, gradients, is_in_block)
        if each.phase == "optimizer":
            gradients = 0


def _own_trained(profile: Profile, row: str) -> int:
    below = (name for name in profile.modules if name and name.rpartition(".")[0] == row and name != row)
    module = profile.modules[row]
    return max(module.trainable_parameter_bytes - sum(profile.modules[name].trainable_parameter_bytes for name in below), 0)


def _sizes(profile: Profile, state: int) -> _Sizes:
    root = profile.modules[""]
    blocks = [profile.modules[block] for block in blocks_of(profile)]
    return _Sizes(
        parameters=root.parameter_bytes,
        gradients=root.trainable_parameter_bytes,
        block=max((block.parameter_bytes for block in blocks), default=0),
        block_gradients=max((block.trainable_parameter_bytes for block in blocks), default=0),
        rest=root.parameter_bytes - sum(block.parameter_bytes for block in blocks),
        rest_gradients=root.trainable_parameter_bytes - sum(block.trainable_parameter_bytes for block in blocks),
        state=state,
    )


def _and_the_end(moments: tuple[_Moment, ...], sizes: _Sizes, level: int) -> Iterator[_Moment]:
    """The moments, and the end of backward in which ZeRO-3 reduces the gradients outside of blocks, with a buffer as large."""
    yield from moments
    last = next((each for each in reversed(moments) if each.phase == "backward"), None)
    if last is not None and level == 3:
        live = last.live._replace(gradients=sizes.gradients, temporary=last.live.temporary + sizes.rest_gradients)
        # By then the parameters outside of blocks are sharded again, and no block is at work.
        yield _Moment("other", live, 0, sizes.rest_gradients, is_in_block=False)


def _on_a_rank(moment: _Moment, sizes: _Sizes, level: int, ranks: int) -> Sharded:
    """One moment under a stage of ZeRO: 1 divides the optimizer's state, 2 also gradients, 3 also parameters."""
    phase, live, more, root_gradients, is_in_block = moment
    in_optimizer = phase == "optimizer"
    divided = ranks if in_optimizer else 1
    working = phase in ("forward", "backward", "recompute")
    gathered = 0
    if level == 3:
        gathered = root_gradients
        # The last collective's buffer stays until the next; a block at work is gathered besides.
        gathered += sizes.rest + sizes.block if working else 0
        if working and is_in_block:
            # In backward also its gradients so far, and the buffer that reduces the last block's.
            gathered += sizes.block + min(max(live.gradients - root_gradients, 0), 2 * sizes.block_gradients)
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

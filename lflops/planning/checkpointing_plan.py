"""A plan of activation checkpointing: what each block recomputes, as a value, a table and code."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct

from lflops import units
from lflops.analyze.memory.room import Room
from lflops.collect.estimate.changes import KEPT, POLICIES, Policy
from lflops.profile.model import Profile

_HEADS = ("recomputed", "peak", "saved", "FLOPs more", "of the step's", "time more")


class Alternative(Struct, frozen=True, kw_only=True):
    """One way to checkpoint a model."""

    policy: str  # the policy of every block; `best` for the plan's own
    peak_bytes: int  # the peak of live tensors
    estimated: bool  # whether a whole estimate says so; else it follows from the blocks of other estimates
    flops: int  # FLOPs that run once more
    seconds: float | None  # the least time that they take on the chip; `None` where no chip is known


class CheckpointingPlan(Struct, frozen=True, kw_only=True):
    """What each block recomputes, so that a step fits into a budget at the least cost."""

    policies: Mapping[str, Policy]  # by block, in the order of their forward
    memory_bytes: int  # the budget for live tensors
    fits: bool  # whether the estimate of the step with these policies is within the budget. If not, it is the lowest peak that was found.
    predicted_bytes: int  # the peak that the blocks' bytes add up to
    alternatives: tuple[Alternative, ...]  # the same policy for every block, and the plan
    profile: Profile  # the estimate of the step with these policies
    estimates: int  # how many estimates were made
    room: Room | None = None  # what the step needs of the chip, where its memory is the budget

    @property
    def peak_bytes(self) -> int:
        """The peak of live tensors, by the estimate of the whole step."""
        return 0 if self.profile.memory is None else self.profile.memory.peak_bytes

    def table(self) -> str:
        """The alternatives and the plan, a line each."""
        plain = self.alternatives[0]
        total = sum(cell.flops for cell in self.profile.cells) - self.alternatives[-1].flops
        rows: list[tuple[str, ...]] = [("", *_HEADS)]
        for each in self.alternatives:
            more = units.count(each.flops), units.percent(each.flops / total if total else None), units.duration(each.seconds)
            saved = units.size(plain.peak_bytes - each.peak_bytes)
            rows.append((each.policy, self._recomputed(each.policy), units.size(each.peak_bytes), saved, *more))
        if all(each.seconds is None for each in self.alternatives):
            rows = [row[:-1] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        """The chip's verdict where its memory is the budget, so that it is the same as in the estimate."""
        lowest = "" if self.fits else ", this is the lowest peak"
        if self.room is not None:
            needed, usable = units.size(self.room.needed_bytes), units.size(self.room.usable_bytes)
            return f"{self.room.verdict}{lowest}: {needed} of {usable} on {self.room.chip}."
        verdict = "fits" if self.fits else "does not fit"
        return f"{verdict}{lowest}: {units.size(self.peak_bytes)} of {units.size(self.memory_bytes)} for tensors."

    def code(self) -> str:
        """Python code that applies the plan to `model`, before it is wrapped or compiled."""
        used = [policy for policy in POLICIES[1:] if policy in self.policies.values()]
        if not used:
            return "# nothing to recompute\n"
        selective = "selective" in used
        lines = ["from functools import partial", ""]
        lines += ["import torch"] if selective else []
        lines += [f"from torch.utils.checkpoint import checkpoint{', create_selective_checkpoint_contexts' if selective else ''}", "", ""]
        lines += ["def recompute(block, **how):"]
        lines += ["    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **how)", "", ""]
        if selective:
            kept = (f"    torch.ops.aten.{name}.default," for name in KEPT)
            lines += ["kept = [", *kept, "]", "selective = partial(create_selective_checkpoint_contexts, kept)"]
        for policy in used:
            how = ", context_fn=selective" if policy == "selective" else ""
            lines += _loops([block for block, each in self.policies.items() if each == policy], how)
        return "\n".join(lines) + "\n"

    def _recomputed(self, policy: str) -> str:
        if policy != "best":
            return "0" if policy == "none" else str(len(self.policies))
        numbers = {each: sum(chosen == each for chosen in self.policies.values()) for each in POLICIES[1:]}
        return ", ".join(f"{number} {each}" for each, number in numbers.items() if number) or "0"


def _loops(blocks: Sequence[str], how: str) -> Iterator[str]:
    """Lines that recompute blocks; those that a container numbers in a row are one loop."""
    numbered = [(*block.rpartition(".")[::2], place) for place, block in enumerate(blocks)]
    for (container, _), some in groupby(numbered, lambda each: (each[0], int(each[1]) - each[2])):
        numbers = [int(number) for _, number, _ in some]
        prefix = f"{container}." if container else ""
        yield f"for index in range({numbers[0]}, {numbers[-1] + 1}):"
        yield f'    recompute(model.get_submodule(f"{prefix}{{index}}"){how})'

"""`best_checkpointing`.

Which blocks to recompute for a budget of bytes at the least cost, from a few estimates.

The plan is a value, with a table and code.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from lflops import units
from lflops.errors import CountError
from lflops.estimation.changes import KEPT, POLICIES, Policy
from lflops.estimation.estimate import Estimator, Model, Subject, built, checked_model
from lflops.estimation.largest_batch import empty_room
from lflops.estimation.mesh import checked_mesh
from lflops.estimation.optimizer_step import MakesOptimizer
from lflops.estimation.planning.block_chain import Chain, cheapest_choice, lowest_peak
from lflops.estimation.planning.block_trials import FEMTO, BlockTrials, memory_of, policies_of
from lflops.hardware.chips import Hardware
from lflops.inputs.arguments import check_memory
from lflops.inputs.tensors import tensors_in
from lflops.memory.peak import FRAGMENTATION, TIGHT, MemoryFit, room_for
from lflops.profile.profile import Profile

_HEADS = ("recomputed", "peak", "saved", "FLOPs more", "of the step's", "time more")


class Alternative(Struct, frozen=True, kw_only=True):
    """One way to checkpoint a model."""

    # the policy of every block; `best` for the plan's own
    policy: str
    # the peak of live tensors
    peak_bytes: int
    estimated: (
        # whether a whole estimate says so; else it follows from the blocks of other estimates
        bool
    )
    # FLOPs that run once more
    flops: int
    seconds: (
        float | None
        # the least time that they take on the chip; `None` where no chip is known
    )


class CheckpointingPlan(Struct, frozen=True, kw_only=True):
    """What each block recomputes, so that a step fits into a budget at the least cost."""

    # by block, in the order of their forward
    policies: Mapping[str, Policy]
    # the budget for live tensors
    memory_bytes: int
    # whether the estimate of the step with these policies is within the budget. If not, it is the
    # lowest peak that was found.
    fits: bool
    # the peak that the blocks' bytes add up to
    predicted_bytes: int
    # the same policy for every block, and the plan
    alternatives: tuple[Alternative, ...]
    # the estimate of the step with these policies
    profile: Profile
    # how many estimates were made
    estimates: int
    # what the step needs of the chip, where its memory is the budget
    room: MemoryFit | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak of live tensors, by the estimate of the whole step."""
        return 0 if self.profile.memory is None else self.profile.memory.peak_bytes

    def table(self) -> str:
        """The alternatives and the plan, a line each."""
        plain = self.alternatives[0]
        total = sum(cell.flops for cell in self.profile.op_counts) - self.alternatives[-1].flops
        rows: list[tuple[str, ...]] = [("", *_HEADS)]
        for each in self.alternatives:
            more = (
                units.count(each.flops),
                units.percent(each.flops / total if total else None),
                units.duration(each.seconds),
            )
            saved = units.size(plain.peak_bytes - each.peak_bytes)
            rows.append(
                (
                    each.policy,
                    self._recomputed(each.policy),
                    units.size(each.peak_bytes),
                    saved,
                    *more,
                )
            )
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
        lines += [
            f"from torch.utils.checkpoint import checkpoint{', create_selective_checkpoint_contexts' if selective else ''}",
            "",
            "",
        ]
        lines += ["def recompute(block, **how):"]
        lines += [
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **how)",
            "",
            "",
        ]
        if selective:
            kept = (f"    torch.ops.aten.{name}.default," for name in KEPT)
            lines += [
                "kept = [",
                *kept,
                "]",
                "selective = partial(create_selective_checkpoint_contexts, kept)",
            ]
        for policy in used:
            how = ", context_fn=selective" if policy == "selective" else ""
            lines += _loops([block for block, each in self.policies.items() if each == policy], how)
        return "\n".join(lines) + "\n"

    def _recomputed(self, policy: str) -> str:
        if policy != "best":
            return "0" if policy == "none" else str(len(self.policies))
        numbers = {
            each: sum(chosen == each for chosen in self.policies.values()) for each in POLICIES[1:]
        }
        return ", ".join(f"{number} {each}" for each, number in numbers.items() if number) or "0"


def _loops(blocks: Sequence[str], how: str) -> Iterator[str]:
    """Lines that recompute blocks; those that a container numbers in a row are one loop."""
    numbered = [(*block.rpartition(".")[::2], place) for place, block in enumerate(blocks)]
    for (container, _), some in groupby(numbered, lambda each: (each[0], int(each[1]) - each[2])):
        numbers = [int(number) for _, number, _ in some]
        prefix = f"{container}." if container else ""
        yield f"for index in range({numbers[0]}, {numbers[-1] + 1}):"
        yield f'    recompute(model.get_submodule(f"{prefix}{{index}}"){how})'


# how often the budget of the search is lowered by what an estimate needs beyond it
REPAIRS = 3

# the share by which a folded model's prediction may be off the whole model's estimate. Otherwise
# the whole model is tried.
EXACT = 0.001


def best_checkpointing(
    model: Model,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_bytes: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakesOptimizer | None = None,
    hardware: Hardware | str | None = None,
    mesh: Mapping[str, int] | None = None,
    round_to: int = 1,
) -> CheckpointingPlan:
    """Choose what each block recomputes in backward, so that a training step fits into a budget and recomputes as little as possible.

    A block is a module made of others that its container numbers, as `layers.0`. Each recomputes
    nothing, all but its linear layers, convolutions and fused attention (`selective`), or all
    (`full`). A few estimates show what each block keeps; the chosen policies are estimated as a
    whole. Nothing is allocated. The model is not changed: `code()` of the plan has the lines that
    apply it.

    Args:
        model: A module, or a function that builds one, as in `estimate`; its code must not
            checkpoint.
        args: Its positional arguments; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        memory_bytes: The budget for live tensors; `None` is what a step may take that `fits` on the
            chip `hardware`.
        loss: From the output to a scalar, as in `estimate`.
        optimizer: Makes an optimizer from a list of parameters, as in `estimate`.
        hardware: The chip, as in `estimate`. If it is given, the least time on it is minimized,
            else FLOPs are.
        mesh: Ranks by dimension, as in `estimate`; of a built model only.
        round_to: The size of each tensor is rounded up to a multiple of so many bytes, as in
            `estimate`.

    Raises:
        CountError: An argument is wrong, the model has no blocks, or some code needs the value of a
            tensor.
        HardwareError: The chip is unknown.
    """
    caller = "best_checkpointing"
    args = (args,) if isinstance(args, Tensor) else args
    held = checked_model(caller, model, args, kwargs, loss, backward=True, mesh=mesh)
    estimator = Estimator(
        caller=caller,
        backward=True,
        optimizer=optimizer,
        hardware=hardware,
        mesh=checked_mesh(caller, mesh),
        round_to=round_to,
    )
    make = (
        partial(built, model) if mesh else cache(partial(built, model))
        # what is sharded is built for each estimate
    )
    return search(
        estimator,
        lambda: Subject(make(), args, dict(kwargs or {}), loss),
        memory_bytes,
        held=(*held, *tensors_in((args, kwargs))),
    )


def search(
    estimator: Estimator,
    make: Callable[[], Subject],
    memory_bytes: float | None,
    *,
    held: Iterable[Tensor] = (),
) -> CheckpointingPlan:
    """The plan for the step that an estimator runs, which goes backward.

    `held` is as in `Estimator.run`.
    """
    budget = _budget(estimator, memory_bytes)
    with estimator.started(held) as run:
        return _plan(BlockTrials(estimator, run, make), budget, by_room=memory_bytes is None)


def _budget(estimator: Estimator, memory_bytes: Any) -> int:
    if memory_bytes is None:
        empty = empty_room(estimator)
        return int((empty.usable_bytes * (1 - TIGHT) - empty.needed_bytes) / (1 + FRAGMENTATION))
    check_memory(estimator.caller, memory_bytes)
    return int(memory_bytes)


def _plan(trials: BlockTrials, budget: int, *, by_room: bool) -> CheckpointingPlan:
    """Estimate, choose, and estimate what was chosen.

    Of a folded model if that shows the same as the whole one.
    """
    try:
        chain = trials.chain(fold=True)
    except Exception:  # noqa: BLE001 - some models do not run with fewer blocks: what is wrong with the whole one comes up below
        chain = None
    if chain is not None:
        plan = _chosen(trials, chain, budget, by_room=by_room)
        if abs(plan.predicted_bytes - plan.peak_bytes) <= EXACT * plan.peak_bytes:
            return plan
    chain = trials.chain(fold=False)
    if chain is None:
        raise CountError("the whole model has no chain of blocks")
    return _chosen(trials, chain, budget, by_room=by_room)


def _chosen(trials: BlockTrials, chain: Chain, budget: int, *, by_room: bool) -> CheckpointingPlan:
    """The cheapest choice whose estimate is within the budget; the lowest peak if there is none."""
    allowed = budget
    choices = _choice(chain, allowed)
    for _ in range(1 + REPAIRS):
        profile = trials.estimate(policies_of(trials.units, choices))
        beyond = _bytes_over_budget(profile, budget, by_room=by_room)
        allowed -= beyond
        following = _choice(chain, allowed)
        if beyond <= 0 or following == choices:
            break
        choices = following
    best = _alternative(chain, "best", choices)
    return CheckpointingPlan(
        policies=policies_of(trials.units, choices),
        memory_bytes=budget,
        fits=beyond <= 0,
        predicted_bytes=best.peak_bytes,
        alternatives=(
            *(_alternative(chain, policy, [policy] * len(choices)) for policy in POLICIES),
            replace(best, peak_bytes=memory_of(profile).peak_bytes, estimated=True),
        ),
        profile=profile,
        estimates=trials.made,
        room=room_for(profile, profile.run.hardware) if by_room else None,
    )


def _choice(chain: Chain, budget: int) -> tuple[Policy, ...]:
    found = cheapest_choice(chain, POLICIES, budget) or cheapest_choice(
        chain, POLICIES, lowest_peak(chain, POLICIES)
    )
    return cast("tuple[Policy, ...]", found)


def _bytes_over_budget(profile: Profile, budget: int, *, by_room: bool) -> int:
    needs = room_for(profile, profile.run.hardware) if by_room else None
    if needs is None:
        return memory_of(profile).peak_bytes - budget
    return (
        0
        if needs.verdict == "fits"
        else max(1, int(needs.needed_bytes - needs.usable_bytes * (1 - TIGHT)))
    )


def _alternative(chain: Chain, policy: str, choices: Sequence[Policy]) -> Alternative:
    return Alternative(
        policy=policy,
        peak_bytes=chain.peak(choices),
        estimated=False,
        flops=chain.spent(chain.flops, choices),
        seconds=chain.spent(chain.times, choices) * FEMTO if chain.times else None,
    )

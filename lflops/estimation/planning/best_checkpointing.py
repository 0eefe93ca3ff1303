"""`best_checkpointing`: find the cheapest checkpointing of each block for a memory budget.

A few estimates show how many bytes a block needs, and how much it recomputes, under each policy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from lflops import units
from lflops.errors import CountError
from lflops.estimation.changes import POLICIES, SAVED_OPERATORS, Policy
from lflops.estimation.estimate import Estimator, Model, Subject, built, checked_model
from lflops.estimation.largest_batch import empty_room
from lflops.estimation.mesh import checked_mesh
from lflops.estimation.optimizer_step import MakesOptimizer
from lflops.estimation.planning.block_chain import Chain, cheapest_choice, lowest_peak
from lflops.estimation.planning.block_trials import FEMTO, BlockTrials, memory_of, policies_of
from lflops.hardware.chips import Hardware
from lflops.inputs.arguments import check_memory
from lflops.inputs.tensors import tensors_in
from lflops.memory.peak import FRAGMENTATION, TIGHT, MemoryFit, memory_fit_of
from lflops.profile.module_names import name_below
from lflops.profile.profile import Profile
from lflops.profile.series import ratio

_HEADS = ("recomputed blocks", "peak", "saved", "extra FLOPs", "share of step", "extra time")


class Alternative(Struct, frozen=True, kw_only=True):
    """One way to checkpoint a model, with its peak memory and its recomputation.

    Attributes:
        policy: The policy that every block uses, or `best` for the plan, in which blocks may
            differ.
        peak_bytes: Peak of live tensors in bytes.
        estimated: Whether the peak is from an estimate of the whole step. Otherwise it is computed
            from the bytes of the blocks in other estimates.
        flops: FLOPs that are recomputed.
        seconds: The least time of the recomputation on the chip, in seconds; `None` if the chip is
            unknown.
    """

    policy: str
    peak_bytes: int
    estimated: bool
    flops: int
    seconds: float | None


class CheckpointingPlan(Struct, frozen=True, kw_only=True):
    """The cheapest checkpointing with which a step fits into a memory budget.

    Attributes:
        policies: The policy of each block, keyed by the name of the block, in the order in which
            the blocks run.
        memory_bytes: The budget for live tensors in bytes.
        fits: Whether the step fits into the budget with these policies. If no policies fit, this is
            `False`, and `policies` has the policies with the lowest peak.
        predicted_bytes: The peak memory that was computed from the bytes of the blocks. The peak in
            the estimate of the whole step is `peak_bytes`.
        alternatives: For comparison, each policy applied to every block. The last entry is the
            plan.
        profile: The estimate of the whole step with these policies.
        estimates: Number of estimates that were made.
        memory_fit: The memory that the step needs on the chip; `None` if the budget was passed
            explicitly.
    """

    policies: Mapping[str, Policy]
    memory_bytes: int
    fits: bool
    predicted_bytes: int
    alternatives: tuple[Alternative, ...]
    profile: Profile
    estimates: int
    memory_fit: MemoryFit | None = None

    @property
    def peak_bytes(self) -> int:
        """Peak of live tensors in the estimate of the whole step, in bytes."""
        if self.profile.memory is None:
            return 0
        return self.profile.memory.peak_bytes

    def table(self) -> str:
        """Return a table that compares the plan with each policy applied to every block."""
        plain = self.alternatives[0]
        total = sum(op.flops for op in self.profile.op_counts) - self.alternatives[-1].flops
        rows: list[tuple[str, ...]] = [("", *_HEADS)]
        for each in self.alternatives:
            row = (
                each.policy,
                self._recomputed(each.policy),
                units.size(each.peak_bytes),
                units.size(plain.peak_bytes - each.peak_bytes),
                units.count(each.flops),
                units.percent(ratio(each.flops, total)),
                units.duration(each.seconds),
            )
            rows.append(row)
        if all(each.seconds is None for each in self.alternatives):
            rows = [row[:-1] for row in rows]
        return "\n".join([*_aligned(rows), self._verdict()])

    def _verdict(self) -> str:
        """Return the last line of the table, which says whether the plan fits into memory.

        If the budget comes from a chip, the line has the verdict of an estimate for this chip.
        """
        lowest = ""
        if not self.fits:
            lowest = " No other choice has a lower peak."
        fit = self.memory_fit
        if fit is not None:
            needed = units.size(fit.needed_bytes)
            usable = units.size(fit.usable_bytes)
            return f"{fit.verdict}: the step needs {needed} of {usable} on {fit.chip}.{lowest}"
        verdict = "fits" if self.fits else "does not fit"
        budget = units.size(self.memory_bytes)
        return f"{verdict}: tensors need {units.size(self.peak_bytes)} of {budget}.{lowest}"

    def code(self) -> str:
        """Return Python code that applies the plan to a variable `model`.

        Run this code before the model is wrapped or compiled.
        """
        lines: list[str] = []
        for policy in POLICIES[1:]:
            argument = ", context_fn=selective" if policy == "selective" else ""
            blocks = [block for block, chosen in self.policies.items() if chosen == policy]
            lines += _loops(blocks, argument)
        if not lines:
            return "# nothing to recompute\n"
        code = _SELECTIVE_CODE if "selective" in self.policies.values() else _FULL_CODE
        return "\n".join([code, *lines]) + "\n"

    def _recomputed(self, policy: str) -> str:
        """Return a cell of the table: the number of blocks that recompute under a policy.

        For the plan, whose name is `best`, this is a text such as `3 selective, 5 full`.
        """
        if policy == "none":
            return "0"
        if policy != "best":
            return str(len(self.policies))
        chosen = Counter(self.policies.values())
        numbers = []
        for each in POLICIES[1:]:
            if chosen[each]:
                numbers.append(f"{chosen[each]} {each}")
        return ", ".join(numbers) or "0"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row of a table as a line. All cells of a column are padded to the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


_FULL_CODE = """\
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(block, **options):
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)

"""

_SAVED_LINES = "".join(f"    torch.ops.aten.{name}.default,\n" for name in SAVED_OPERATORS)

_SELECTIVE_CODE = f"""\
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def recompute(block, **options):
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


kept = [
{_SAVED_LINES}]
selective = partial(create_selective_checkpoint_contexts, kept)"""


def _loops(blocks: Sequence[str], argument: str) -> Iterator[str]:
    """Yield lines of Python code that apply checkpointing to the given blocks.

    Blocks with consecutive numbers share one loop. `argument` is code for one more argument of the
    calls, or empty.
    """
    runs: list[tuple[str, range]] = []
    for block in blocks:
        container, _, digits = block.rpartition(".")
        number = int(digits)
        if runs and runs[-1][0] == container and runs[-1][1].stop == number:
            runs[-1] = (container, range(runs[-1][1].start, number + 1))
        else:
            runs.append((container, range(number, number + 1)))
    for container, numbers in runs:
        block = name_below(container, "{index}")
        yield f"for index in range({numbers.start}, {numbers.stop}):"
        yield f'    recompute(model.get_submodule(f"{block}"){argument})'


# Number of retries if an estimate exceeds the budget. Each retry lowers the budget of the search by
# the bytes by which the last estimate exceeded the budget.
REPAIRS = 3

# Largest relative difference between the peak predicted from a folded model and the peak of the
# whole model. If the difference is larger, the search is repeated with the whole model.
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
    """Choose the cheapest activation checkpointing of each block for a memory budget.

    A block is a module with submodules that has a number in its container, such as `layers.0`. A
    block recomputes nothing (`none`), everything (`full`), or everything except linear layers,
    convolutions and fused attention (`selective`). A few estimates show how many bytes each block
    keeps for backward. At the end, a step of the whole model with the chosen policies is estimated.
    No device memory is allocated, and the model is not changed. The plan's method `code()` returns
    Python code that applies the plan.

    Args:
        model: A module, or a function that builds a module, as in `estimate`. Its code must not use
            checkpointing.
        args: Positional arguments of the model, or a single tensor.
        kwargs: Keyword arguments of the model.
        memory_bytes: The budget for live tensors in bytes. By default, the budget is the usable
            memory of `hardware`, minus 5 % of it and minus the memory for workspaces and
            fragmentation.
        loss: Function that takes the output and returns a scalar, as in `estimate`.
        optimizer: Function that takes a list of parameters and returns an optimizer, as in
            `estimate`.
        hardware: The chip, as in `estimate`. With a chip, the plan minimizes the least time that
            the recomputation can take on this chip. Without a chip, the plan minimizes the
            recomputed FLOPs.
        mesh: Number of ranks in each dimension, as in `estimate`. With a mesh, `model` must be a
            function that builds the model.
        round_to: Round the size of each tensor up to a multiple of this number of bytes, as in
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
    make: Callable[[], nn.Module] = partial(built, model)
    if not mesh:
        # Sharding changes the model, so a model is only reused if it is not sharded.
        make = cache(make)
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
    """Find the cheapest checkpointing for the step of a model, and return it as a plan.

    Args:
        estimator: Runs the estimates. It must run backward.
        make: Function that returns the model with its arguments.
        memory_bytes: The budget in bytes; `None` for the memory of the estimator's chip.
        held: Real tensors of the model and its arguments, as in `Estimator.run`.
    """
    budget = _budget(estimator, memory_bytes)
    with estimator.started(held) as run:
        return _plan(
            BlockTrials(estimator, run, make), budget, budget_is_chip_memory=memory_bytes is None
        )


def _budget(estimator: Estimator, memory_bytes: Any) -> int:
    if memory_bytes is None:
        empty = empty_room(estimator)
        return int((empty.usable_bytes * (1 - TIGHT) - empty.needed_bytes) / (1 + FRAGMENTATION))
    check_memory(estimator.caller, memory_bytes)
    return int(memory_bytes)


def _plan(trials: BlockTrials, budget: int, *, budget_is_chip_memory: bool) -> CheckpointingPlan:
    """Choose the policies of all blocks, and return them as a plan.

    First, the policies are chosen from estimates of a folded model, which has fewer blocks, so that
    its estimates are faster. The whole model is then estimated with these policies. If its peak
    differs from the predicted peak, the policies are chosen again, from estimates of the whole
    model.

    If `budget_is_chip_memory` is true, the budget is the chip's memory. Otherwise, the user has
    passed the budget in bytes.
    """
    try:
        chain = trials.chain(fold=True)
    except Exception:  # noqa: BLE001 - an error of the whole model is raised below
        # Some models do not run with fewer blocks.
        chain = None
    if chain is not None:
        plan = _chosen(trials, chain, budget, budget_is_chip_memory=budget_is_chip_memory)
        if abs(plan.predicted_bytes - plan.peak_bytes) <= EXACT * plan.peak_bytes:
            return plan
    chain = trials.chain(fold=False)
    if chain is None:
        raise CountError("the whole model has no chain of blocks")
    return _chosen(trials, chain, budget, budget_is_chip_memory=budget_is_chip_memory)


def _chosen(
    trials: BlockTrials, chain: Chain, budget: int, *, budget_is_chip_memory: bool
) -> CheckpointingPlan:
    """Return a plan with the cheapest policies that fit into the budget.

    The cheapest policies that fit according to the chain are checked with an estimate of the whole
    model. If this estimate is above the budget, policies that need less memory are checked. If no
    policies fit, the plan has the policies with the lowest peak.
    """
    allowed = budget
    choices = _choice(chain, allowed)
    for _ in range(1 + REPAIRS):
        profile = trials.estimate(policies_of(trials.units, choices))
        beyond = _bytes_over_budget(profile, budget, budget_is_chip_memory=budget_is_chip_memory)
        allowed -= beyond
        following = _choice(chain, allowed)
        if beyond <= 0 or following == choices:
            break
        choices = following
    best = _alternative(chain, "best", choices)
    alternatives: list[Alternative] = []
    for policy in POLICIES:
        everywhere = [policy] * len(choices)
        alternatives.append(_alternative(chain, policy, everywhere))
    alternatives.append(replace(best, peak_bytes=memory_of(profile).peak_bytes, estimated=True))
    return CheckpointingPlan(
        policies=policies_of(trials.units, choices),
        memory_bytes=budget,
        fits=beyond <= 0,
        predicted_bytes=best.peak_bytes,
        alternatives=tuple(alternatives),
        profile=profile,
        estimates=trials.made,
        memory_fit=_memory_fit(profile, budget_is_chip_memory=budget_is_chip_memory),
    )


def _memory_fit(profile: Profile, *, budget_is_chip_memory: bool) -> MemoryFit | None:
    """Return the memory that a step needs on the chip, and whether the step fits.

    The user can pass a budget in bytes instead of using the chip's memory. Then
    `budget_is_chip_memory` is false, and this function returns `None`.
    """
    if not budget_is_chip_memory:
        return None
    return memory_fit_of(profile, profile.run.hardware)


def _choice(chain: Chain, budget: int) -> tuple[Policy, ...]:
    found = cheapest_choice(chain, POLICIES, budget)
    if found is None:
        found = cheapest_choice(chain, POLICIES, lowest_peak(chain, POLICIES))
    return cast("tuple[Policy, ...]", found)


def _bytes_over_budget(profile: Profile, budget: int, *, budget_is_chip_memory: bool) -> int:
    needs = _memory_fit(profile, budget_is_chip_memory=budget_is_chip_memory)
    if needs is None:
        return memory_of(profile).peak_bytes - budget
    if needs.verdict == "fits":
        return 0
    return max(1, int(needs.needed_bytes - needs.usable_bytes * (1 - TIGHT)))


def _alternative(chain: Chain, policy: str, choices: Sequence[Policy]) -> Alternative:
    seconds = None
    if chain.times:
        seconds = chain.spent(chain.times, choices) * FEMTO
    return Alternative(
        policy=policy,
        peak_bytes=chain.peak(choices),
        estimated=False,
        flops=chain.spent(chain.flops, choices),
        seconds=seconds,
    )

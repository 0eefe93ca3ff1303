"""Estimate a model with different checkpointing, and build a `Chain` from the results.

The chain has the bytes and costs of all blocks for any checkpointing. If a model has many equal
blocks, the estimates use a folded model, in which most of these blocks are removed. The chain is
then extended to the whole model.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from lflops.analysis.roofline import lower_bound
from lflops.errors import CountError
from lflops.estimation.changes import POLICIES, Policy, checkpointed, recomputable
from lflops.estimation.equal_blocks import Fold, folded, folds_of, full_names, shorter_folds
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.planning.block_chain import (
    Chain,
    Key,
    Trial,
    chain_of,
    held_input_of,
    key_of,
    keys_of,
    read,
    unit_numbers,
    units_of,
)
from lflops.estimation.unrolling import StepRecord
from lflops.inputs.arguments import check_module
from lflops.profile.profile import Memory, OpCount, Profile


def stretched(chain: Chain, after: int, copies: int, *, base: int, fixed: int) -> Chain | None:
    """Extend the chain of a folded model: insert copies of a block directly after the block.

    A chain has the bytes and costs of the blocks for any checkpointing.

    Args:
        chain: The chain of the folded model, in which some equal blocks are removed.
        after: Index of the block to copy.
        copies: Number of copies.
        base: Bytes that each copy adds to the bytes before the first block, such as its parameters.
        fixed: Bytes that each copy adds to the peak outside the blocks.

    Returns:
        The longer chain, or `None` if the block and the next block did not run the same operators.
    """
    if chain.kinds[after] != chain.kinds[after + 1]:
        return None
    gradients = chain.offsets[after] - chain.offsets[after + 1]
    last_offset = chain.offsets[after + 1]
    earlier = []
    for offset in chain.offsets[: after + 1]:
        earlier.append(offset + gradients * copies)
    inserted = []
    for later_copies in range(copies, 0, -1):
        inserted.append(last_offset + gradients * later_copies)
    kinds_before = chain.kinds[: after + 1]
    return replace(
        chain,
        kinds=(*kinds_before, *[chain.kinds[after]] * copies, *chain.kinds[after + 1 :]),
        base=chain.base + base * copies,
        fixed=chain.fixed + fixed * copies,
        offsets=(*earlier, *inserted, *chain.offsets[after + 1 :]),
    )


# Times are compared as whole femtoseconds, because sums of equal integers are exactly equal.
FEMTO = 1e-15


class BlockTrials:
    """Estimates one model with different checkpointing, and builds the `Chain` of its blocks.

    Args:
        estimator: The estimator. It must run backward.
        run: The function that `estimator.started()` provides.
        make: Function that returns the model with its arguments.

    Attributes:
        made: Number of estimates so far.
        folds: The sequences of equal blocks that are long enough to remove some of their blocks.
            The list is empty before the first estimate.
        units: The groups of blocks that the last chain treats as one block. All blocks of a unit
            have the same checkpointing. Most units are a single block.
    """

    def __init__(
        self,
        estimator: Estimator,
        run: Callable[[Callable[[], Subject]], Profile],
        make: Callable[[], Subject],
    ) -> None:
        self._estimator = estimator
        self._run = run
        self._make = make
        self._blocks: list[str] = []
        self._work: list[int] = []
        # The first estimate, if it ran the whole model because no equal blocks can be removed.
        self._whole: Trial | None = None
        self.made = 0
        self.folds: list[Fold] = []
        self.units: list[tuple[str, ...]] = []

    def estimate(
        self, policies: Mapping[str, Policy], folds: Sequence[Fold] | None = ()
    ) -> Profile:
        """Estimate a step in which each block is checkpointed according to its policy.

        Args:
            policies: Checkpointing policies, keyed by the name of a block. All other blocks
                recompute nothing.
            folds: The sequences of equal blocks from which blocks are removed, for a faster
                estimate. `None` stands for all sequences that are long enough.
        """
        self.made += 1
        caller = self._estimator.caller

        def make() -> Subject:
            subject = self._make()
            check_module(caller, subject.model)
            blocks = recomputable(caller, subject.model)
            self._blocks = list(blocks)
            self.folds = folds_of(blocks)
            stack.enter_context(folded(subject.model, self.folds if folds is None else folds))
            left = recomputable(caller, subject.model)
            stack.enter_context(checkpointed(left, policies))
            return subject

        with contextlib.ExitStack() as stack:
            return self._run(make)

    def chain(self, *, fold: bool) -> Chain | None:
        """Estimate the model with enough combinations of policies, and build the chain.

        The combinations are enough when they contain each pair of policies for each pair of kinds
        of neighbouring blocks. With `fold`, most of the equal blocks are removed for the estimates,
        and the chain is extended to the whole model. The result is then `None` if there are no
        equal blocks, or if they did not run the same operators.
        """
        folds: list[Fold] = []
        if fold:
            first = self._whole or self._first(None)
            folds = self.folds
            if not folds:
                self._whole = first
                return None
        else:
            first = self._whole or self._first(())
        kinds = first.reading.kinds
        trials = [first]
        wanted = _possible_keys(kinds).difference(keys_of(kinds, first.choices))
        last_choices: set[Policy] = {*POLICIES} - {first.choices[-1]}
        while wanted or last_choices:
            choices = _next_choices(kinds, wanted, last_choices)
            trials.append(self._tried(choices, folds))
            wanted.difference_update(keys_of(kinds, choices))
            last_choices.discard(choices[-1])
        # For each policy of the first block, at least one trial must show `Chain.held_input`.
        known: set[str] = set()
        for trial in trials:
            if held_input_of(trial, first.reading) is not None:
                known.add(trial.choices[0])
        for policy in POLICIES:
            if policy not in known:
                others: list[Policy] = ["none"] * (len(self.units) - 1)
                trials.append(self._tried((policy, *others), folds))
        return self._unfolded(chain_of(trials), folds)

    def _tried(self, choices: Sequence[Policy], folds: Sequence[Fold]) -> Trial:
        return self._trial(choices, self._steps(policies_of(self.units, choices), folds))

    def _unfolded(self, chain: Chain, folds: Sequence[Fold]) -> Chain | None:
        """Extend the chain of a folded model to all blocks of the whole model.

        Returns `None` if equal blocks did not run the same operators.
        """
        names = full_names(folds, self._blocks)
        units = []
        for unit in self.units:
            units.append(tuple(names[block] for block in unit))
        whole = chain
        for fold, one_less in shorter_folds(folds):
            shorter = self._first(one_less).reading
            unit_before = (fold.block(fold.removed[0] - 1),)
            if unit_before not in units:
                return None
            after = units.index(unit_before)
            longer = stretched(
                whole,
                after,
                len(fold.removed),
                base=chain.base - shorter.starts[0],
                fixed=chain.fixed - shorter.fixed,
            )
            if longer is None:
                return None
            whole = longer
            copies = [(fold.block(number),) for number in fold.removed]
            units[after + 1 : after + 1] = copies
        self.units = units
        return whole

    def _first(self, folds: Sequence[Fold] | None) -> Trial:
        """Estimate the model without recomputation, and set `units` to the groups that ran.

        A group of blocks is treated as one block. `folds` are the sequences of equal blocks that are
        shortened to make the estimate faster. `None` stands for all sequences that are long enough.
        """
        steps = self._steps({}, folds)
        last = steps[-1]
        if folds is None:
            folds = self.folds
        names = full_names(folds, self._blocks)
        self.units = units_of(memory_of(last).timeline, last.modules.keys() & names.keys())
        if not self.units:
            raise CountError(
                f"{self._estimator.caller}: none of the blocks ran, so none can be checkpointed: "
                f"{', '.join(self._blocks)}"
            )
        self._work = []
        for unit in self.units:
            self._work.append(sum(last.modules[block].forward.flops for block in unit))
        return self._trial(["none"] * len(self.units), steps)

    def _trial(self, choices: Sequence[Policy], steps: Sequence[Profile]) -> Trial:
        try:
            readings = [read(memory_of(step).timeline, self.units, self._work) for step in steps]
        except ValueError as error:
            raise CountError(
                f"{self._estimator.caller}: {error}: make the loss depend on a parameter of a "
                "block that requires a gradient"
            ) from error
        flops: list[int] = []
        times: list[int] = []
        for recomputed in self._recomputed(steps[-1]):
            flops.append(sum(op.flops for op in recomputed))
            bound = lower_bound(replace(steps[-1], op_counts=tuple(recomputed)))
            if bound is not None:
                times.append(round(bound.seconds / FEMTO))
        times_of_units = None
        if len(times) == len(flops):
            times_of_units = tuple(times)
        return Trial(
            choices=tuple(choices),
            flops=tuple(flops),
            times=times_of_units,
            reading=replace(readings[-1], fixed=max(each.fixed for each in readings)),
        )

    def _recomputed(self, profile: Profile) -> list[list[OpCount]]:
        """Return the operators that each unit (a block or a group of blocks) recomputed."""
        number_of = unit_numbers(self.units)
        recomputed: list[list[OpCount]] = [[] for _ in self.units]
        for op in profile.op_counts:
            number = number_of(op.module)
            if op.phase == "recompute" and number is not None:
                recomputed[number].append(op)
        return recomputed

    def _steps(self, policies: Mapping[str, Policy], folds: Sequence[Fold] | None) -> list[Profile]:
        """Run an estimate, and return the profiles of its one or two steps.

        With an optimizer there are two steps, because the first step creates the optimizer's state.
        """
        steps: list[StepRecord] = []
        self._estimator.watch = steps.append
        profile = self.estimate(policies, folds)
        self._estimator.watch = None
        return [replace(step.profile, run=profile.run) for step in steps]


def policies_of(units: Sequence[tuple[str, ...]], choices: Sequence[Policy]) -> dict[str, Policy]:
    """Return the checkpointing policy of each block, keyed by the name of the block.

    `units` are groups of blocks that have the same policy. `choices` has the policy of each group.
    """
    policies: dict[str, Policy] = {}
    for unit, choice in zip(units, choices, strict=True):
        policies |= dict.fromkeys(unit, choice)
    return policies


def memory_of(profile: Profile) -> Memory:
    """Return the memory in the profile of an estimate.

    The profile of an estimate always has memory. This function only excludes `None` for the type
    checker.
    """
    if profile.memory is None:
        raise CountError("the estimate has no memory")
    return profile.memory


def _possible_keys(kinds: Sequence[int]) -> set[Key]:
    keys: set[Key] = set()
    for place in range(len(kinds)):
        for before in POLICIES:
            keys |= _keys_after(kinds, place, before)
    return keys


def _keys_after(kinds: Sequence[int], index: int, before: Policy) -> set[Key]:
    """Return the `Key` of a block for each checkpointing policy that the block can have.

    A `Key` has the kinds and policies of the block and of the previous block. `index` is the
    position of the block, and `before` is the policy of the previous block.
    """
    return {key_of(kinds, index, before, choice) for choice in POLICIES}


def _next_choices(
    kinds: Sequence[int], wanted: set[Key], last_choices: set[Policy]
) -> tuple[Policy, ...]:
    """Choose the policies of all blocks for the next estimate.

    The estimate should contain as many combinations as possible that no earlier estimate contains.

    Args:
        kinds: Kind of each block.
        wanted: Combinations of kinds and policies (see `Key`) that no estimate contains so far.
        last_choices: Policies that the last block had in no estimate so far.
    """
    left = set(wanted)
    choices: list[Policy] = []
    for index in range(len(kinds)):
        before = choices[-1] if choices else None
        best = POLICIES[0]
        best_gain = (-1, -1)
        for choice in POLICIES:
            key = key_of(kinds, index, before, choice)
            if index + 1 < len(kinds):
                next_keys = _keys_after(kinds, index + 1, choice)
                later = len(next_keys & (left - {key}))
            else:
                later = int(choice in last_choices)
            gain = (int(key in left), later)
            if gain > best_gain:
                best = choice
                best_gain = gain
        choices.append(best)
        left.discard(key_of(kinds, index, before, best))
    return tuple(choices)

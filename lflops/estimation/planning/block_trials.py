"""Estimates of a model with some policies, and the chain of blocks that they show.

A deep model is tried with fewer of its equal blocks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import nn

from lflops.analysis.roofline import lower_bound
from lflops.errors import CountError
from lflops.estimation.changes import POLICIES, Policy, checkpointed, recomputable
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.planning.block_chain import (
    Chain,
    Key,
    Trial,
    chain_of,
    key_of,
    keys_of,
    read,
    settled_by,
    unit_numbers,
    units_of,
)
from lflops.inputs.arguments import check_module
from lflops.profile.profile import Memory, OpCount, Profile
from lflops.profile.series import gathered, grouped

# blocks of a run in a folded model: in the middle there are two with neighbours like themselves
KEPT = 6
# shorter runs are not folded
WORTHWHILE = 10


class Fold(NamedTuple):
    """A run of equal blocks in a container, and how many are left in the folded model."""

    container: str
    first: int
    length: int
    kept: int = KEPT

    def block(self, number: int) -> str:
        """The name of the container's block with this number."""
        return f"{self.container}.{number}" if self.container else str(number)

    @property
    def removed(self) -> range:
        """The numbers of the blocks that are left out: the middle of the run."""
        begin = self.first + self.kept // 2
        return range(begin, begin + self.length - self.kept)


def folds_of(blocks: Mapping[str, nn.Module]) -> list[Fold]:
    """The runs of equal blocks that are worth folding."""
    # Blocks are equal that have the same classes, parameters and settings. A setting that counts
    # with the block is its number.
    runs: list[list[str]] = []
    for name in blocks:
        container, _, number = name.rpartition(".")
        before = Fold(container, 0, 0).block(int(number) - 1)
        if runs and runs[-1][-1] == before and _are_equal(blocks[before], blocks[name]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [
        Fold(run[0].rpartition(".")[0], int(run[0].rpartition(".")[2]), len(run))
        for run in runs
        if len(run) >= WORTHWHILE
    ]


def shorter_folds(folds: Sequence[Fold]) -> Iterator[tuple[Fold, list[Fold]]]:
    """Each fold, and all of them with one block less of its run."""
    for place, fold in enumerate(folds):
        yield fold, [*folds[:place], fold._replace(kept=fold.kept - 1), *folds[place + 1 :]]


@contextlib.contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """A context in which the model lacks what is removed.

    The others of a container are numbered anew.
    """
    removed = _removed(folds)
    containers = {name: model.get_submodule(name) for name in removed}
    before = {name: dict(container.named_children()) for name, container in containers.items()}
    try:
        for name, container in containers.items():
            left = [
                module
                for number, module in before[name].items()
                if int(number) not in removed[name]
            ]
            _refill(container, {str(number): module for number, module in enumerate(left)})
        yield
    finally:
        for name, container in containers.items():
            _refill(container, before[name])


def full_names(folds: Sequence[Fold], blocks: Sequence[str]) -> dict[str, str]:
    """From the name of each block in the folded model to its name in the whole one, which has `blocks`."""
    removed = _removed(folds)
    names = {}
    for block in blocks:
        container, _, number = block.rpartition(".")
        gone = removed.get(container, [])
        if int(number) not in gone:
            shift = sum(each < int(number) for each in gone)
            names[
                f"{container}.{int(number) - shift}" if container else str(int(number) - shift)
            ] = block
    return names


def stretched(chain: Chain, after: int, copies: int, *, base: int, fixed: int) -> Chain | None:
    """The chain with copies of block `after` behind it.

    `None` if it and the next one did not run the same operators.
    """
    # Each copy adds `base` to what is alive before the first block, and `fixed` to the most that is
    # alive outside of the blocks.
    if chain.kinds[after] != chain.kinds[after + 1]:
        return None
    # gradients of one block
    each = chain.offsets[after] - chain.offsets[after + 1]
    between = [chain.offsets[after + 1] + each * (copies - copy) for copy in range(copies)]
    return replace(
        chain,
        kinds=(
            *chain.kinds[: after + 1],
            *[chain.kinds[after]] * copies,
            *chain.kinds[after + 1 :],
        ),
        base=chain.base + base * copies,
        fixed=chain.fixed + fixed * copies,
        offsets=(
            *(offset + each * copies for offset in chain.offsets[: after + 1]),
            *between,
            *chain.offsets[after + 1 :],
        ),
    )


def _removed(folds: Sequence[Fold]) -> dict[str, list[int]]:
    return gathered((fold.container, number) for fold in folds for number in fold.removed)


def _refill(container: nn.Module, children: Mapping[str, nn.Module]) -> None:
    for name in [name for name, _ in container.named_children()]:
        delattr(container, name)
    for name, module in children.items():
        container.add_module(name, module)


def _are_equal(block: nn.Module, following: nn.Module) -> bool:
    pairs = list(zip(block.named_modules(), following.named_modules(), strict=False))
    if len(pairs) != sum(1 for _ in block.modules()) or len(pairs) != sum(
        1 for _ in following.modules()
    ):
        return False
    return all(
        name == its and _make(module) == _make(other) and _settings_agree(module, other)
        for (name, module), (its, other) in pairs
    )


def _make(module: nn.Module) -> tuple[Any, ...]:
    held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (
        type(module),
        module.training,
        tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in held),
    )


def _settings_agree(module: nn.Module, following: nn.Module) -> bool:
    """Whether plain attributes are equal, but for numbers that count with the block."""
    own, other = (
        {
            name: value
            for name, value in vars(each).items()
            if value is None or isinstance(value, bool | int | float | str | tuple)
        }
        for each in (module, following)
    )
    counting = {
        name: value
        for name, value in other.items()
        if type(value) is int and type(before := own.get(name)) is int and value == before + 1
    }
    return own.keys() == other.keys() and own | counting == other


# seconds are whole numbers of these while costs are compared, so that equal sums are equal
FEMTO = 1e-15


class BlockTrials:
    """Estimates of one model, by an estimator that goes backward and its started `run`.

    `make` makes the subject.
    """

    def __init__(
        self,
        estimator: Estimator,
        run: Callable[[Callable[[], Subject]], Profile],
        make: Callable[[], Subject],
    ) -> None:
        self._estimator, self._run, self._make = estimator, run, make
        self._blocks: list[str] = []
        self._work: list[int] = []
        self._whole: Trial | None = None
        # estimates
        self.made = 0
        self.folds: list[
            Fold
            # the runs of equal blocks that are worth folding, once an estimate was made
        ] = []
        self.units: list[
            tuple[str, ...]
            # the blocks that make one choice, of the chain that was found last
        ] = []

    def estimate(
        self, policies: Mapping[str, Policy], folds: Sequence[Fold] | None = ()
    ) -> Profile:
        """The step with these policies by block; the others recompute nothing.

        `folds` are left out; `None` is all that is worth it.
        """
        self.made += 1
        with contextlib.ExitStack() as stack:

            def make() -> Subject:
                subject = self._make()
                check_module(self._estimator.caller, subject.model)
                blocks = recomputable(self._estimator.caller, subject.model)
                self._blocks, self.folds = list(blocks), folds_of(blocks)
                stack.enter_context(folded(subject.model, self.folds if folds is None else folds))
                stack.enter_context(
                    checkpointed(recomputable(self._estimator.caller, subject.model), policies)
                )
                return subject

            return self._run(make)

    def chain(self, *, fold: bool) -> Chain | None:
        """What the blocks keep, by estimates that show each pair of policies for each two kinds of neighbours.

        With `fold` a model without most of its equal blocks is estimated; `None` comes back if
        there are none to leave out, or if these did not run the same operators.
        """
        first = self._whole or self._first(None if fold else ())
        folds, units = (self.folds if fold else []), self.units
        if fold and not folds:
            self._whole = first
            return None
        kinds, trials = first.reading.kinds, [first]
        places = range(len(kinds))
        wanted = {
            key_of(kinds, place, before, choice)
            for place in places
            for before in POLICIES
            for choice in POLICIES
        }
        wanted -= set(keys_of(kinds, first.choices))
        ends = {*POLICIES} - {first.choices[-1]}
        while wanted or ends:
            choices = _next_choices(kinds, wanted, ends)
            trials.append(self._trial(choices, self._steps(policies_of(units, choices), folds)))
            wanted -= set(keys_of(kinds, choices))
            ends.discard(choices[-1])
        shown = {each.choices[0] for each in trials if settled_by(each, first.reading) is not None}
        for policy in (each for each in POLICIES if each not in shown):
            choices = (policy, *POLICIES[:1] * (len(units) - 1))
            trials.append(self._trial(choices, self._steps(policies_of(units, choices), folds)))
        return self._unfolded(chain_of(trials), folds)

    def _unfolded(self, chain: Chain, folds: Sequence[Fold]) -> Chain | None:
        names, whole, short = full_names(folds, self._blocks), chain, self.units
        units = [tuple(names[block] for block in unit) for unit in short]
        for fold, with_one_less in shorter_folds(folds):
            shorter = self._first(with_one_less).reading
            removed = [(fold.block(number),) for number in fold.removed]
            before = (fold.block(fold.removed[0] - 1),)
            after = units.index(before) if before in units else None
            base, fixed = chain.base - shorter.starts[0], chain.fixed - shorter.fixed
            found = (
                None
                if after is None
                else stretched(whole, after, len(removed), base=base, fixed=fixed)
            )
            if found is None or after is None:
                return None
            whole, units = found, [*units[: after + 1], *removed, *units[after + 1 :]]
        self.units = units
        return whole

    def _first(self, folds: Sequence[Fold] | None) -> Trial:
        """The estimate without recomputation, which finds the blocks."""
        steps = self._steps({}, folds)
        names = full_names(self.folds if folds is None else folds, self._blocks)
        self.units = units_of(
            memory_of(steps[-1]).timeline, steps[-1].modules.keys() & names.keys()
        )
        if not self.units:
            raise CountError(
                f"{self._estimator.caller}: none of the blocks ran: {', '.join(self._blocks)}"
            )
        self._work = [
            sum(steps[-1].modules[block].forward.flops for block in unit) for unit in self.units
        ]
        return self._trial(["none"] * len(self.units), steps)

    def _trial(self, choices: Sequence[Policy], steps: Sequence[Profile]) -> Trial:
        try:
            readings = [read(memory_of(step).timeline, self.units, self._work) for step in steps]
        except ValueError as error:
            raise CountError(
                f"{self._estimator.caller}: {error}: the loss needs a gradient of some parameter"
            ) from error
        reading = replace(readings[-1], fixed=max(each.fixed for each in readings))
        cells = self._recomputed(steps[-1])
        bounds = [lower_bound(replace(steps[-1], op_counts=some)) for some in cells]
        known = [round(bound.seconds / FEMTO) for bound in bounds if bound is not None]
        return Trial(
            choices=tuple(choices),
            flops=tuple(sum(cell.flops for cell in some) for some in cells),
            times=tuple(known) if len(known) == len(bounds) else None,
            reading=reading,
        )

    def _recomputed(self, profile: Profile) -> list[tuple[OpCount, ...]]:
        number_of = unit_numbers(self.units)
        cells = grouped(
            (cell for cell in profile.op_counts if cell.phase == "recompute"),
            lambda cell: number_of(cell.module),
        )
        return [tuple(cells.get(number, ())) for number in range(len(self.units))]

    def _steps(self, policies: Mapping[str, Policy], folds: Sequence[Fold] | None) -> list[Profile]:
        steps: list[Profile] = []
        self._estimator.watch = steps.append
        profile = self.estimate(policies, folds)
        self._estimator.watch = None
        return [
            replace(step, run=profile.run)
            for step in steps[-1 if self._estimator.optimizer is None else -2 :]
        ]


def policies_of(units: Sequence[tuple[str, ...]], choices: Sequence[Policy]) -> dict[str, Policy]:
    """The policy of each block, by the choice of each unit."""
    return {block: choice for unit, choice in zip(units, choices, strict=True) for block in unit}


def memory_of(profile: Profile) -> Memory:
    """That of an estimate, which always has one."""
    if profile.memory is None:
        raise CountError("the estimate has no memory")
    return profile.memory


def _next_choices(kinds: Sequence[int], wanted: set[Key], ends: set[Policy]) -> tuple[Policy, ...]:
    """Choices that show many of the keys that are wanted, and one of the last block's that are."""
    left = set(wanted)
    choices: list[Policy] = []
    for index, kind in enumerate(kinds):
        following = kinds[index + 1] if index + 1 < len(kinds) else None
        gains: dict[Policy, tuple[bool, int]] = {}
        for choice in POLICIES:
            key = key_of(kinds, index, choices[-1] if choices else None, choice)
            onward = (
                [(kind, following, choice, after) in left - {key} for after in POLICIES]
                if following is not None
                else [choice in ends]
            )
            gains[choice] = key in left, sum(onward)
        best = max(POLICIES, key=gains.__getitem__)
        choices.append(best)
        left.discard(keys_of(kinds, choices)[-1])
    return tuple(choices)

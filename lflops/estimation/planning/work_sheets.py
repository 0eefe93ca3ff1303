"""Compute a rank's work and memory for any batch, depth and mesh from a few estimates.

A case is a checkpointing policy, a batch and a mesh. A sheet is a table with the work and the
memory of one rank in one case. FLOPs, bytes and peak memory are linear in three quantities: the
batch, the number of blocks, and 1 / (number of ranks). Therefore two estimates are enough for each
quantity: with one and with two samples, with more and with fewer blocks, and with few and with many
ranks. The sheet of any other case is interpolated or extrapolated from these estimates.

A sheet has the peak memory at each place of the step, because the place with the highest peak can
differ from case to case. A place is an operator in a certain block, or after a certain block. A
role is a sequence of consecutive blocks that do the same work. The work in a sheet is summed over
the blocks of a role, so that sheets of models with more or fewer blocks can be compared.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from torch import nn

from lflops.estimation.changes import Policy, checkpointed, with_submodules
from lflops.estimation.equal_blocks import Fold, folded, folds_of, full_names, shorter_folds
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.mesh import heads_of, tensor_plan
from lflops.estimation.planning.block_trials import memory_of
from lflops.estimation.unrolling import NotPeriodicError, StepRecord, Unrolling
from lflops.model.module_tree import blocks_in
from lflops.profile.module_names import ancestry
from lflops.profile.profile import OP_COUNT_FIELDS, Communication, Moment, OpCount, Profile
from lflops.profile.records import Phase
from lflops.profile.series import grouped

# Number of equal blocks that a folded model keeps from each sequence of equal blocks. A second
# folded model keeps one block less.
BLOCKS_TO_ESTIMATE = 4


class Role(NamedTuple):
    """A sequence of consecutive blocks that do the same work.

    The role of a block without an equal neighbour has only this block. Everything outside the
    blocks has the role `NO_BLOCK`.

    Attributes:
        first: Name of the first block of the sequence in the whole model.
        blocks: Number of blocks in the sequence.
    """

    first: str
    blocks: int


# The role of everything outside the blocks.
NO_BLOCK = Role("", 1)


class InBlock(NamedTuple):
    """The place of an operator in a block.

    A sheet (a table with the work and the memory of a rank) has the peak memory at each place. Each
    operator has two places: one with the position of its block counted from the start of the
    sequence, and one with the position counted from the end. So if one of two models has more
    blocks, their sheets can still be compared near both ends.

    Attributes:
        role: The sequence of equal blocks that contains the block.
        number: Position of the block in this sequence, counted from the start, or from the end as a
            negative number.
        run: Number of earlier runs of the same operator in this block.
    """

    role: Role
    number: int
    run: int


class OutsideBlocks(NamedTuple):
    """The place of an operator outside the blocks, described by the block that ran before it.

    Attributes:
        after_blocks: Whether the previous block is the last block of the model.
        role: The sequence of equal blocks that contains the previous block, or `None` before the
            first block.
        from_first: Position of the previous block in this sequence, from 0.
        from_last: The same position counted from the end, as a negative number.
    """

    after_blocks: bool
    role: Role | None
    from_first: int
    from_last: int


BEFORE_BLOCKS = OutsideBlocks(after_blocks=False, role=None, from_first=0, from_last=0)


class OpKey(NamedTuple):
    """The key of a number in a sheet: a count of an operator, summed over the blocks of a role.

    A sheet is a table with the work and the memory of a rank. A role is a sequence of consecutive
    blocks that do the same work. `module` is the name of the operator's module below the block,
    such as `.mlp` for `layers.3.mlp`. `field` is the name of the count, such as `calls`.
    """

    role: Role
    module: str
    operator: str
    phase: Phase
    dtype: str
    field: str


class CollectiveKey(NamedTuple):
    """The key of a number in a sheet: the calls or bytes of a collective in the blocks of a role.

    A sheet is a table with the work and the memory of a rank. A role is a sequence of consecutive
    blocks that do the same work. The number is a sum over these blocks. `field` is `calls` or
    `bytes`.
    """

    role: Role
    collective: str
    phase: Phase
    field: str


class MomentKey(NamedTuple):
    """The key of a number in a sheet: the peak bytes while an operator runs.

    A sheet is a table with the work and the memory of a rank. If `with_gradients` is false, the
    bytes of gradients are not included in the peak.
    """

    place: InBlock | OutsideBlocks
    module: str
    operator: str
    phase: Phase
    with_gradients: bool


# A plain string is the key of the highest bytes of a category of memory, such as "gradients". The
# key "new gradient" is for the most bytes of gradients that one operator adds in backward.
SheetKey = OpKey | CollectiveKey | MomentKey | str
Sheet = Mapping[SheetKey, float]

_WORK_KEYS = (OpKey, CollectiveKey)
WorkKey = TypeVar("WorkKey", OpKey, CollectiveKey)


class Case(NamedTuple):
    """A training configuration to estimate.

    Attributes:
        policy: The activation checkpointing policy of every block.
        samples: Number of samples in the batch of a rank.
        mesh: Number of ranks in each dimension, without the dimension `pipeline`.
    """

    policy: Policy
    samples: int
    mesh: Mapping[str, int]


class _DepthLines(NamedTuple):
    """Sheets of models with more and fewer blocks, to compute the work and memory of one block.

    Attributes:
        longer: The sheet of the folded model, which keeps a few blocks of each sequence of equal
            blocks.
        shorter: For each sequence of equal blocks, the number of its blocks in the whole model, and
            the sheet of a folded model with one block less in this sequence.
    """

    longer: Sheet
    shorter: list[tuple[int, Sheet]]


def moved(sheet: Sheet, low: Sheet, high: Sheet, share: float) -> Sheet:
    """Return a sheet plus `share` times the difference between the sheets `high` and `low`.

    A sheet is a table with the work and the memory of a rank. The result is a linear interpolation
    or extrapolation. Numbers for memory that are not in all three sheets are left out.
    """
    found: dict[SheetKey, float] = {}
    for key in {**sheet, **high, **low}:
        is_work = isinstance(key, _WORK_KEYS)
        if is_work or (key in sheet and key in low and key in high):
            found[key] = sheet.get(key, 0.0) + (high.get(key, 0.0) - low.get(key, 0.0)) * share
    return found


class _FewBlocks:
    """The steps of a model from which some equal blocks were removed, and their sheet.

    Args:
        steps: The steps of the estimate.
        folds: The sequences of equal blocks from which blocks were removed.
        blocks: Names of all blocks of the whole model.

    Attributes:
        sheet: The work of the last step, and the peak memory of all steps.
    """

    def __init__(
        self, steps: Sequence[StepRecord], folds: Sequence[Fold], blocks: Sequence[str]
    ) -> None:
        self._steps = steps
        self._folds = folds
        self._blocks = blocks
        self.sheet = _sheet([step.profile for step in steps], roles_of(folds, blocks))

    def with_one_more_block(self) -> Sheet | None:
        """Derive the sheet of the model with one more block than these models.

        Return `None` if it cannot be derived from the steps of these models.
        """
        (fold,) = self._folds
        longer = fold._replace(kept=fold.kept + 1)
        unrolling = Unrolling(fold, longer.kept)
        try:
            profiles = [unrolling.profile(step, step.profile) for step in self._steps]
        except NotPeriodicError:
            return None
        return _sheet(profiles, roles_of([longer], self._blocks))


def roles_of(folds: Sequence[Fold], blocks: Sequence[str]) -> dict[str, Role]:
    """Return the role of each block of a folded model.

    The first and the last block of a sequence of equal blocks have separate roles.

    Args:
        folds: The sequences of equal blocks from which blocks were removed.
        blocks: Names of all blocks of the whole model.
    """
    role_of_block: dict[str, Role] = {}
    for fold in folds:
        inner = range(fold.first + 1, fold.first + fold.length - 1)
        for number in inner:
            role_of_block[fold.block(number)] = Role(fold.block(inner[0]), len(inner))
    roles = {}
    for name, full_name in full_names(folds, blocks).items():
        roles[name] = role_of_block.get(full_name, Role(full_name, 1))
    return roles


class WorkSheets:
    """Computes the sheets of one model from estimates with only a few of its equal blocks.

    A sheet is a table with the work and the memory of one rank.

    The attributes describe the model of the last estimate.

    Args:
        estimator: Function that creates the estimator for a mesh.
        make: Function that takes a number of samples and a mesh, and returns a model with its
            arguments.
        progress: Function that is called before each estimate, with the number of estimates so far.

    Attributes:
        blocks: Names of the blocks to which checkpointing can be applied.
        depth: Number of blocks, if all blocks are equal and there are enough of them to remove
            some in estimates; otherwise 0.
        heads: Number of attention heads of each kind, keyed by a description such as `key/value
            heads`.
        has_tensor_plan: Whether the model has a `tp_plan`.
        estimates: Number of estimates so far.
        template: Profile of the last estimate. It provides the fields of a profile that are not in
            sheets.
    """

    template: Profile

    def __init__(
        self,
        estimator: Callable[[Mapping[str, int]], Estimator],
        make: Callable[[int, Mapping[str, int]], Subject],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._estimator = estimator
        self._make = make
        self._progress = progress
        self._lines: dict[str, _DepthLines] = {}
        self._sheets: dict[tuple[str, int | None], Sheet] = {}
        # The equal blocks of the shorter model, keyed by the checkpointing and the dimensions of
        # the mesh with which the sheet of the longer model could be derived from it.
        self._derivable: dict[tuple[Policy, frozenset[str]], Fold] = {}
        self._block_names: list[str] = []
        self._folds: Sequence[Fold] = ()
        self.blocks: list[str] = []
        self.depth = 0
        self.heads: Mapping[str, int] = {}
        self.has_tensor_plan = False
        self.estimates = 0

    def sheet(self, case: Case, depth: int | None = None) -> Sheet:
        """Return the sheet (the work and memory) of the whole model for a mesh and a micro batch.

        With `depth`, the sheet is for a model with this number of blocks, and has only the memory.
        All blocks of the model must then be equal.
        """
        key = repr(case)
        if key not in self._lines:
            self._lines[key] = self._estimated_lines(case)
        if (key, depth) not in self._sheets:
            self._sheets[key, depth] = _at_depth(self._lines[key], depth)
        return self._sheets[key, depth]

    def whole(self, case: Case) -> Profile:
        """Estimate the whole model in a case, with all its blocks."""
        # No function watches the steps, because the estimate would then not simulate the allocator.
        return self._run(case, (), None)

    def profile(self, sheet: Sheet, mesh: Mapping[str, int]) -> Profile:
        """Convert the work in a sheet to the profile of one rank of a mesh.

        The profile assigns all work inside a block to the block itself, not to the modules below
        the block.
        """
        op_counts = tuple(self._op_counts(sheet))
        communication = tuple(self._communication(sheet, mesh))
        root = self.template.modules[""]
        modules = {"": root}
        for op in op_counts:
            modules |= dict.fromkeys(ancestry(op.module), root)
        for call in communication:
            modules |= dict.fromkeys(ancestry(call.module), root)
        return replace(
            self.template,
            op_counts=op_counts,
            communication=communication,
            modules=modules,
            memory=None,
            run=replace(self.template.run, world_size=prod(mesh.values())),
        )

    def _op_counts(self, sheet: Sheet) -> Iterator[OpCount]:
        for key, values in _values_by_field(sheet, OpKey).items():
            counts = _per_block(values, key.role)
            for module in self._modules_of(key.role):
                yield OpCount(
                    module=module,
                    operator=key.operator,
                    phase=key.phase,
                    dtype=key.dtype,
                    **counts,
                )

    def _communication(self, sheet: Sheet, mesh: Mapping[str, int]) -> Iterator[Communication]:
        for key, values in _values_by_field(sheet, CollectiveKey).items():
            ranks = mesh.get(dimension_of(key.collective), 1)
            if ranks == 1:
                continue
            counts = _per_block(values, key.role)
            for module in self._modules_of(key.role):
                yield Communication(
                    module=module,
                    phase=key.phase,
                    collective=key.collective,
                    calls=max(counts["calls"], 1),
                    bytes=counts["bytes"],
                    group="",
                    group_size=ranks,
                )

    def _modules_of(self, role: Role) -> Sequence[str]:
        if role.blocks == 1:
            return [role.first]
        begin = self._block_names.index(role.first)
        return self._block_names[begin : begin + role.blocks]

    def _estimated_lines(self, case: Case) -> _DepthLines:
        """Return the sheets of the longer model and of each shorter model.

        The operators depend on the checkpointing and on the dimensions of the mesh, but not on the
        number of samples or ranks. So if the sheet of the longer model can be derived from the
        shorter model in one case, it is derived in all cases with the same operators.
        """
        operators = (case.policy, frozenset(case.mesh))
        if operators in self._derivable:
            lines = self._derived_lines(case, self._derivable[operators])
            if lines is not None:
                return lines
        try:
            longer = self._estimated(case, None)
        except Exception:  # noqa: BLE001 - an error of the whole model is raised below
            # Some models do not run with fewer blocks.
            longer = self._estimated(case, ())
        shorter = []
        for fold, folds in shorter_folds(self._folds):
            run = self._estimated(case, folds)
            shorter.append((fold.length, run.sheet))
            if len(self._folds) == 1 and _are_same(run.with_one_more_block(), longer.sheet):
                self._derivable[operators] = folds[0]
        return _DepthLines(longer.sheet, shorter)

    def _derived_lines(self, case: Case, fold: Fold) -> _DepthLines | None:
        """Estimate only the shorter model, and derive the sheet of the longer model from it.

        `fold` has the equal blocks of the shorter model. Returns `None` if this is impossible.
        """
        try:
            run = self._estimated(case, [fold])
        except Exception:  # noqa: BLE001 - the estimate of the longer model raises it again
            return None
        longer = run.with_one_more_block()
        if longer is None:
            return None
        return _DepthLines(longer, [(fold.length, run.sheet)])

    def _estimated(self, case: Case, folds: Sequence[Fold] | None) -> _FewBlocks:
        steps: list[StepRecord] = []
        self._run(case, folds, steps.append)
        return _FewBlocks(steps, self._folds, self._block_names)

    def _run(
        self, case: Case, folds: Sequence[Fold] | None, watch: Callable[[StepRecord], None] | None
    ) -> Profile:
        """Estimate a case, for a model from which some equal blocks are removed.

        Args:
            case: The training configuration.
            folds: The sequences of equal blocks from which blocks are removed. `None` stands for
                all sequences that are long enough.
            watch: Function that is called with the record of each step; `None` without one.
        """
        self.estimates += 1
        if self._progress is not None:
            self._progress(self.estimates)
        estimator = self._estimator(case.mesh)
        estimator.watch = watch

        def make() -> Subject:
            subject = self._make(case.samples, case.mesh)
            runs = self._inspect(subject.model)
            self._folds = runs if folds is None else folds
            stack.enter_context(folded(subject.model, self._folds))
            left = with_submodules(blocks_in(subject.model))
            stack.enter_context(checkpointed(left, dict.fromkeys(left, case.policy)))
            return subject

        with contextlib.ExitStack() as stack:
            self.template = estimator.run(make)
        return self.template

    def _inspect(self, model: nn.Module) -> list[Fold]:
        """Set the attributes that describe the model, and return its sequences of equal blocks."""
        blocks = blocks_in(model)
        runs = [fold._replace(kept=BLOCKS_TO_ESTIMATE) for fold in folds_of(blocks)]
        is_one_run = len(runs) == 1 and runs[0].length == len(blocks)
        self._block_names = list(blocks)
        self.blocks = list(with_submodules(blocks))
        self.depth = 0
        if is_one_run:
            self.depth = len(blocks)
        self.heads = heads_of(model)
        self.has_tensor_plan = bool(tensor_plan(model))
        return runs


def _are_same(one: Sheet | None, other: Sheet) -> bool:
    """Return whether two sheets have the same numbers in the same order.

    The order matters because sums of floating-point numbers depend on it.
    """
    return one is not None and list(one.items()) == list(other.items())


def _at_depth(lines: _DepthLines, depth: int | None) -> Sheet:
    longer = lines.longer
    if depth is None:
        whole = longer
        for length, shorter in lines.shorter:
            whole = moved(whole, shorter, longer, length - BLOCKS_TO_ESTIMATE)
        return whole
    longer = _memory_only(longer)
    whole = longer
    for _, shorter in lines.shorter:
        whole = moved(whole, _memory_only(shorter), longer, depth - BLOCKS_TO_ESTIMATE)
    return whole


def _memory_only(sheet: Sheet) -> Sheet:
    return {key: value for key, value in sheet.items() if not isinstance(key, _WORK_KEYS)}


def _values_by_field(sheet: Sheet, kind: type[WorkKey]) -> dict[WorkKey, dict[str, float]]:
    """Return the numbers of each operator or collective in a sheet.

    The outer keys are the keys of the sheet, but with an empty `field`. The inner keys are the
    fields.
    """
    found: dict[WorkKey, dict[str, float]] = {}
    for key, value in sheet.items():
        if isinstance(key, kind):
            found.setdefault(key._replace(field=""), {})[key.field] = value
    return found


def _per_block(values: Mapping[str, float], role: Role) -> dict[str, int]:
    return {field: round(value / role.blocks) for field, value in values.items()}


def peak_of(sheet: Sheet, *, accumulates: bool = False, phase: str = "") -> float:
    """Return the peak bytes of a step, or of the phase `phase` of the step.

    `sheet` is a table with the work and the memory of a rank. If `accumulates` is true, gradients
    of several micro batches are accumulated. Then the gradients of earlier micro batches stay alive
    throughout forward and backward, in addition to the new gradient that is added to them.
    """
    held = sheet.get("gradients", 0.0) + sheet.get("new gradient", 0.0)
    peak = 0.0
    for key, value in sheet.items():
        if not isinstance(key, MomentKey):
            continue
        if key.with_gradients and phase in ("", key.phase):
            peak = max(peak, value)
        if accumulates and not key.with_gradients:
            peak = max(peak, value + held)
    return peak


def dimension_of(collective: str) -> str:
    """Return the dimension of the mesh, such as `data`, over which a collective communicates."""
    if collective in ("_allgather_base_", "_reduce_scatter_base_"):
        return "data"
    return "replica" if collective == "allreduce_" else "tensor"


def _sheet(steps: Sequence[Profile], roles: Mapping[str, Role]) -> Sheet:
    """Create a sheet with the work of the last step and the peak memory of all steps.

    `steps` are the profiles of the steps of an estimate. `roles` maps each block to its role, in
    the order of the blocks.
    """
    sheet: dict[SheetKey, float] = {}

    def add(key: SheetKey, value: float) -> None:
        sheet[key] = sheet.get(key, 0.0) + value

    for op in steps[-1].op_counts:
        role, below = _role_of(op.module, roles)
        for field in OP_COUNT_FIELDS:
            key = OpKey(role, below, op.operator, op.phase, op.dtype, field)
            add(key, getattr(op, field))
    for call in steps[-1].communication:
        role, _ = _role_of(call.module, roles)
        add(CollectiveKey(role, call.collective, call.phase, "calls"), call.calls)
        add(CollectiveKey(role, call.collective, call.phase, "bytes"), call.bytes)
    for step in steps:
        _add_memory(sheet, memory_of(step).timeline, roles)
    return sheet


def _role_of(module: str, roles: Mapping[str, Role]) -> tuple[Role, str]:
    """Return the role of the block that contains a module, and the module's name below the block.

    For example, `.mlp` is the name of `layers.3.mlp` below the block `layers.3`. For a module
    outside all blocks, return `NO_BLOCK` and the whole name.
    """
    for block in ancestry(module):
        if block in roles:
            return roles[block], module[len(block) :]
    return NO_BLOCK, module


def _add_memory(
    sheet: dict[SheetKey, float], timeline: Iterable[Moment], roles: Mapping[str, Role]
) -> None:
    """Add the peak memory at each operator of a timeline to a sheet.

    If the sheet already has a peak under the key of the operator, the higher peak is kept. For an
    operator inside a block, the key contains the position of the block among the equal blocks. For
    an operator outside the blocks, it contains the block that ran before. A running number would
    not do, because it changes with the number of blocks.
    """

    def raise_to(key: SheetKey, value: float) -> None:
        sheet[key] = max(sheet.get(key, 0.0), value)

    positions: dict[str, tuple[int, int]] = {}
    for blocks in grouped(roles, roles.__getitem__).values():
        for index, block in enumerate(blocks):
            positions[block] = (index, index - len(blocks))
    last_block = list(roles)[-1] if roles else ""
    runs: Counter[tuple[str, str, str]] = Counter()
    outside = BEFORE_BLOCKS
    gradients_before = 0
    for moment in timeline:
        operation = (moment.module, moment.phase, moment.operator)
        role, below = _role_of(moment.module, roles)
        places: list[InBlock | OutsideBlocks] = [outside]
        if role != NO_BLOCK:
            block = moment.module.removesuffix(below)
            from_first, from_last = positions[block]
            outside = OutsideBlocks(block == last_block, role, from_first, from_last)
            run = runs[operation]
            places = [InBlock(role, from_first, run), InBlock(role, from_last, run)]
        live = moment.by_category
        highest = moment.highest_bytes or moment.live_bytes
        in_optimizer = moment.phase == "optimizer"
        gradients = live.gradients if in_optimizer else 0
        activations = 0
        if moment.phase == "backward":
            activations = live.activations
        raise_to("gradients", gradients)
        raise_to("parameters", live.parameters)
        raise_to("optimizer_state", live.optimizer_state)
        raise_to("activations", activations)
        if not in_optimizer:
            raise_to("new gradient", live.gradients - gradients_before)
        for place in places:
            key = MomentKey(place, below, moment.operator, moment.phase, with_gradients=True)
            raise_to(key, highest)
            if not in_optimizer:
                raise_to(key._replace(with_gradients=False), highest - live.gradients)
        runs[operation] += 1
        gradients_before = live.gradients

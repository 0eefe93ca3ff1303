"""The work and the memory of a rank as numbers by key, which are lines in the batch, in the depth, and in one over the ranks.

A few estimates of small cases show the lines: of one and two samples, of a model with few of its
equal blocks, on few ranks and on many. Any other case is a point on them. Bytes are the most in
each part of the step, so that a peak may move from one part to another.
"""

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import nn

from lflops.estimation.changes import Policy, checkpointed
from lflops.estimation.estimate import Estimator, Subject
from lflops.estimation.mesh import tensor_plan
from lflops.estimation.planning.block_trials import (
    Fold,
    folded,
    folds_of,
    full_names,
    memory_of,
    shorter_folds,
)
from lflops.model.module_tree import blocks_in
from lflops.profile.module_names import ancestry
from lflops.profile.profile import OP_COUNT_FIELDS, Communication, Moment, OpCount, Profile
from lflops.profile.series import gathered

# blocks of a run in a folded model; a second one has one less
KEPT = 5

Sheet = Mapping[tuple[Any, ...], float]
Role = tuple[
    str, int
    # so many blocks that do the same, from the first one's name in the whole model on; or one name
]

# what is no bytes of a moment
_WORK_KINDS = ("cell", "communication")


class Case(NamedTuple):
    """What an estimate is of."""

    policy: Policy
    samples: int
    # without a pipeline
    mesh: Mapping[str, int]


def moved(sheet: Sheet, low: Sheet, high: Sheet, share: float) -> Sheet:
    """A sheet, and `share` times what `high` has beyond `low`.

    Moments of the step that are not in all three are left out.
    """
    keys = [
        key
        for key in {**sheet, **high, **low}
        if key[0] in _WORK_KINDS or (key in sheet and key in low and key in high)
    ]
    return {
        key: sheet.get(key, 0.0) + (high.get(key, 0.0) - low.get(key, 0.0)) * share for key in keys
    }


class WorkSheets:
    """Estimates of one model, whose runs of equal blocks are folded, as sheets of the whole model."""

    def __init__(
        self,
        estimator: Callable[[Mapping[str, int]], Estimator],
        make: Callable[[int], Subject],
        context: Callable[[Mapping[str, int]], AbstractContextManager[Any]],
        *,
        progress: bool = False,
    ) -> None:
        """Take what makes the estimator of a mesh, the subject of a number of samples, and the context in which a mesh's ranks run."""
        self._estimator, self._make, self._context = estimator, make, context
        self._ends: dict[
            str, tuple[Sheet, list[tuple[int, Sheet]]]
            # of the lines in the depth, by case
        ] = {}
        self._known: dict[tuple[str, int | None], Sheet] = {}
        self._progress = progress
        # of all blocks of the whole model
        self._names: list[str] = []
        # of the last estimate
        self._folds: Sequence[Fold] = ()
        # that can recompute, in the whole model
        self.blocks: list[str] = []
        self.depth = (
            # of a model whose blocks are one run of equal ones, long enough to be folded
            0
        )
        # of attention, by what they are called
        self.heads: Mapping[str, int] = {}
        self.has_tensor_plan = False
        self.estimates = 0
        # the last estimate: what sheets do not have
        self.template: Profile

    def sheet(self, case: Case, depth: int | None = None) -> Sheet:
        """The sheet of a case, as the whole model has it.

        Or the memory of a model with so many blocks in its only run.
        """
        if (key := repr(case)) not in self._ends:
            try:
                longer = self._estimated(case, None)
            except Exception:  # noqa: BLE001 - some models do not run with fewer blocks: what is wrong with the whole one comes up below
                longer = self._estimated(case, ())
            self._ends[key] = (
                longer,
                [
                    (fold.length, self._estimated(case, folds))
                    for fold, folds in shorter_folds(self._folds)
                ],
            )
        if (key, depth) not in self._known:
            longer, shorter = self._ends[key]
            # whose memory alone is asked for
            if depth is not None:
                known = (longer, *(short for _, short in shorter))
                longer, *lower = (
                    {key: value for key, value in each.items() if key[0] not in _WORK_KINDS}
                    for each in known
                )
                shorter = [(depth, short) for short in lower]
            whole = longer
            for length, short in shorter:
                whole = moved(whole, short, longer, length - KEPT)
            self._known[key, depth] = whole
        return self._known[key, depth]

    def whole(self, case: Case) -> Profile:
        """The estimate of a whole model."""
        # watched, it would not simulate the allocator
        return self._run(case, (), None)

    def _estimated(self, case: Case, folds: Sequence[Fold] | None) -> Sheet:
        steps: list[Profile] = []
        self._run(case, folds, steps.append)
        # the first and the last of a run each are one role
        inside: dict[str, Role] = {}
        for fold in self._folds:
            between = [*map(fold.block, range(fold.first + 1, fold.first + fold.length - 1))]
            inside |= dict.fromkeys(between, (between[0], len(between)))
        return _sheet(
            steps[-2:],
            {
                short: inside.get(name, (name, 1))
                for short, name in full_names(self._folds, self._names).items()
            },
        )

    def _run(
        self, case: Case, folds: Sequence[Fold] | None, watch: Callable[[Profile], None] | None
    ) -> Profile:
        """An estimate.

        `folds` are left out; `None` is all that is worth it. `watch` takes the profile of each
        step.
        """
        self.estimates += 1
        if self._progress:
            sys.stderr.write(f"\rplan: {self.estimates} estimates ")
        estimator = self._estimator(case.mesh)
        estimator.watch = watch

        def make() -> Subject:
            subject = self._make(case.samples)
            blocks = blocks_in(subject.model)
            self._names, self.blocks, self.heads = (
                list(blocks),
                list(_recomputable(blocks)),
                _heads_of(subject.model),
            )
            self.has_tensor_plan = bool(tensor_plan(subject.model))
            runs = [fold._replace(kept=KEPT) for fold in folds_of(blocks)]
            self.depth = len(blocks) if [run.length for run in runs] == [len(blocks)] else 0
            self._folds = runs if folds is None else folds
            stack.enter_context(folded(subject.model, self._folds))
            left = _recomputable(blocks_in(subject.model))
            stack.enter_context(checkpointed(left, dict.fromkeys(left, case.policy)))
            return subject

        with contextlib.ExitStack() as stack, self._context(case.mesh):
            self.template = estimator.run(make)
        return self.template

    def profile(self, sheet: Sheet, mesh: Mapping[str, int]) -> Profile:
        """The work of a sheet as one of a mesh's ranks does it, with the names of blocks in place of those of modules."""
        cells = gathered(
            (tuple(key), (field, value))
            for (*key, field), value in sheet.items()
            if key and key[0] in _WORK_KINDS
        )
        work: list[OpCount] = []
        collectives: list[Communication] = []
        for (kind, role, *key), values in cells.items():
            first, number = role
            each = {field: round(value / number) for field, value in values}
            place = self._names.index(first) if number > 1 else 0
            for module in self._names[place : place + number] if number > 1 else [first]:
                if kind == "cell":
                    _, operator, phase, dtype = key
                    work.append(
                        OpCount(module=module, operator=operator, phase=phase, dtype=dtype, **each)
                    )
                elif (ranks := mesh.get(dimension_of(key[0]), 1)) > 1:
                    collective, phase = key
                    its: Any = {
                        "calls": max(each["calls"], 1),
                        "bytes": each["bytes"],
                        "group": "",
                        "group_size": ranks,
                    }
                    collectives.append(
                        Communication(module=module, phase=phase, collective=collective, **its)
                    )
        root = self.template.modules[""]
        modules_at_work = {*(each.module for each in work), *(each.module for each in collectives)}
        rows = {above for module in modules_at_work for above in ancestry(module)}
        run, modules = (
            replace(self.template.run, world_size=prod(mesh.values())),
            dict.fromkeys(["", *rows], root),
        )
        return replace(
            self.template,
            op_counts=tuple(work),
            communication=tuple(collectives),
            modules=modules,
            memory=None,
            run=run,
        )


def peak_of(sheet: Sheet, *, accumulates: bool = False, phase: str = "") -> float:
    """The most bytes alive, also in one phase only."""
    # With accumulation the gradients of earlier micro batches are alive in all of forward and
    # backward, and one that is added to them.
    highest = [
        value for (kind, *of), value in sheet.items() if kind == "bytes" and phase in ("", of[-1])
    ]
    if accumulates:
        held = sheet.get(("gradients",), 0.0) + sheet.get(("new gradient",), 0.0)
        highest += [
            value + held for (kind, *_), value in sheet.items() if kind == "bytes without gradients"
        ]
    return max(highest, default=0.0)


def _recomputable(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: block for name, block in blocks.items() if next(block.children(), None) is not None
    }


def _heads_of(model: Any) -> dict[str, int]:
    """The heads of attention by transformers' configuration, which no rank divides.

    None where there is no configuration.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    names = {
        "num_attention_heads": "heads of attention",
        "num_key_value_heads": "heads of keys and values",
    }
    return {
        words: heads
        for name, words in names.items()
        if isinstance(heads := getattr(config, name, None), int)
    }


def dimension_of(collective: str) -> str:
    """The dimension of the mesh over which it goes."""
    if collective in ("_allgather_base_", "_reduce_scatter_base_"):
        return "data"
    return "replica" if collective == "allreduce_" else "tensor"


def _sheet(steps: Sequence[Profile], roles: Mapping[str, Role]) -> Sheet:
    """The work of the last step, and of all of them the most bytes by part of the step."""
    sheet: defaultdict[tuple[Any, ...], float] = defaultdict(float)

    for cell in steps[-1].op_counts:
        role, below = _place(cell.module, roles)
        for field in OP_COUNT_FIELDS:
            sheet["cell", role, below, cell.operator, cell.phase, cell.dtype, field] += getattr(
                cell, field
            )
    for each in steps[-1].communication:
        for field in ("calls", "bytes"):
            sheet[
                "communication", _place(each.module, roles)[0], each.collective, each.phase, field
            ] += getattr(each, field)
    for step in steps:
        _add_memory(sheet, memory_of(step).timeline, roles)
    return dict(sheet)


def _place(module: str, roles: Mapping[str, Role]) -> tuple[Role, str]:
    """The role of the block that a module is in, and the rest of its name."""
    return next(
        ((roles[above], module[len(above) :]) for above in ancestry(module) if above in roles),
        (("", 1), module),
    )


def _add_memory(
    sheet: dict[tuple[Any, ...], float], timeline: Sequence[Moment], roles: Mapping[str, Role]
) -> None:
    same = gathered((role, short) for short, role in roles.items()).values()
    last = [*roles][-1] if roles else ""
    order = {
        short: (index, index - len(blocks)) for blocks in same for index, short in enumerate(blocks)
    }
    before, seen = 0, Counter[tuple[str, str, str]]()
    # the block before, for what is in none
    after: tuple[Any, ...] = ()
    for moment in timeline:
        role, below = _place(moment.module, roles)
        highest, gradients = moment.highest_bytes or moment.live_bytes, moment.by_category.gradients
        at = moment.module, moment.phase, moment.operator
        where: list[tuple[Any, ...]] = [("", *after)]
        if role != ("", 1):
            # Blocks run the same operators, so that their number says which one it is; the rest of
            # the model has more in a deeper one.
            places = order[
                short := moment.module.removesuffix(below)
                # from the first and from the last one of its role
            ]
            after, where = (
                (short == last, role, *places),
                [(role, number, seen[at]) for number in places],
            )
        category = moment.by_category
        known: dict[tuple[Any, ...], int] = {
            ("gradients",): gradients if moment.phase == "optimizer" else 0
        }
        known |= {
            ("parameters",): category.parameters,
            ("optimizer_state",): category.optimizer_state,
        }
        known["activations",] = category.activations if moment.phase == "backward" else 0
        for each in where:
            key = (each, below, moment.operator, moment.phase)
            known["bytes", *key] = highest
            if moment.phase != "optimizer":
                known["bytes without gradients", *key] = highest - gradients
                known["new gradient",] = gradients - before
        seen[at] += 1
        for name, value in known.items():
            sheet[name] = max(sheet.get(name, 0.0), value)
        before = gradients

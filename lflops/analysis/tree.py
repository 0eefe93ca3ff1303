"""The modules of a profile as rows.

A tree that folds what repeats, or a flat list by own work; and the places that take most time.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, starmap
from operator import attrgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.roofline import AboveRoofReason, Bound, Part, Point, Total, point_of
from lflops.analysis.utilization import flops_per_second
from lflops.profile.module_names import children, fold_repeats
from lflops.profile.profile import COUNTS, ModuleProfile, Profile, Work
from lflops.profile.records import PHASES, Phase
from lflops.profile.series import sum_known, summed, sums


class WorkCounts(Struct, frozen=True, kw_only=True, gc=False):
    """Work in one phase.

    The fields mean what those of `Work` mean, inclusive or own as the row says.
    """

    calls: int = 0
    macs: int = 0
    executed_macs: int = 0
    flops: int = 0
    bytes_moved: int = 0

    def __add__(self, other: "WorkCounts") -> "WorkCounts":
        return WorkCounts(
            **{field: getattr(self, field) + getattr(other, field) for field in _COUNTS}
        )

    def __mul__(self, times: int) -> "WorkCounts":
        return WorkCounts(**{field: getattr(self, field) * times for field in _COUNTS})


class Repeat(Struct, frozen=True, kw_only=True):
    """A run of identical siblings, by the labels at its ends."""

    first: str
    last: str
    times: int


class Row(Struct, frozen=True, kw_only=True):
    """One module, or a run of identical siblings.

    Then every count is that of ONE of them, and a time is the mean of all.

    For a layer in a run of 12 identical blocks that is the mean over all 12. The shares are of the
    root's MACs in the phase asked for, or of its FLOPs where the root has no MACs in it, as
    `share_of` says, and of its time.
    """

    # the dotted path; of the first one where the row is a run
    name: str
    # its last part
    label: str
    # every module that the row represents, within the row above
    names: tuple[str, ...]
    # the run, `None` where the row is a single module
    repeat: Repeat | None
    # 0 for the root
    depth: int
    # whether figures and parameters are without what is below it
    own: bool
    kind: str
    # how often it was called in forward
    calls: int
    compiled: bool
    owner: str | None
    parameters: int
    trainable_parameters: (
        int | None
        # `None` where only the inclusive number is known. So is `parameter_bytes`.
    )
    parameter_bytes: int | None
    # the work of each phase
    phases: Mapping[Phase, WorkCounts]
    seconds: Mapping[
        Phase, float | None
        # the median time of each phase; `None` where it is unknown
    ]
    share: float | None
    time_share: float | None
    # the rows below, where there is a tree
    children: tuple["Row", ...] = ()

    @property
    def times(self) -> int:
        """How many modules the row represents within the row above."""
        return len(self.names)

    def one(self, phase: Phase | None) -> WorkCounts:
        """The work of one of the row's modules; `phase=None` adds the phases up."""
        return sum((self.phases[each] for each in _phases(phase)), WorkCounts())

    def all(self, phase: Phase | None) -> WorkCounts:
        """The work of all the row's modules within one of the row above."""
        return self.one(phase) * self.times

    def time(self, phase: Phase | None) -> float | None:
        """Seconds of one of the row's modules.

        `phase=None` adds up those of `TIMED_PHASES` that are known.
        """
        return _added_up(self.seconds, phase)

    def flops_per_second(self, phase: Phase | None) -> float | None:
        """2 x MACs over the time of the phases that they ran in.

        `None` where one of these has no time.
        """
        ran = [each for each in _phases(phase) if self.phases[each].macs] or list(_phases(phase))[
            :1
        ]
        return flops_per_second(self.one(phase).macs, sum_known(self.seconds[name] for name in ran))


_ORDERS: dict[str, Callable[[Row, Phase | None], Any]] = {
    "macs": lambda row, phase: (-row.all(phase).macs, -row.all(phase).flops),
    "flops": lambda row, phase: -row.all(phase).flops,
    "parameters": lambda row, _: -row.parameters * row.times,
    "bytes": lambda row, phase: -row.all(phase).bytes_moved,
    "name": lambda row, _: [
        int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", row.name))
    ],
    "time": lambda row, phase: (row.time(phase) is None, -(row.time(phase) or 0) * row.times),
}

# sort keys of rows: the name, or a metric, largest first
SORT_KEYS = tuple(_ORDERS)

_COUNTS = WorkCounts.__struct_fields__


def tree(
    profile: Profile,
    *,
    depth: int = -1,
    fold: bool = True,
    sort: str | None = None,
    phase: Phase | None = "forward",
    below: Mapping[str, Sequence[str]] | None = None,
    groups: Mapping[str, int] | None = None,
) -> tuple[Row, ...]:
    """The modules by name, inclusive: the root, and in each row the rows below it.

    A `ValueError` where an argument has a wrong value.

    `depth` is how many levels below the root are shown, -1 for all. With `fold`, consecutive
    siblings with the same kinds, labels and counts all the way down share a row. Siblings are
    sorted by one of `SORT_KEYS`, a run by the sum of its modules; `None` keeps the model's order.
    `share` and `sort` are about the `phase`, `None` for all phases together. `below` is what
    `children` returns, `groups` what `identical_subtrees` returns, where they are known.
    """
    _check_sort(profile, sort, phase)
    if depth < -1:
        raise ValueError(
            f"depth={depth}: give -1 for all levels, 0 for the model alone, or how many to show below it"
        )
    below = below or children(profile.modules)
    if groups is None:
        groups = (
            identical_subtrees(profile, below)
            if fold
            else {name: index for index, name in enumerate(below)}
        )

    def rows(siblings: Iterable[tuple[str, ...]], level: int) -> tuple[Row, ...]:
        """Rows of siblings; each comes with the names of its counterparts in the other modules of the run above."""
        made = []
        for _, group in groupby(siblings, key=lambda sibling: groups[sibling[0]]):
            run = tuple(group)
            folded = [name for sibling in run for name in sibling]
            row = _row(
                profile, tuple(sibling[0] for sibling in run), folded, own=False, phase=phase
            )
            made.append(
                row
                if level == depth
                else replace(
                    row, children=rows(zip(*(below[n] for n in folded), strict=True), level + 1)
                )
            )
        return _sorted(made, sort, phase)

    return rows([("",)], 0)


def walk(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a tree, each before those below it."""
    for row in rows:
        yield row
        yield from walk(row.children)


def flat(
    profile: Profile, *, sort: str | None = None, phase: Phase | None = "forward"
) -> tuple[Row, ...]:
    """Every module by its own work.

    `sort` is by MACs unless given. It and the phase are as in `tree`, and raise the same.
    """
    _check_sort(profile, sort, phase)
    return _sorted(
        [_row(profile, (name,), (name,), own=True, phase=phase) for name in profile.modules],
        sort or "macs",
        phase,
    )


def totals(profile: Profile) -> dict[Phase, WorkCounts]:
    return _by_phase(profile.modules[""], own=False)


def unsharded_macs(profile: Profile) -> dict[str, int | None]:
    """The model's MACs in each phase that has any; empty where this rank does all of them."""
    # A phase is `None` where they are unknown: the ranks are known to share a batch, or each to
    # hold a part of the parameters.
    root, tensor_parallel = profile.modules[""], profile.run.tensor_parallel_size
    works: dict[str, Work] = {
        phase: work for phase in PHASES if (work := root.work(phase)).macs or work.logical_macs
    }
    logical: dict[str, int | None] = {phase: work.logical_macs for phase, work in works.items()}
    is_sharded = root.local_parameters != root.parameters or tensor_parallel not in {None, 1}
    differs = any(macs is not None and macs != works[phase].macs for phase, macs in logical.items())
    return logical if differs or (is_sharded and None in logical.values()) else {}


def share_of(profile: Profile, phase: Phase | None) -> Literal["macs", "flops"]:
    """The metric that shares in a phase are of.

    MACs, or FLOPs where there are no MACs, as in the optimizer.
    """
    root = [profile.modules[""].work(each) for each in _phases(phase)]
    return (
        "flops"
        if any(work.flops for work in root) and not any(work.macs for work in root)
        else "macs"
    )


def has_times(profile: Profile, phase: Phase | None) -> bool:
    """Whether any module has a time in that phase, or in any of them."""
    return any(
        module.work(each).seconds is not None
        for module in profile.modules.values()
        for each in _phases(phase)
    )


def _check_sort(profile: Profile, sort: str | None, phase: Phase | None) -> None:
    if sort is not None and sort not in SORT_KEYS:
        raise ValueError(f"sort={sort!r}: give one of {', '.join(SORT_KEYS)}")
    if sort == "time" and not has_times(profile, phase):
        where = "in any phase" if phase is None else f"in {phase}"
        raise ValueError(
            f"sort='time': no module of this profile has a time {where}; give one of {', '.join(SORT_KEYS[:-1])}"
        )


def _sorted(rows: list[Row], sort: str | None, phase: Phase | None) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: _ORDERS[sort](row, phase))) if sort else tuple(rows)


def _row(
    profile: Profile,
    names: tuple[str, ...],
    folded: Sequence[str],
    *,
    own: bool,
    phase: Phase | None,
) -> Row:
    """The row of the first name, with the mean time of all folded modules, without children."""
    module = profile.modules[names[0]]
    phases = _by_phase(module, own=own)
    root, metric = profile.modules[""], share_of(profile, phase)
    total = sum(getattr(root.work(each), metric) for each in _phases(phase))
    total_time = _added_up(_seconds(profile, [""], own=False), phase)
    seconds = _seconds(profile, folded, own=own)
    time = _added_up(seconds, phase)
    first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
    return Row(
        name=names[0],
        label=first,
        names=names,
        repeat=Repeat(first=first, last=last, times=len(names)) if len(names) > 1 else None,
        depth=module.depth,
        own=own,
        kind=module.class_name,
        calls=module.calls,
        compiled=module.compiled,
        owner=module.owner,
        parameters=module.self_parameters if own else module.parameters,
        trainable_parameters=None if own else module.trainable_parameters,
        parameter_bytes=None if own else module.parameter_bytes,
        phases=phases,
        seconds=seconds,
        share=sum(getattr(phases[each], metric) for each in _phases(phase)) / total
        if total
        else None,
        time_share=time / total_time if total_time and time is not None else None,
    )


def _seconds(profile: Profile, names: Sequence[str], *, own: bool) -> dict[Phase, float | None]:
    """The mean over the modules, where it is known of each."""
    field = "self_seconds" if own else "seconds"
    means: dict[Phase, float | None] = {}
    for phase in PHASES:
        spreads = [getattr(profile.modules[name].work(phase), field) for name in names]
        means[phase] = None if None in spreads else fmean(spread.median for spread in spreads)
    return means


def _added_up(seconds: Mapping[Phase, float | None], phase: Phase | None) -> float | None:
    """The seconds of one phase, or of all phases.

    A phase whose time is unknown hides none of the others.
    """
    known = [
        each
        for name in ((phase,) if phase else TIMED_PHASES)
        if (each := seconds[name]) is not None
    ]
    return sum(known) if known else None


def _by_phase(module: ModuleProfile, *, own: bool) -> dict[Phase, WorkCounts]:
    prefix = "self_" if own else ""
    return {
        phase: WorkCounts(
            **{field: getattr(module.work(phase), prefix + field) for field in _COUNTS}
        )
        for phase in PHASES
    }


def _phases(phase: Phase | None) -> tuple[Phase, ...]:
    return PHASES if phase is None else (phase,)


TIMED_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
"""The phases of a module's total time. The optimizer's is rarely known by module."""


class BusyModules(Struct, frozen=True, kw_only=True):
    """The modules at one place of the model, without the modules below them."""

    pattern: str
    # the pattern; where only some at that place have a time, the names of these
    name: str
    kind: str
    modules: int
    # total time of all of them in a step
    seconds: float
    # of forward and backward, of all of them
    macs: int


def total_seconds(module: ModuleProfile, *, own: bool = False) -> float | None:
    """Forward, backward, recompute, and the optimizer if known.

    `None` if no phase has a time. `own`: without the modules below.
    """
    # A phase whose time is unknown is left out, so that it does not hide the others.
    works = [module.work(phase) for phase in TIMED_PHASES]
    known = [
        spread.median
        for work in works
        if (spread := work.self_seconds if own else work.seconds) is not None
    ]
    return sum(known) if known else None


def busiest(
    profile: Profile,
    patterns: Mapping[str, str],
    communicating: Mapping[tuple[str, str], float] | None = None,
) -> tuple[BusyModules, ...]:
    """All places with a time, the one with the most time first.

    Seconds of communication are no work of the module.
    """
    without = summed((name, seconds) for (name, _), seconds in (communicating or {}).items())
    # A module that never ran, as a list of layers, has no time.
    own = {
        name: (total_seconds(module, own=True) or 0.0) - without.get(name, 0.0)
        for name, module in profile.modules.items()
    }
    timed = {name: seconds for name, seconds in own.items() if seconds > 0}
    found = []
    for label, names in fold_repeats(timed, lambda name: (name,), patterns):
        modules = [profile.modules[name] for name in names]
        found.append(
            BusyModules(
                pattern=patterns[names[0]],
                name=label,
                kind=modules[0].class_name,
                modules=len(names),
                seconds=sum(timed[name] for name in names),
                macs=sum(
                    module.forward.self_macs + module.backward.self_macs for module in modules
                ),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.seconds))


_COMPARED = (*COUNTS, *(f"self_{count}" for count in COUNTS), "logical_macs", "self_logical_macs")
_FACTS = (
    *(
        "class_name",
        "calls",
        "compiled",
        "parameters",
        "trainable_parameters",
        "parameter_bytes",
        "trainable_parameter_bytes",
    ),
    *("self_parameters", "local_parameters", "local_parameter_bytes"),
)

_FACTS_OF, _WORKS_OF, _COUNTS_OF = (
    attrgetter(*_FACTS),
    attrgetter(*PHASES),
    attrgetter(*_COMPARED),
    # five times as fast as loops
)
_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_WORST_FIRST: tuple[AboveRoofReason, ...] = ("error", "cache_unknown", "compiled", "cache")


def identical_subtrees(profile: Profile, below: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A number for each module.

    Two modules have the same where their counts are equal, and the labels and counts of all below
    them.
    """
    return numbered(below, lambda name: _counts(profile.modules[name]))


def numbered(below: Mapping[str, Sequence[str]], key: Callable[[str], Hashable]) -> dict[str, int]:
    """A number for each module.

    Two modules have the same where their keys are equal, and the labels and keys of all below them.
    """
    numbers: dict[str, int] = {}
    seen: dict[Hashable, int] = {}
    for name in sorted(
        below,
        key=len,
        reverse=True,
        # longer names first: children before their parents
    ):
        children = tuple((child.rpartition(".")[2], numbers[child]) for child in below[name])
        numbers[name] = seen.setdefault((key(name), children), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    """The values that identical modules share.

    Neither times nor the peak, which depend on when a module runs.
    """
    return (
        module.owner is None,
        _FACTS_OF(module),
        *map(_COUNTS_OF, _WORKS_OF(module)),
        frozenset(module.dtypes.items()),
    )


class Repeats(NamedTuple):
    """The parts of modules that repeat at one place and did the same work, in the model's order, with their pattern or only name."""

    label: str
    parts: Sequence[Part]

    @property
    def seconds(self) -> float | None:
        """The sum over the parts; `None` where one is unknown."""
        return sum_known(part.seconds for part in self.parts)

    @property
    def roof_seconds(self) -> float | None:
        """The sum over the parts; `None` where one is unknown."""
        return sum_known(part.roof_seconds for part in self.parts)

    @property
    def point(self) -> Point:
        """Their sum.

        Its bound is that of most of its time. It is above its roof if one of them is.
        """
        first, *others = self.parts
        if not others:
            return point_of(first)
        over = {part.over for part in self.parts}
        total = Total(
            **sums([part.total for part in self.parts], "calls", "flops", "bytes_moved"),
            seconds=self.roof_seconds,
            bound=max(
                _BOUNDS,
                key=lambda bound: sum(
                    part.roof_seconds or 0.0 for part in self.parts if part.total.bound == bound
                ),
            ),
            costs=(),
        )
        fused = sum_known(part.fused_bytes for part in self.parts)
        return replace(
            point_of(Part(total, self.label, first.phase, seconds=self.seconds, fused_bytes=fused)),
            seconds_to_win=sum_known(part.seconds_to_win for part in self.parts),
            over=next((each for each in _WORST_FIRST if each in over), None),
        )


_MODULE_AND_WORK = attrgetter("module", "phase", "total.flops", "total.bytes_moved")


def fold_parts(parts: Iterable[Part], patterns: Mapping[str, str]) -> Iterator[Repeats]:
    """Group the parts of modules that repeat at one place and did the same work, in the order of the first ones."""
    return starmap(Repeats, fold_repeats(parts, _MODULE_AND_WORK, patterns))

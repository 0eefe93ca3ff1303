"""Arrange the modules of a profile as table rows: a tree with folded repeats, or a flat list.

Also finds the parts of the model that take the most time, and merges the roofline points of
repeated modules.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.roofline import (
    AboveRoofReason,
    Bound,
    Point,
    RooflinePart,
    Total,
    bound_of,
    point_of,
)
from lflops.analysis.utilization import flops_per_second
from lflops.profile.module_names import children, fold_repeats
from lflops.profile.profile import COUNTS, ModuleProfile, Profile
from lflops.profile.records import PHASES, Phase, median_of
from lflops.profile.series import positions, ratio, sum_known, summed

TIMED_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
"""The phases that a module's total time includes.

The time of the optimizer is rarely known for single modules.
"""


class WorkCounts(Struct, frozen=True, kw_only=True, gc=False):
    """Work in one phase, with the same fields as `Work`.

    It includes submodules if the figures of its row do.
    """

    calls: int = 0
    macs: int = 0
    executed_macs: int = 0
    flops: int = 0
    bytes_moved: int = 0

    def __add__(self, other: "WorkCounts") -> "WorkCounts":
        return WorkCounts(
            calls=self.calls + other.calls,
            macs=self.macs + other.macs,
            executed_macs=self.executed_macs + other.executed_macs,
            flops=self.flops + other.flops,
            bytes_moved=self.bytes_moved + other.bytes_moved,
        )

    def __mul__(self, times: int) -> "WorkCounts":
        return WorkCounts(
            calls=self.calls * times,
            macs=self.macs * times,
            executed_macs=self.executed_macs * times,
            flops=self.flops * times,
            bytes_moved=self.bytes_moved * times,
        )


_COUNTS = WorkCounts.__struct_fields__


class Repeat(Struct, frozen=True, kw_only=True):
    """Consecutive identical siblings, with the labels of the first and the last sibling."""

    first: str
    last: str
    times: int


class ModuleRow(Struct, frozen=True, kw_only=True):
    """One module, or consecutive identical siblings.

    For several siblings, every count is for ONE sibling, and a time is the mean over the siblings.
    A row inside 12 identical blocks has the mean over all 12 blocks. Shares are relative to the
    root's work in the requested phase: its MACs, or its FLOPs if there are no MACs (see
    `share_of`).

    Attributes:
        name: Dotted path of the module or of the first sibling.
        label: Last part of `name`.
        names: Names of all modules that the row stands for, inside one module of the row above.
        repeat: The siblings, or `None` for a single module.
        depth: Levels below the root; the root has 0.
        is_self: If true, figures and parameters exclude the submodules.
        class_name: Class name.
        calls: Calls in forward.
        trainable_parameters: `None` if only the number with submodules is known. The same holds for
            `parameter_bytes`.
        phases: Work by phase.
        seconds: Median seconds by phase; `None` if unknown.
        children: The rows below, in a tree.
    """

    name: str
    label: str
    names: tuple[str, ...]
    repeat: Repeat | None
    depth: int
    is_self: bool
    class_name: str
    calls: int
    compiled: bool
    owner: str | None
    parameters: int
    trainable_parameters: int | None
    parameter_bytes: int | None
    phases: Mapping[Phase, WorkCounts]
    seconds: Mapping[Phase, float | None]
    share: float | None
    time_share: float | None
    children: tuple["ModuleRow", ...] = ()

    @property
    def times(self) -> int:
        """Number of modules that the row stands for, inside one module of the row above."""
        return len(self.names)

    def one(self, phase: Phase | None) -> WorkCounts:
        """Work of one of the row's modules; `phase=None` adds up all phases."""
        total = WorkCounts()
        for name in phases_of(phase):
            total += self.phases[name]
        return total

    def all(self, phase: Phase | None) -> WorkCounts:
        """Work of all the row's modules, inside one module of the row above."""
        return self.one(phase) * self.times

    def time(self, phase: Phase | None) -> float | None:
        """Seconds of one of the row's modules; `phase=None` adds up the known `TIMED_PHASES`."""
        return _total_time(self.seconds, phase)

    def flops_per_second(self, phase: Phase | None) -> float | None:
        """2 x MACs over the time of the phases that ran them; `None` if a phase has no time."""
        phases = phases_of(phase)
        ran = [name for name in phases if self.phases[name].macs]
        seconds = sum_known(self.seconds[name] for name in ran or phases[:1])
        return flops_per_second(self.one(phase).macs, seconds)


def _by_macs(row: ModuleRow, phase: Phase | None) -> Any:
    work = row.all(phase)
    return -work.macs, -work.flops


def _by_name(row: ModuleRow, _: Phase | None) -> Any:
    parts: list[str | int] = list(re.split(r"(\d+)", row.name))
    # Every second part is a number.
    parts[1::2] = map(int, parts[1::2])
    return parts


def _by_time(row: ModuleRow, phase: Phase | None) -> Any:
    seconds = row.time(phase)
    return seconds is None, -(seconds or 0) * row.times


def _by_flops(row: ModuleRow, phase: Phase | None) -> Any:
    return -row.all(phase).flops


def _by_parameters(row: ModuleRow, _: Phase | None) -> Any:
    return -row.parameters * row.times


def _by_bytes(row: ModuleRow, phase: Phase | None) -> Any:
    return -row.all(phase).bytes_moved


_ORDERS: dict[str, Callable[[ModuleRow, Phase | None], Any]] = {
    "macs": _by_macs,
    "flops": _by_flops,
    "parameters": _by_parameters,
    "bytes": _by_bytes,
    "name": _by_name,
    "time": _by_time,
}

SORT_KEYS = tuple(_ORDERS)
"""Sort keys of rows: the name, or a metric, largest first."""


def tree(
    profile: Profile,
    *,
    depth: int = -1,
    fold: bool = True,
    sort: str | None = None,
    phase: Phase | None = "forward",
    below: Mapping[str, Sequence[str]] | None = None,
    groups: Mapping[str, int] | None = None,
) -> tuple[ModuleRow, ...]:
    """Build the rows of the module tree: the root row, and its children below it.

    Figures include submodules.

    Args:
        profile: The profile.
        depth: Levels to show below the root; -1 for all.
        fold: Show consecutive siblings as one row if they have the same classes, labels and counts
            all the way down.
        sort: The key that siblings are sorted by, one of `SORT_KEYS`. A folded row is sorted by the
            sum over its modules. `None` keeps the model's order.
        phase: The phase that `share` and `sort` use; `None` for all phases together.
        below: The result of `children`, if already computed.
        groups: The result of `identical_subtrees`, if already computed.

    Raises:
        ValueError: An argument has an invalid value.
    """
    _check_sort(profile, sort, phase)
    if depth < -1:
        raise ValueError(
            f"depth={depth}: pass -1 for all levels, 0 for only the model, or the number of levels "
            "below the model"
        )
    below = below or children(profile.modules)
    if groups is None and fold:
        groups = identical_subtrees(profile, below)
    elif groups is None:
        groups = positions(below)
    builder = _RowBuilder(profile, phase, own=False)

    def rows(siblings: Iterable[tuple[str, ...]], level: int) -> tuple[ModuleRow, ...]:
        """Build the rows of siblings.

        Each tuple has a sibling and its counterparts in the modules that the row above folds.
        """
        made = []
        for _, group in groupby(siblings, key=lambda sibling: groups[sibling[0]]):
            names = []
            folded: list[str] = []
            for sibling in group:
                names.append(sibling[0])
                folded += sibling
            row = builder.row(tuple(names), folded)
            if level != depth:
                children_of_all = zip(*(below[name] for name in folded), strict=True)
                row = replace(row, children=rows(children_of_all, level + 1))
            made.append(row)
        return _sorted(made, sort, phase)

    return rows([("",)], 0)


def walk(rows: Iterable[ModuleRow]) -> Iterator[ModuleRow]:
    """Yield the rows of a tree, parents before children."""
    for row in rows:
        yield row
        yield from walk(row.children)


def flat(
    profile: Profile, *, sort: str | None = None, phase: Phase | None = "forward"
) -> tuple[ModuleRow, ...]:
    """Build a row per module without its submodules, sorted by MACs by default.

    `sort` and `phase` mean the same as in `tree`, and invalid values raise the same errors.
    """
    _check_sort(profile, sort, phase)
    builder = _RowBuilder(profile, phase, own=True)
    rows = [builder.row((name,), (name,)) for name in profile.modules]
    return _sorted(rows, sort or "macs", phase)


def totals(profile: Profile) -> dict[Phase, WorkCounts]:
    return _work_by_phase(profile.modules[""], own=False)


def unsharded_macs(profile: Profile) -> dict[str, int | None]:
    """The whole model's MACs by phase; empty if this rank computes all of them.

    A phase is `None` if its MACs are unknown, because ranks share a batch or hold only parts of the
    parameters.
    """
    root = profile.modules[""]
    differs = False
    logical: dict[str, int | None] = {}
    for phase in PHASES:
        work = root.work(phase)
        if work.macs or work.logical_macs:
            logical[phase] = work.logical_macs
            differs = differs or work.logical_macs not in {None, work.macs}
    is_sharded = (
        root.local_parameters != root.parameters
        or profile.run.tensor_parallel_size not in {None, 1}
    )
    is_unknown = is_sharded and None in logical.values()
    if not differs and not is_unknown:
        return {}
    return logical


def share_of(profile: Profile, phase: Phase | None) -> Literal["macs", "flops"]:
    """Return the metric for shares of a phase: MACs, or FLOPs if there are none (the optimizer)."""
    has_flops = False
    for name in phases_of(phase):
        work = profile.modules[""].work(name)
        if work.macs:
            return "macs"
        has_flops = has_flops or work.flops > 0
    if has_flops:
        return "flops"
    return "macs"


def has_times(profile: Profile, phase: Phase | None) -> bool:
    """Return whether any module has a time in the phase, or in any phase if it is `None`."""
    for module in profile.modules.values():
        if any(module.work(name).seconds is not None for name in phases_of(phase)):
            return True
    return False


def _check_sort(profile: Profile, sort: str | None, phase: Phase | None) -> None:
    if sort is not None and sort not in SORT_KEYS:
        raise ValueError(f"sort={sort!r}: pass one of {', '.join(SORT_KEYS)}")
    if sort == "time" and not has_times(profile, phase):
        where = f"in {phase or 'any phase'}"
        others = ", ".join(SORT_KEYS[:-1])
        raise ValueError(
            f"sort='time': no module of this profile has a time {where}; pass one of {others}"
        )


def _sorted(rows: list[ModuleRow], sort: str | None, phase: Phase | None) -> tuple[ModuleRow, ...]:
    if sort is None:
        return tuple(rows)
    order = _ORDERS[sort]
    return tuple(sorted(rows, key=lambda row: order(row, phase)))


class _RowBuilder:
    """Makes rows of a profile, with shares of the root's work and time in a phase."""

    def __init__(self, profile: Profile, phase: Phase | None, *, own: bool) -> None:
        self._profile = profile
        self._phase = phase
        self._own = own
        self._metric = share_of(profile, phase)
        self._total = self._work(_work_by_phase(profile.modules[""], own=False))
        self._total_time = _total_time(_seconds(profile, [""], own=False), phase)

    def row(self, names: tuple[str, ...], folded: Sequence[str]) -> ModuleRow:
        """Make the row of the modules `names`, with the mean time of all `folded` modules."""
        module = self._profile.modules[names[0]]
        labels = [name.rpartition(".")[2] for name in names]
        repeat = None
        if len(names) > 1:
            repeat = Repeat(first=labels[0], last=labels[-1], times=len(names))
        parameters = module.parameters
        trainable_parameters: int | None = module.trainable_parameters
        parameter_bytes: int | None = module.parameter_bytes
        if self._own:
            parameters = module.self_parameters
            trainable_parameters = None
            parameter_bytes = None
        phases = _work_by_phase(module, own=self._own)
        seconds = _seconds(self._profile, folded, own=self._own)
        return ModuleRow(
            name=names[0],
            label=labels[0],
            names=names,
            repeat=repeat,
            depth=module.depth,
            is_self=self._own,
            class_name=module.class_name,
            calls=module.calls,
            compiled=module.compiled,
            owner=module.owner,
            parameters=parameters,
            trainable_parameters=trainable_parameters,
            parameter_bytes=parameter_bytes,
            phases=phases,
            seconds=seconds,
            share=ratio(self._work(phases), self._total),
            time_share=ratio(_total_time(seconds, self._phase), self._total_time),
        )

    def _work(self, phases: Mapping[Phase, WorkCounts]) -> int:
        """Return the MACs or FLOPs in the phase that shares are relative to."""
        work: int = 0
        for name in phases_of(self._phase):
            work += getattr(phases[name], self._metric)
        return work


def _seconds(profile: Profile, names: Sequence[str], *, own: bool) -> dict[Phase, float | None]:
    """Mean seconds of the modules by phase.

    A phase is `None` if the time of any module is unknown.
    """
    field = "self_seconds" if own else "seconds"
    means: dict[Phase, float | None] = {}
    for phase in PHASES:
        medians = []
        for name in names:
            work = profile.modules[name].work(phase)
            medians.append(median_of(getattr(work, field)))
        means[phase] = ratio(sum_known(medians), len(names))
    return means


def _total_time(seconds: Mapping[Phase, float | None], phase: Phase | None) -> float | None:
    """Seconds of one phase, or the sum over all phases with known times."""
    if phase is not None:
        return seconds[phase]
    total = None
    for timed in TIMED_PHASES:
        took = seconds[timed]
        if took is not None:
            total = (total or 0.0) + took
    return total


def _work_by_phase(module: ModuleProfile, *, own: bool) -> dict[Phase, WorkCounts]:
    read = _SELF_COUNTS_OF if own else _INCLUSIVE_COUNTS_OF
    found = {}
    for phase in PHASES:
        counts = zip(_COUNTS, read(module.work(phase)), strict=True)
        found[phase] = WorkCounts(**dict(counts))
    return found


_INCLUSIVE_COUNTS_OF = attrgetter(*_COUNTS)
_SELF_COUNTS_OF = attrgetter(*(f"self_{field}" for field in _COUNTS))


def phases_of(phase: Phase | None) -> tuple[Phase, ...]:
    if phase is None:
        return PHASES
    return (phase,)


class BusyModules(Struct, frozen=True, kw_only=True):
    """Modules in the same place of the model, without their submodules.

    Attributes:
        pattern: The place, such as `layers.*.mlp`.
        name: The pattern, or the names of the modules if only some modules in this place have a
            time.
        kind: Class name.
        modules: Number of modules.
        seconds: Self time per step of all these modules.
        macs: MACs of all these modules in forward and backward.
    """

    pattern: str
    name: str
    kind: str
    modules: int
    seconds: float
    macs: int


def total_seconds(module: ModuleProfile, *, own: bool = False) -> float | None:
    """Seconds of forward, backward, recomputation and, if known, the optimizer.

    A phase with unknown time is left out; `None` if no phase has a time. `own` excludes the
    submodules.
    """
    total = None
    for phase in TIMED_PHASES:
        work = module.work(phase)
        spread = work.self_seconds if own else work.seconds
        if spread is not None:
            total = (total or 0.0) + spread.median
    return total


def busiest(
    profile: Profile,
    patterns: Mapping[str, str],
    communicating: Mapping[tuple[str, str], float] | None = None,
) -> tuple[BusyModules, ...]:
    """Group the modules by their place in the model, most self time first.

    Places without a time are left out. The seconds in `communicating`, keyed by module and pass,
    are subtracted.
    """
    subtracted = summed((name, seconds) for (name, _), seconds in (communicating or {}).items())
    timed: dict[str, float] = {}
    for name, module in profile.modules.items():
        seconds = (total_seconds(module, own=True) or 0.0) - subtracted.get(name, 0.0)
        if seconds > 0:
            timed[name] = seconds
    found = []
    for label, names in fold_repeats(timed, lambda name: (name,), patterns):
        macs = 0
        seconds = 0.0
        for name in names:
            module = profile.modules[name]
            macs += module.forward.self_macs + module.backward.self_macs
            seconds += timed[name]
        places = BusyModules(
            pattern=patterns[names[0]],
            name=label,
            kind=profile.modules[names[0]].class_name,
            modules=len(names),
            seconds=seconds,
            macs=macs,
        )
        found.append(places)
    return tuple(sorted(found, key=lambda place: -place.seconds))


# Identical modules have the same values of these attributes. Times and the peak are not in this
# list because they depend on when a module runs. An attrgetter is five times as fast as a loop.
_FACTS_OF = attrgetter(
    "class_name",
    "calls",
    "compiled",
    "parameters",
    "trainable_parameters",
    "parameter_bytes",
    "trainable_parameter_bytes",
    "self_parameters",
    "local_parameters",
    "local_parameter_bytes",
)
_WORKS_OF = attrgetter(*PHASES)
_COUNTS_OF = attrgetter(
    *COUNTS, *(f"self_{count}" for count in COUNTS), "logical_macs", "self_logical_macs"
)


def identical_subtrees(profile: Profile, below: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Number the modules so that equal numbers mean identical modules.

    Two modules are identical if they have equal counts, and if the labels and counts of all modules
    below them are equal.
    """
    return numbered(below, lambda name: _counts(profile.modules[name]))


def numbered(below: Mapping[str, Sequence[str]], key: Callable[[str], Hashable]) -> dict[str, int]:
    """Give modules the same number if their keys, and all labels and keys below, are equal."""
    numbers: dict[str, int] = {}
    seen: dict[Hashable, int] = {}
    # Longer names come first, so that children come before their parents.
    for name in sorted(below, key=len, reverse=True):
        labels = tuple((child.rpartition(".")[2], numbers[child]) for child in below[name])
        numbers[name] = seen.setdefault((key(name), labels), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    return (
        module.owner is None,
        _FACTS_OF(module),
        *map(_COUNTS_OF, _WORKS_OF(module)),
        frozenset(module.dtypes.items()),
    )


# If several parts are added up, the first of these reasons that any part has applies to the sum.
_WORST_FIRST: tuple[AboveRoofReason, ...] = ("error", "cache_unknown", "compiled", "cache")


class Repeats(NamedTuple):
    """Roofline parts of repeated modules that did the same work, in the model's order.

    Attributes:
        label: The pattern of the modules, or the name if there is only one module.
    """

    label: str
    parts: Sequence[RooflinePart]

    @property
    def seconds(self) -> float | None:
        """Sum over the parts; `None` if the time of any part is unknown."""
        return sum_known(part.seconds for part in self.parts)

    @property
    def roof_seconds(self) -> float | None:
        """Sum over the parts; `None` if the roof of any part is unknown."""
        return sum_known(part.roof_seconds for part in self.parts)

    @property
    def point(self) -> Point:
        """The sum of the parts as one point.

        The point has the bound that applies to most of the roof time. It is above its roof if any
        part is above its roof.
        """
        first = self.parts[0]
        if len(self.parts) == 1:
            return point_of(first)
        calls = flops = bytes_moved = 0
        sides: dict[Bound, float] = {"compute": 0.0, "memory": 0.0}
        for part in self.parts:
            calls += part.total.calls
            flops += part.total.flops
            bytes_moved += part.total.bytes_moved
            sides[part.total.bound] += part.roof_seconds or 0.0
        bound = bound_of(**sides)
        total = Total(calls, flops, bytes_moved, self.roof_seconds, bound, costs=())
        fused_bytes = sum_known(part.fused_bytes for part in self.parts)
        merged = RooflinePart(
            total, self.label, first.phase, seconds=self.seconds, fused_bytes=fused_bytes
        )
        potential_seconds = sum_known(part.potential_seconds for part in self.parts)
        reasons = {part.over for part in self.parts}
        over = next((reason for reason in _WORST_FIRST if reason in reasons), None)
        return replace(point_of(merged), potential_seconds=potential_seconds, over=over)


_MODULE_AND_WORK = attrgetter("module", "phase", "total.flops", "total.bytes_moved")


def fold_parts(parts: Iterable[RooflinePart], patterns: Mapping[str, str]) -> Iterator[Repeats]:
    """Group the parts of repeated modules that did the same work, in order of first appearance."""
    return starmap(Repeats, fold_repeats(parts, _MODULE_AND_WORK, patterns))

"""Arrange the modules of a profile as rows of a table: a module tree, or a flat list.

In the tree, consecutive identical modules, such as the layers of a transformer, are folded into one
row. Other functions find the parts of the model that take the most time, and combine the roofline
points of identical modules.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
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
from lflops.profile.module_names import children, fold_repeats, last_part
from lflops.profile.profile import COUNTS, ModuleProfile, Profile
from lflops.profile.records import PHASES, Phase, median_of
from lflops.profile.series import positions, ratio, sum_known, summed

TIMED_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
"""The phases that are added up to a module's total time.

The time of the optimizer is usually unknown for a single module.
"""


class WorkCounts(Struct, frozen=True, kw_only=True, gc=False):
    """Work in one phase. The fields have the same meaning as in `Work`.

    In a row of a table of modules, the work includes submodules unless `ModuleRow.is_self` is true.
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
    """Consecutive identical siblings in the module tree.

    Attributes:
        first: Last part of the first sibling's name, such as `0` for `layers.0`.
        last: Last part of the last sibling's name.
        times: Number of siblings.
    """

    first: str
    last: str
    times: int


class ModuleRow(Struct, frozen=True, kw_only=True):
    """A row of the table of modules: one module, or consecutive identical siblings.

    If the row stands for several siblings, every count is for ONE sibling, and a time is the mean
    over the siblings. If the row is inside a row for 12 identical blocks, its time is the mean over
    all 12 blocks. `share` is relative to the root's MACs in the phase that the table is made for.
    If the phase has no MACs, it is relative to the FLOPs (see `share_of`).

    Attributes:
        name: Full name of the module, or of the first sibling.
        label: Last part of `name`.
        names: Names of all siblings. If the row is inside a row for several blocks, only the
            siblings in the first of these blocks are listed.
        repeat: The first and last sibling and their number. `None` for a single module.
        depth: Number of levels below the root. The root has 0.
        is_self: If true, the row is part of a flat list, and its numbers exclude submodules.
        class_name: Class name.
        calls: Number of calls in forward.
        trainable_parameters: `None` in a flat list, because only the number with submodules is
            known. The same holds for `parameter_bytes`.
        phases: Work in each phase.
        seconds: Median seconds in each phase, or `None` if unknown.
        children: The rows directly below, if the row is part of a tree.
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
        """Number of siblings that the row stands for.

        If the row is inside a row for several blocks, only the siblings in one block count.
        """
        return len(self.names)

    def one(self, phase: Phase | None) -> WorkCounts:
        """Return the work of one of the row's equal modules in a phase. `None` means all phases."""
        total = WorkCounts()
        for name in phases_of(phase):
            total += self.phases[name]
        return total

    def all(self, phase: Phase | None) -> WorkCounts:
        """Return the summed work of the row's siblings in a phase. `None` means all phases."""
        return self.one(phase) * self.times

    def time(self, phase: Phase | None) -> float | None:
        """Return the seconds of one of the row's equal modules in a phase.

        If `phase` is `None`, return the sum over the phases in `TIMED_PHASES` with a known time.
        """
        return _total_time(self.seconds, phase)

    def flops_per_second(self, phase: Phase | None) -> float | None:
        """Return 2 x MACs of one module per second, in a phase or in all phases (`None`).

        Only the time of phases with MACs counts. Return `None` if one of these times is unknown.
        The backward pass of fused attention computes scores again, so it contains the time of this
        recomputation.
        """
        phases = phases_of(phase)
        timed = []
        for name in phases:
            is_in_backward = name == "recompute" and phase is None and self.seconds[name] is None
            if self.phases[name].macs and not is_in_backward:
                timed.append(name)
        seconds = [self.seconds[name] for name in timed]
        if not seconds:
            seconds = [self.seconds[phases[0]]]
        return flops_per_second(self.one(phase).macs, sum_known(seconds))


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
"""Keys that rows can be sorted by.

Names are sorted in ascending order. For all other keys, the largest value comes first.
"""


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
    """Build the rows of the module tree.

    The result has only the row of the root. Its `children` contain all other rows. All numbers
    include submodules.

    Args:
        profile: The profile.
        depth: Number of levels below the root, or -1 for all levels.
        fold: Whether consecutive identical siblings become one row. Siblings are identical if they,
            and all modules below them, have the same classes and counts, and if the modules below
            them have the same names.
        sort: The key that siblings are sorted by, one of `SORT_KEYS`. A folded row is sorted by the
            sum over its modules. `None` keeps the model's order.
        phase: The phase that shares and the sort key refer to, or `None` for all phases together.
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

        Each tuple has the name of one sibling. If the parent row stands for several identical
        modules, the tuple has a name for each of them. For example, the children of `layers.0` and
        `layers.1` are `(layers.0.attn, layers.1.attn)` and `(layers.0.mlp, layers.1.mlp)`.
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
    """Build a row for each module, with numbers that exclude submodules.

    By default, the rows are sorted by MACs. `sort` and `phase` have the same meaning as in `tree`,
    and invalid values raise the same errors.
    """
    _check_sort(profile, sort, phase)
    builder = _RowBuilder(profile, phase, own=True)
    rows = [builder.row((name,), (name,)) for name in profile.modules]
    return _sorted(rows, sort or "macs", phase)


def totals(profile: Profile) -> dict[Phase, WorkCounts]:
    return _work_by_phase(profile.modules[""], own=False)


def unsharded_macs(profile: Profile) -> dict[str, int | None]:
    """Return the MACs of the whole model in each phase, if they differ from the MACs of this rank.

    They differ under tensor parallelism, for example. The result is empty if this rank computes all
    MACs. The value of a phase is `None` if its MACs are unknown, because ranks share a batch or
    hold only parts of the parameters.
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
    """Return the count that is 100 % for the shares in a phase.

    It is "flops" if the phase, such as the optimizer, has FLOPs but no MACs. Otherwise it is
    "macs". `None` means all phases together.
    """
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
    """Return whether any module was timed in a phase. `None` means any phase."""
    for module in profile.modules.values():
        for name in phases_of(phase):
            if module.work(name).seconds is not None:
                return True
    return False


def _check_sort(profile: Profile, sort: str | None, phase: Phase | None) -> None:
    if sort is not None and sort not in SORT_KEYS:
        raise ValueError(f"sort={sort!r}: pass one of {', '.join(SORT_KEYS)}")
    if sort == "time" and not has_times(profile, phase):
        where = f"in {phase or 'any phase'}"
        others = ", ".join(SORT_KEYS[:-1])
        raise ValueError(
            f"sort='time': no module of this profile was timed {where}: pass one of {others}"
        )


def _sorted(rows: list[ModuleRow], sort: str | None, phase: Phase | None) -> tuple[ModuleRow, ...]:
    if sort is None:
        return tuple(rows)
    order = _ORDERS[sort]
    return tuple(sorted(rows, key=lambda row: order(row, phase)))


class _RowBuilder:
    """Makes the rows of the table of modules.

    The shares in a row are relative to the root's work and time in `phase`, or in all phases if
    `phase` is `None`.
    """

    def __init__(self, profile: Profile, phase: Phase | None, *, own: bool) -> None:
        self._profile = profile
        self._phase = phase
        self._own = own
        self._metric = share_of(profile, phase)
        self._total = self._work(_work_by_phase(profile.modules[""], own=False))
        self._total_time = _total_time(_seconds(profile, [""], own=False), phase)

    def row(self, names: tuple[str, ...], folded: Sequence[str]) -> ModuleRow:
        """Make a row for one or several siblings.

        Args:
            names: Names of the siblings that the row stands for. If the parent row stands for
                several identical modules, only the siblings inside the first of them are listed.
            folded: Names of the siblings inside all of these identical modules. Times are averaged
                over them.
        """
        module = self._profile.modules[names[0]]
        labels = [last_part(name) for name in names]
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
        """Return the work that shares are computed from: MACs, or FLOPs if the root has no MACs."""
        work: int = 0
        for name in phases_of(self._phase):
            work += getattr(phases[name], self._metric)
        return work


def _seconds(profile: Profile, names: Sequence[str], *, own: bool) -> dict[Phase, float | None]:
    """Return the mean seconds of the modules in each phase.

    The value of a phase is `None` if the time of one of the modules is unknown.
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
    """Return the seconds of a phase. `None` means the sum over all phases with known times."""
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
    """Modules with the same pattern, and the time that they take without their submodules.

    For example, `layers.0.mlp` and `layers.1.mlp` have the pattern `layers.*.mlp`.

    Attributes:
        pattern: The pattern.
        name: The name to show. It is the pattern, or a list of names if only some modules with this
            pattern have a time.
        kind: Class name.
        modules: Number of modules.
        seconds: Self time of all these modules together, in seconds per step.
        slowest: Name of the module with the most self time.
        slowest_seconds: Its self time, in seconds per step.
        macs: MACs of all these modules in forward and backward, without submodules.
        is_compiled: Whether these modules are compiled and their submodules are not timed. Then
            `seconds` and `macs` include the submodules.
    """

    pattern: str
    name: str
    kind: str
    modules: int
    seconds: float
    slowest: str
    slowest_seconds: float
    macs: int
    is_compiled: bool = False


def total_seconds(module: ModuleProfile, *, own: bool = False) -> float | None:
    """Return the sum of a module's seconds in forward, backward, recomputation and the optimizer.

    Phases with an unknown time are left out. Return `None` if no phase has a known time. If `own`
    is true, the time excludes submodules.
    """
    total = None
    for phase in TIMED_PHASES:
        work = module.work(phase)
        spread = work.self_seconds if own else work.seconds
        if spread is not None:
            total = (total or 0.0) + spread.median
    return total


def hides_submodules(name: str, profile: Profile) -> bool:
    """Return whether a module is compiled as a whole, so that its submodules are not timed."""
    if not profile.modules[name].compiled:
        return False
    prefix = f"{name}." if name else ""
    below = [
        module
        for other, module in profile.modules.items()
        if other != name and other.startswith(prefix)
    ]
    return bool(below) and all(total_seconds(module) is None for module in below)


def busiest(
    profile: Profile,
    patterns: Mapping[str, str],
    communicating: Mapping[tuple[str, str], float] | None = None,
) -> tuple[BusyModules, ...]:
    """Group the modules by their pattern, and sort the groups by self time in descending order.

    Modules without a known time are left out.

    Args:
        profile: The profile.
        patterns: Pattern of each module, such as `layers.*.mlp`, keyed by module name.
        communicating: Seconds of communication, keyed by module and pass (forward or backward).
            They are subtracted from the self time.
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
        are_compiled = [hides_submodules(name, profile) for name in names]
        for name, is_compiled in zip(names, are_compiled, strict=True):
            module = profile.modules[name]
            for work in (module.forward, module.backward):
                macs += work.macs if is_compiled else work.self_macs
        slowest = max(names, key=timed.__getitem__)
        group = BusyModules(
            pattern=patterns[names[0]],
            name=label,
            kind=profile.modules[names[0]].class_name,
            modules=len(names),
            seconds=sum(timed[name] for name in names),
            slowest=slowest,
            slowest_seconds=timed[slowest],
            macs=macs,
            is_compiled=all(are_compiled),
        )
        found.append(group)
    return tuple(sorted(found, key=lambda group: -group.seconds))


# Identical modules have the same values of these attributes. Times and the memory peak are not in
# this list because they depend on when a module runs. An attrgetter is five times as fast as a
# loop.
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
    """Give each module a number, so that identical modules have the same number.

    Two modules are identical if they and all modules below them have the same counts, and if the
    modules below them have the same names.
    """
    return numbered(below, lambda name: _counts(profile.modules[name]))


def numbered(below: Mapping[str, Sequence[str]], key: Callable[[str], Hashable]) -> dict[str, int]:
    """Give each module a number, so that modules with identical subtrees have the same number.

    Two subtrees are identical if their modules have the same keys and, except for the topmost
    module, the same names.

    Args:
        below: Names of the modules directly below each module.
        key: A function that returns the key of a module.
    """
    numbers: dict[str, int] = {}
    seen: dict[Hashable, int] = {}
    # Longer names come first, so that children come before their parents.
    for name in sorted(below, key=len, reverse=True):
        labels = []
        for child in below[name]:
            labels.append((last_part(child), numbers[child]))
        numbers[name] = seen.setdefault((key(name), tuple(labels)), len(seen))
    return numbers


def _counts(module: ModuleProfile) -> tuple[Any, ...]:
    return (
        module.owner is None,
        _FACTS_OF(module),
        *map(_COUNTS_OF, _WORKS_OF(module)),
        frozenset(module.dtypes.items()),
    )


# Reasons why modules took less than their least time, the most severe reason first. If modules are
# combined, the result has the first of these reasons that any of the modules has.
_WORST_FIRST: tuple[AboveRoofReason, ...] = ("error", "cache_unknown", "compiled", "cache")


class Repeats(NamedTuple):
    """The roofline data of identical modules in one phase.

    Attributes:
        label: The pattern of the modules, such as `layers.*.mlp`. The name if there is only one
            module.
        parts: The work and the time of each module, in the model's order.
    """

    label: str
    parts: Sequence[RooflinePart]

    @property
    def seconds(self) -> float | None:
        """Sum of the times of the modules. `None` if the time of any module is unknown."""
        return sum_known(part.seconds for part in self.parts)

    @property
    def roof_seconds(self) -> float | None:
        """Sum of the modules' least times on the chip. `None` if any least time is unknown."""
        return sum_known(part.roof_seconds for part in self.parts)

    @property
    def point(self) -> Point:
        """All modules combined into one point of the roofline.

        The point is compute-bound if compute-bound modules have most of the summed least times,
        otherwise memory-bound. It is above its roof (faster than its least time) if any of the
        modules is.
        """
        first = self.parts[0]
        if len(self.parts) == 1:
            return point_of(first)
        calls = flops = bytes_moved = 0
        seconds_by_bound: dict[Bound, float] = {"compute": 0.0, "memory": 0.0}
        fused_bytes = []
        potential_seconds = []
        reasons = set()
        for part in self.parts:
            calls += part.total.calls
            flops += part.total.flops
            bytes_moved += part.total.bytes_moved
            seconds_by_bound[part.total.bound] += part.roof_seconds or 0.0
            fused_bytes.append(part.fused_bytes)
            potential_seconds.append(part.potential_seconds)
            reasons.add(part.over)
        bound = bound_of(**seconds_by_bound)
        total = Total(calls, flops, bytes_moved, self.roof_seconds, bound, costs=())
        merged = RooflinePart(
            total,
            self.label,
            first.phase,
            seconds=self.seconds,
            fused_bytes=sum_known(fused_bytes),
        )
        return replace(
            point_of(merged),
            potential_seconds=sum_known(potential_seconds),
            over=_worst_of(reasons),
        )


def _worst_of(reasons: Collection[AboveRoofReason | None]) -> AboveRoofReason | None:
    for reason in _WORST_FIRST:
        if reason in reasons:
            return reason
    return None


_MODULE_AND_WORK = attrgetter("module", "phase", "total.flops", "total.bytes_moved")


def fold_parts(parts: Iterable[RooflinePart], patterns: Mapping[str, str]) -> Iterator[Repeats]:
    """Group the parts of modules that have the same pattern, phase and work, in the model's order.

    A part is the work and the time of one module in one phase.
    """
    return starmap(Repeats, fold_repeats(parts, _MODULE_AND_WORK, patterns))

"""The roofline model, operator by operator.

The least time that a chip allows for the work, and how far from it the work ran.

A roof is what the peak and the bandwidth allow. An operator takes at least as long as its FLOPs at
the peak of its dtype, and as its bytes at the bandwidth. The least time of a module is the sum over
its operators, because one intensity for a block would hide the operators that only move bytes.
`Fusion` is what compiled kernels save of the bytes of the operators as dispatched.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.step_times import traced_seconds
from lflops.hardware.chips import Hardware, lookup
from lflops.hardware.peaks import chip_of, name_of_peak, peak_of
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile, Work
from lflops.profile.records import PHASES, ModulePhase, Phase
from lflops.profile.series import gathered, grouped, sum_known

Bound = Literal["compute", "memory"]

AboveRoofReason = Literal["cache", "compiled", "cache_unknown", "error"]
"""Why a point is above its roof.

* `cache`: its bytes stayed in a cache.
* `compiled`: it runs compiled, and its bytes are those of the eager code.
* `cache_unknown`: its bytes may have stayed in a cache of unknown size.
* `error`: none of these, so a count, a time or a peak is wrong.
"""

_OF_TORCH = "aten::"
# a point that is above its roof by no more than this is on it: two measurements of one peak differ
# by as much
TOLERANCE = 0.05


class Ceiling(Struct, frozen=True, kw_only=True):
    """One roof."""

    # the chip's name
    hardware: str
    # where its figures are from
    source: str
    # one of `hardware.DTYPES`
    dtype: str
    # the flat part
    flops_per_second: float
    # the slope; `None` is unknown
    bandwidth_bytes_per_second: float | None
    # whether the points' roofs are this chip's
    is_judged_by: bool


class Point(Struct, frozen=True, kw_only=True, gc=False):
    """What ran in one phase, and what it could have taken at best. `None` is unknown."""

    # the row, inclusive, or its own work in `Roofline.own`. Of a cell, the row that ran it; of an
    # operator, the root.
    module: str
    # `None` for a module
    operator: str | None
    phase: (
        Phase | Literal["all"]
        # `all` of an operator that was traced: a trace does not separate its phases
    )
    # as the cell says; `None` for a module
    dtype: str | None
    calls: int
    # a count, without what a mask left out
    flops: int
    bytes_moved: int
    # FLOPs for each byte
    intensity: float | None
    seconds: (
        float | None
        # how long it took in a step. Of an operator over all modules it is known with a trace.
    )
    # achieved
    flops_per_second: float | None
    # what it takes at the roof; of a module the sum over its operators
    roof_seconds: float | None
    # its FLOPs over that
    roof_flops_per_second: float | None
    bound: (
        Bound | None
        # which side of the roof is over it; of a module, which side most of `roof_seconds` is of
    )
    # `roof_seconds` over `seconds`
    share: float | None
    # what a step would be shorter at the roof
    seconds_to_win: float | None
    # why it is over its roof, where it is
    over: AboveRoofReason | None
    # What its kernels read and write in compiled code, as the compiler counts it. Of a module with
    # others below it also the bytes of what is not compiled. `None` where nothing of it is known to
    # be compiled.
    fused_bytes: int | None = None


class Roofline(Struct, frozen=True, kw_only=True):
    """The ceilings, and the points below them."""

    # Of the chip that is judged by, then of the run's own and of its datasheet, where these are
    # others; by dtype
    ceilings: tuple[Ceiling, ...]
    modules: tuple[
        Point, ...
        # a point a module and phase, in the model's order, with all below it.
    ]
    # A point an operator, phase and dtype, over all modules; with a trace of it one an operator,
    # which has its time
    operators: tuple[Point, ...]
    # the same by module
    op_counts: tuple[Point, ...]
    own: tuple[
        Point, ...
        # a point a module and phase, without what is below it: together they are all that ran, once
    ]


def roofline(profile: Profile, hardware: Hardware | str | None = None) -> Roofline:
    """Compare the counts and times of a profile with the roof of its chip.

    Args:
        profile: What was counted; without times, only the roof is known.
        hardware: What the device can do, or its name in the table; `None` takes what the run says
            it is.

    Raises:
        HardwareError: The table does not have the name.
    """
    return LazyRoofline(profile, chip_of(profile, hardware)).points()


class LazyRoofline:
    """The lists of a `Roofline`, each made when it is first read.

    Modules are parts: few of a large model's are drawn as points.
    """

    def __init__(self, profile: Profile, chip: Hardware | None) -> None:
        self._profile = profile
        self._chip = chip
        self._costs = _Costs(profile, chip)

    @cached_property
    def ceilings(self) -> tuple[Ceiling, ...]:
        return _ceilings(self._profile, self._chip)

    @cached_property
    def modules(self) -> tuple["Part", ...]:
        """A part a module and phase, in the model's order, with all below it."""
        return tuple(_modules(self._profile, self._costs))

    @cached_property
    def operators(self) -> tuple[Point, ...]:
        return tuple(map(point_of, _operators(self._profile, self._costs)))

    @cached_property
    def own(self) -> tuple["Part", ...]:
        """A part a module and phase, without what is below it.

        Together they are all that ran, once.
        """
        return tuple(_own(self._profile, self._costs))

    def points(self) -> Roofline:
        """All of it, with the cells."""
        cells = (
            Part(
                self._costs.total([number]),
                cell.module,
                cell.phase,
                operator=cell.operator,
                dtype=cell.dtype,
            )
            for cell, number in zip(self._profile.op_counts, self._costs.numbers, strict=True)
        )
        modules, own = (tuple(map(point_of, parts)) for parts in (self.modules, self.own))
        return Roofline(
            ceilings=self.ceilings,
            modules=modules,
            operators=self.operators,
            op_counts=tuple(map(point_of, cells)),
            own=own,
        )


def _modules(profile: Profile, costs: "_Costs") -> Iterator["Part"]:
    numbered = zip(profile.op_counts, costs.numbers, strict=True)
    of_rows = gathered(
        ((name, cell.phase), number) for cell, number in numbered for name in ancestry(cell.module)
    )
    fused = bytes_with_below(profile, bytes_as_compiled(profile))
    for name, module in profile.modules.items():
        for phase in PHASES:
            if (name, phase) in of_rows:
                seconds, moved = _seconds(module.work(phase)), fused.get(ModulePhase(name, phase))
                yield Part(
                    costs.total(of_rows[name, phase]),
                    name,
                    phase,
                    seconds=seconds,
                    fused_bytes=moved,
                )


def _operators(profile: Profile, costs: "_Costs") -> Iterator["Part"]:
    """Traced operators with all their phases and dtypes as one, since their time is that of all."""
    kinds_of_cells: Iterable[tuple[str, Phase, str]] = map(
        attrgetter("operator", "phase", "dtype"), profile.op_counts
    )
    by_kind = gathered(zip(kinds_of_cells, costs.numbers, strict=True))
    traced = {
        name.removeprefix(_OF_TORCH): seconds for name, seconds in traced_seconds(profile).items()
    }
    took = {
        operator: traced.get(operator.removeprefix(_OF_TORCH)) or None for operator, _, _ in by_kind
    }
    for (operator, *_), kinds in grouped(
        by_kind, lambda kind: kind[:1] if took[kind[0]] else kind
    ).items():
        phases, dtypes = (
            {phase for _, phase, _ in kinds},
            dict.fromkeys(dtype for _, _, dtype in kinds),
        )
        shown: Phase | Literal["all"] = kinds[0][1] if len(phases) == 1 else "all"
        numbers = [number for kind in kinds for number in by_kind[kind]]
        yield Part(
            costs.total(numbers),
            "",
            shown,
            operator=operator,
            dtype=", ".join(dtypes),
            seconds=took[operator],
        )


def _own(profile: Profile, costs: "_Costs") -> Iterator["Part"]:
    """In the model's order.

    Device time is inclusive, so a module with others below it in that phase has only its own host
    time.
    """
    of_phases: dict[Phase, defaultdict[str, list[int]]] = {
        phase: defaultdict(list) for phase in PHASES
    }
    for cell, number in zip(profile.op_counts, costs.numbers, strict=True):
        of_phases[cell.phase][cell.module].append(number)
    fused = bytes_as_compiled(profile)
    above = {
        phase: {name for row in of_phases[phase] for name in ancestry(row)[1:]} for phase in PHASES
    }
    for name, module in profile.modules.items():
        for phase in PHASES:
            numbers = of_phases[phase].get(name)
            if numbers is not None:
                work = module.work(phase)
                own = work.self_seconds.median if work.self_seconds else None
                seconds = own if name in above[phase] else _seconds(work)
                # Most profiles have nothing compiled, and need no key for each module.
                moved = fused.get(ModulePhase(name, phase)) if fused else None
                yield Part(costs.total(numbers), name, phase, seconds=seconds, fused_bytes=moved)


class _Cost(NamedTuple):
    """What a cell takes at the peak and at the bandwidth, in seconds; `None` is unknown."""

    calls: int
    flops: int
    bytes_moved: int
    compute: float | None
    memory: float | None
    is_cached: (
        bool | None
        # whether what one call works on fits the chip's cache; `None` where that is unknown
    )
    # whether it runs otherwise than it was counted
    is_compiled: bool

    @property
    def seconds(self) -> float | None:
        return (
            None if self.compute is None or self.memory is None else max(self.compute, self.memory)
        )


class Total(NamedTuple):
    """The sums over some cells."""

    calls: int
    flops: int
    bytes_moved: int
    # at the roof; `None` is unknown
    seconds: float | None
    # the side that most of these seconds are of
    bound: Bound
    # of the cells, each with how many cells have it
    costs: Sequence[tuple[_Cost, int]]


_WORK_OF_CELL = attrgetter("dtype", "calls", "macs", "executed_macs", "flops", "bytes_moved")


class _Costs:
    """The costs of all cells, by the `numbers` of the cells.

    Layers repeat, so there are few different ones, and each is computed once.
    """

    def __init__(self, profile: Profile, chip: Hardware | None) -> None:
        bandwidth = chip.bandwidth_bytes_per_second if chip else None
        cache = chip.cache_bytes if chip else None
        compiled = {name for name, module in profile.modules.items() if module.compiled}
        inside = (
            {name for name in profile.modules if not compiled.isdisjoint(ancestry(name))}
            if compiled
            else compiled
        )
        known: defaultdict[tuple[Any, bool], int] = defaultdict(count().__next__)
        works = map(_WORK_OF_CELL, profile.op_counts)
        are_inside = (
            (cell.module in inside for cell in profile.op_counts)
            if inside
            else repeat(object=False)
        )
        self.numbers = list(map(known.__getitem__, zip(works, are_inside, strict=False)))
        self._costs: list[_Cost] = []
        for (dtype, calls, macs, executed_macs, flops, bytes_moved), is_compiled in known:
            executed, peak = flops - 2 * (macs - executed_macs), peak_of(dtype, chip)
            # What moves integers has no peak, and needs none.
            compute = executed / peak if peak else None if executed_macs else 0.0
            is_cached = None if cache is None else bytes_moved <= cache * calls
            memory = bytes_moved / bandwidth if bandwidth else None
            self._costs.append(
                _Cost(calls, executed, bytes_moved, compute, memory, is_cached, is_compiled)
            )
        self._totals: dict[tuple[int, ...], Total] = {}

    def total(self, numbers: Sequence[int]) -> Total:
        key = tuple(numbers)
        total = self._totals.get(key)
        if total is None:
            costs = [(self._costs[number], times) for number, times in Counter(key).items()]
            total = self._totals[key] = Total(
                calls=sum(cost.calls * times for cost, times in costs),
                flops=sum(cost.flops * times for cost, times in costs),
                bytes_moved=sum(cost.bytes_moved * times for cost, times in costs),
                seconds=sum_known(
                    None if cost.seconds is None else cost.seconds * times for cost, times in costs
                ),
                bound=_bound(costs),
                costs=costs,
            )
        return total


class Part(Struct, frozen=True, gc=False):
    """Some cells together with their time, from which a point follows.

    The fields are those of `Point`.
    """

    # the sums over the cells
    total: Total
    module: str
    phase: Phase | Literal["all"]
    operator: str | None = None
    dtype: str | None = None
    seconds: float | None = None
    fused_bytes: int | None = None

    @property
    def roof_seconds(self) -> float | None:
        return self.total.seconds

    @property
    def seconds_to_win(self) -> float | None:
        roof = self.total.seconds
        return (
            max(self.seconds - roof, 0.0) if self.seconds is not None and roof is not None else None
        )

    @property
    def over(self) -> AboveRoofReason | None:
        roof, seconds = self.total.seconds, self.seconds
        return (
            _over(self.total.costs, seconds)
            if roof is not None and seconds and roof > seconds * (1 + TOLERANCE)
            else None
        )


def point_of(part: Part) -> Point:
    """Make the point of a part: all that follows from its sums and its time."""
    calls, flops, moved, roof, bound, _ = part.total
    seconds = part.seconds
    return Point(
        module=part.module,
        operator=part.operator,
        phase=part.phase,
        dtype=part.dtype,
        calls=calls,
        flops=flops,
        bytes_moved=moved,
        intensity=flops / moved if moved else None,
        seconds=seconds,
        flops_per_second=flops / seconds if seconds else None,
        roof_seconds=roof,
        roof_flops_per_second=flops / roof if roof else None,
        bound=bound if roof else None,
        share=roof / seconds if roof is not None and seconds else None,
        seconds_to_win=part.seconds_to_win,
        over=part.over,
        fused_bytes=part.fused_bytes,
    )


def _bound(costs: Iterable[tuple[_Cost, int]]) -> Bound:
    sides = {"compute": 0.0, "memory": 0.0}
    for cost, times in costs:
        compute, memory = cost.compute or 0.0, cost.memory or 0.0
        sides["compute" if compute >= memory else "memory"] += max(compute, memory) * times
    return "compute" if sides["compute"] >= sides["memory"] else "memory"


def _over(costs: Sequence[tuple[_Cost, int]], seconds: float) -> AboveRoofReason:
    """The likely reason: bytes that stayed in the cache, bytes that compiled code did not move, or an error."""

    def least(without_bytes: Callable[[_Cost], bool]) -> float | None:
        """Seconds at the roof if these cells move no bytes."""
        parts = (
            (cost.compute if without_bytes(cost) else cost.seconds, times) for cost, times in costs
        )
        return sum_known(None if each is None else each * times for each, times in parts)

    without: Mapping[AboveRoofReason, float | None] = {
        "cache": least(lambda cost: bool(cost.is_cached)),
        "compiled": least(lambda cost: cost.is_compiled),
        "cache_unknown": least(lambda cost: cost.is_cached is None),
    }
    return next(
        (
            why
            for why, each in without.items()
            if each is not None and each <= seconds * (1 + TOLERANCE)
        ),
        "error",
    )


def _seconds(work: Work) -> float | None:
    """Kernel time where a trace has it, else stream or host time."""
    spread = work.device_seconds or work.seconds
    return spread.median if spread else None


def _ceilings(profile: Profile, chip: Hardware | None) -> tuple[Ceiling, ...]:
    """The roofs of the known chips, each once: two chips may differ in what is not shown."""
    multiplied = dict.fromkeys(cell.dtype for cell in profile.op_counts if cell.executed_macs)
    ceilings: dict[Ceiling, Ceiling] = {}
    for each in filter(None, (chip, profile.run.hardware, lookup(profile.run.device_name))):
        for dtype in dict.fromkeys(name_of_peak(dtype, each) for dtype in multiplied):
            if dtype is not None and dtype in each.peak_flops_per_second:
                ceiling = Ceiling(
                    hardware=each.name,
                    source=each.source,
                    dtype=dtype,
                    flops_per_second=each.peak_flops_per_second[dtype],
                    bandwidth_bytes_per_second=each.bandwidth_bytes_per_second,
                    is_judged_by=False,
                )
                ceilings.setdefault(ceiling, replace(ceiling, is_judged_by=each is chip))
    return tuple(ceilings.values())


class LowerBound(Struct, frozen=True, kw_only=True):
    """Lower bounds in seconds."""

    # the chip's name
    hardware: str
    # of a step
    seconds: float
    # the same by phase, those that ran
    by_phase: Mapping[Phase, float]
    # row to seconds of it and all below, over all phases
    by_module: Mapping[str, float]
    unknown: tuple[
        str, ...
        # contractions in a dtype whose peak is not known: they count by their bytes
    ]


def lower_bound(profile: Profile, hardware: Hardware | None = None) -> LowerBound | None:
    """The sum over operators of the longer of contractions at the peak of their dtype and bytes at the bandwidth."""
    # Operators are taken one after the other, as eager code runs them: fused ones may move less.
    # What is no contraction counts by its bytes. `None` where no chip is known, or not its
    # bandwidth.
    chip = hardware or profile.run.hardware
    if chip is None or chip.bandwidth_bytes_per_second is None:
        return None
    by_phase: dict[Phase, float] = defaultdict(float)
    by_module = dict.fromkeys(profile.modules, 0.0)
    unknown: dict[str, None] = {}
    for cell in profile.op_counts:
        seconds = cell.bytes_moved / chip.bandwidth_bytes_per_second
        if cell.executed_macs:
            peak = peak_of(cell.dtype, chip)
            if peak is None:
                unknown[cell.operator] = None
            else:
                seconds = max(seconds, 2 * cell.executed_macs / peak)
        by_phase[cell.phase] += seconds
        for row in ancestry(cell.module):
            by_module[row] += seconds
    phases = {phase: by_phase[phase] for phase in PHASES if phase in by_phase}
    return LowerBound(
        hardware=chip.name,
        seconds=sum(phases.values()),
        by_phase=phases,
        by_module=by_module,
        unknown=tuple(unknown),
    )


class Fusion(Struct, frozen=True, kw_only=True):
    """What fusion saves in one phase of a step, over the modules that have kernels of compiled code."""

    phase: Phase
    # of the operators as dispatched
    bytes_moved: int
    # what the kernels read and write, as the compiler counts it
    fused_bytes: int
    unknown_modules: (
        # how many modules have a kernel of unknown bytes; they are in neither figure
        int
    )


def bytes_as_compiled(profile: Profile) -> Mapping[ModulePhase, int | None]:
    """Own bytes in a step of each module and phase that has kernels of compiled code.

    `None` where the bytes of a kernel are unknown.
    """
    # The compiler may compute cheap operators again in backward. Where the code as written computes
    # nothing again, these bytes are part of the backward, so that both counts of bytes are of the
    # same work.
    trace = profile.trace
    if trace is None or trace.compiled is None or not trace.batches:
        return {}
    written = {ModulePhase(cell.module, cell.phase) for cell in profile.op_counts}
    kernels: defaultdict[ModulePhase, list[int | None]] = defaultdict(list)
    for kernel in trace.compiled.kernels:
        key = ModulePhase(kernel.module, kernel.phase)
        is_only_compiled = kernel.phase == "recompute" and key not in written
        kernels[ModulePhase(kernel.module, "backward") if is_only_compiled else key].append(
            kernel.bytes_moved
        )
    sums = {key: sum_known(moved) for key, moved in kernels.items()}
    batches = profile.run.accumulation or 1
    return {
        key: None if moved is None else round(moved * batches / trace.batches)
        for key, moved in sums.items()
    }


def bytes_with_below(
    profile: Profile, compiled: Mapping[ModulePhase, int | None]
) -> Mapping[ModulePhase, int | None]:
    """Add up `bytes_as_compiled` over each module and all below it.

    Without a kernel, the bytes of its operators as dispatched.
    """
    counted = {ModulePhase(cell.module, cell.phase) for cell in profile.op_counts}
    moved = {
        **{key: profile.modules[key.fqn].work(key.phase).self_bytes_moved for key in counted},
        **compiled,
    }
    parts = gathered(
        (ModulePhase(name, key.phase), each)
        for key, each in moved.items()
        for name in ancestry(key.fqn)
    )
    opened = {ModulePhase(name, key.phase) for key in compiled for name in ancestry(key.fqn)}
    return {key: sum_known(parts[key]) for key in opened}


def fusion(profile: Profile) -> tuple[Fusion, ...]:
    """What fusion saves, by phase.

    Empty where no kernel of compiled code was traced, or nothing was counted.
    """
    compiled = bytes_as_compiled(profile) if profile.is_counted else {}
    found = []
    for phase in PHASES:
        of_phase = {key.fqn: moved for key, moved in compiled.items() if key.phase == phase}
        known = {row: moved for row, moved in of_phase.items() if moved is not None}
        if of_phase:
            found.append(
                Fusion(
                    phase=phase,
                    bytes_moved=sum(
                        profile.modules[row].work(phase).self_bytes_moved
                        for row in known
                        if row in profile.modules
                    ),
                    fused_bytes=sum(known.values()),
                    unknown_modules=len(of_phase) - len(known),
                )
            )
    return tuple(found)

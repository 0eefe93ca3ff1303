"""Compute the least time of each operator on a chip with the roofline model.

The peak and the bandwidth of a chip are called its roof. An operator takes at least as long as its
FLOPs take at the peak of its dtype, and at least as long as its bytes take at the bandwidth. The
least time of a module is the sum over its operators, because an average over the module would hide
operators that only move bytes. A point is a module or an operator with its work, its time and its
least time. A point is made from a part, which has only the work and the time. A cell is the work of
one operator in one module, phase and dtype (an `OpCount`).

`Fusion` shows how many bytes compiled kernels move, and how many they would move without fusion.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lflops.analysis.step_times import traced_seconds
from lflops.hardware.chips import Hardware, lookup
from lflops.hardware.peaks import chip_of, name_of_peak, peak_of
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile, Work
from lflops.profile.records import PHASES, ModulePhase, Phase, median_of
from lflops.profile.series import ratio, sum_known

Bound = Literal["compute", "memory"]

AboveRoofReason = Literal["cache", "compiled", "cache_unknown", "error"]
"""Reasons why a module or an operator is above its roof: it took less than its least time.

* `cache`: its bytes stayed in a cache.
* `compiled`: the module runs compiled, but its bytes were counted for eager code.
* `cache_unknown`: its bytes might have stayed in a cache of unknown size.
* `error`: none of these, so a count, a time or a peak is wrong.
"""

TOLERANCE = 0.05
"""A module is above its roof only if its least time exceeds its time by more than this share.

The measured peak of a chip is uncertain by about this share.
"""

_ATEN = "aten::"


class Ceiling(Struct, frozen=True, kw_only=True):
    """The roof of a chip for one dtype: its peak and its bandwidth.

    Attributes:
        hardware: Name of the chip.
        source: Source of the chip's peaks and bandwidth.
        dtype: One of `hardware.DTYPES`.
        flops_per_second: The peak, which is the flat part of the roof.
        bandwidth_bytes_per_second: The bandwidth, which is the slope of the roof. `None` if
            unknown.
        is_reference: Whether points are compared with the roof of this chip.
    """

    hardware: str
    source: str
    dtype: str
    flops_per_second: float
    bandwidth_bytes_per_second: float | None
    is_reference: bool


class Point(Struct, frozen=True, kw_only=True, gc=False):
    """A module or an operator in one phase, with its work, its time and its least time.

    `None` means unknown.

    Attributes:
        module: Name of the module. For an operator in a module, the module that ran it. For an
            operator over all modules, the root, whose name is empty.
        operator: Name of the operator, or `None` for a module.
        phase: The phase, or `all` for all phases together. If an operator was traced, it is `all`,
            because a trace does not separate the phases of an operator.
        dtype: The dtype, or several dtypes separated by commas. `None` for a module.
        flops: Counted FLOPs, without the work that a mask skips.
        intensity: FLOPs per byte.
        seconds: Seconds per step. For an operator over all modules, they come from a trace.
        flops_per_second: FLOPs per second that were achieved.
        roof_seconds: Least time on the chip. For a module, the sum over its operators.
        roof_flops_per_second: FLOPs per second if the work takes its least time.
        bound: Whether compute or memory limits the work. For a module, the limit that applies to
            most of `roof_seconds`.
        share: `roof_seconds` divided by `seconds`.
        potential_seconds: Seconds per step that would be saved if the work took only its least
            time.
        over: Reason why the point is above its roof (took less than its least time), or `None` if
            it is not.
        fused_bytes: Bytes that the kernels of compiled code read and write, according to the
            compiler. For a module with submodules, they include the bytes of code that is not
            compiled. `None` if no part of the module is known to be compiled.
    """

    module: str
    operator: str | None
    phase: Phase | Literal["all"]
    dtype: str | None
    calls: int
    flops: int
    bytes_moved: int
    intensity: float | None
    seconds: float | None
    flops_per_second: float | None
    roof_seconds: float | None
    roof_flops_per_second: float | None
    bound: Bound | None
    share: float | None
    potential_seconds: float | None
    over: AboveRoofReason | None
    fused_bytes: int | None = None


class Roofline(Struct, frozen=True, kw_only=True):
    """The roofs of the chips, and the points: modules and operators with work, time and least time.

    Attributes:
        ceilings: The roof (peak and bandwidth) of each chip for each dtype. The chip that points
            are compared with comes first. The chip of the run comes next, with the values that the
            run used and then with the values from the table of chips. Identical roofs are listed
            only once.
        modules: A point for each module and phase, with submodules, in the model's order.
        operators: A point for each operator, phase and dtype, over all modules. If an operator was
            traced, it has a single point with its time.
        op_counts: A point for each operator, phase and dtype in each module.
        self_work: A point for each module and phase, without submodules. Together, these points
            count all work exactly once.
    """

    ceilings: tuple[Ceiling, ...]
    modules: tuple[Point, ...]
    operators: tuple[Point, ...]
    op_counts: tuple[Point, ...]
    self_work: tuple[Point, ...]


def roofline(profile: Profile, hardware: Hardware | str | None = None) -> Roofline:
    """Compare the counts and times of a profile with the roofline of its chip.

    Args:
        profile: The profile. If it has no times, each point has only its least time.
        hardware: The chip, or its name in the table of chips. By default, the chip of the run.

    Raises:
        HardwareError: The table has no chip with this name.
    """
    return LazyRoofline(profile, chip_of(profile, hardware)).points()


class LazyRoofline:
    """Like `Roofline`, but computes each of its lists when the list is first read.

    Modules are stored as `RooflinePart`. A report converts a module to a `Point` only when it draws
    the module. This saves time for large models.
    """

    def __init__(self, profile: Profile, chip: Hardware | None) -> None:
        self._profile = profile
        self._chip = chip
        self._costs = _Costs(profile, chip)

    @cached_property
    def ceilings(self) -> tuple[Ceiling, ...]:
        return _ceilings(self._profile, self._chip)

    @cached_property
    def modules(self) -> tuple["RooflinePart", ...]:
        """The work and time of each module in each phase, with submodules, in the model's order."""
        return tuple(_modules(self._profile, self._costs))

    @cached_property
    def operators(self) -> tuple[Point, ...]:
        return tuple(map(point_of, _operators(self._profile, self._costs)))

    @cached_property
    def self_work(self) -> tuple["RooflinePart", ...]:
        """The work and time of each module in each phase, without submodules.

        Together, these items count all work exactly once.
        """
        return tuple(_self_work(self._profile, self._costs))

    def points(self) -> Roofline:
        """Return a `Roofline`, in which all parts are converted to points."""
        return Roofline(
            ceilings=self.ceilings,
            modules=tuple(map(point_of, self.modules)),
            operators=self.operators,
            op_counts=tuple(map(point_of, _cells(self._profile, self._costs))),
            self_work=tuple(map(point_of, self.self_work)),
        )


def _cells(profile: Profile, costs: "_Costs") -> Iterator["RooflinePart"]:
    for cell, number in zip(profile.op_counts, costs.numbers, strict=True):
        total = costs.total([number])
        yield RooflinePart(total, cell.module, cell.phase, operator=cell.operator, dtype=cell.dtype)


def _modules(profile: Profile, costs: "_Costs") -> Iterator["RooflinePart"]:
    numbers: defaultdict[tuple[str, Phase], list[int]] = defaultdict(list)
    for cell, number in zip(profile.op_counts, costs.numbers, strict=True):
        for name in ancestry(cell.module):
            numbers[name, cell.phase].append(number)
    fused = bytes_with_below(profile, bytes_as_compiled(profile))
    for name, module in profile.modules.items():
        for phase in PHASES:
            if (name, phase) in numbers:
                yield RooflinePart(
                    costs.total(numbers[name, phase]),
                    name,
                    phase,
                    seconds=_seconds(module.work(phase)),
                    fused_bytes=fused.get(ModulePhase(name, phase)),
                )


def _operators(profile: Profile, costs: "_Costs") -> Iterator["RooflinePart"]:
    """Yield the work and time of each operator, phase and dtype, summed over all modules.

    A traced operator has a single item for all phases and dtypes, because it has a single time.
    """
    traced = {}
    for name, seconds in traced_seconds(profile).items():
        if seconds:
            traced[name.removeprefix(_ATEN)] = seconds
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, cell in enumerate(profile.op_counts):
        if cell.operator.removeprefix(_ATEN) in traced:
            groups[cell.operator,].append(place)
        else:
            groups[cell.operator, cell.phase, cell.dtype].append(place)

    for (operator, *_), places in groups.items():
        numbers = []
        phases: set[Phase] = set()
        dtypes: dict[str, None] = {}
        for place in places:
            cell = profile.op_counts[place]
            numbers.append(costs.numbers[place])
            phases.add(cell.phase)
            dtypes[cell.dtype] = None
        yield RooflinePart(
            costs.total(numbers),
            "",
            phases.pop() if len(phases) == 1 else "all",
            operator=operator,
            dtype=", ".join(dtypes),
            seconds=traced.get(operator.removeprefix(_ATEN)),
        )


def _self_work(profile: Profile, costs: "_Costs") -> Iterator["RooflinePart"]:
    """Yield the work and time of each module in each phase, without submodules.

    The items are in the model's order. Device times include submodules. So if a module has
    submodules that ran in the phase, the time is its self time, which is not from the trace.
    """
    numbers: defaultdict[ModulePhase, list[int]] = defaultdict(list)
    for cell, number in zip(profile.op_counts, costs.numbers, strict=True):
        numbers[ModulePhase(cell.module, cell.phase)].append(number)
    has_submodules: set[ModulePhase] = set()
    for key in numbers:
        has_submodules.update(_with_above(key)[1:])
    fused = bytes_as_compiled(profile)
    for name, module in profile.modules.items():
        for phase in PHASES:
            key = ModulePhase(name, phase)
            if key not in numbers:
                continue
            work = module.work(phase)
            if key in has_submodules:
                seconds = median_of(work.self_seconds)
            else:
                seconds = _seconds(work)
            yield RooflinePart(
                costs.total(numbers[key]),
                name,
                phase,
                seconds=seconds,
                fused_bytes=fused.get(key),
            )


class _Cost(NamedTuple):
    """The work of an operator in a module, and the seconds that it takes at peak and bandwidth.

    Attributes:
        compute: Seconds at the peak. `None` if unknown.
        memory: Seconds at the bandwidth. `None` if unknown.
        is_cached: Whether the data of one call fits in the chip's cache. `None` if unknown.
        is_compiled: Whether the operator runs in a compiled module, but was counted as eager code.
    """

    calls: int
    flops: int
    bytes_moved: int
    compute: float | None
    memory: float | None
    is_cached: bool | None
    is_compiled: bool

    @property
    def seconds(self) -> float | None:
        if self.compute is None or self.memory is None:
            return None
        return max(self.compute, self.memory)


class Total(NamedTuple):
    """The summed work and least time of several cells.

    A cell is the work of one operator in one module, phase and dtype.

    Attributes:
        seconds: Least time in seconds. `None` if unknown.
        bound: Whether compute or memory limits the work in most of these seconds.
        costs: The different costs of the cells. Each cost is paired with the number of cells that
            have this cost.
    """

    calls: int
    flops: int
    bytes_moved: int
    seconds: float | None
    bound: Bound
    costs: Sequence[tuple[_Cost, int]]


_WORK_OF = attrgetter("dtype", "calls", "macs", "executed_macs", "flops", "bytes_moved")


class _Costs:
    """The costs of all entries of `profile.op_counts`, which are called cells.

    A cost is the work of a cell, and its seconds at the chip's peak and bandwidth. Layers repeat,
    so there are only a few different costs. Each of them is computed once and has a number.

    Attributes:
        numbers: For each cell, the number of its cost.
    """

    def __init__(self, profile: Profile, chip: Hardware | None) -> None:
        inside = _inside_compiled(profile)
        self.numbers: list[int] = []
        self._costs: list[_Cost] = []
        self._totals: dict[tuple[int, ...], Total] = {}
        known: dict[tuple[Any, bool], int] = {}
        for cell in profile.op_counts:
            work = _WORK_OF(cell)
            is_compiled = cell.module in inside
            number = known.setdefault((work, is_compiled), len(known))
            if number == len(self._costs):
                self._costs.append(_cost(work, chip, is_compiled=is_compiled))
            self.numbers.append(number)

    def total(self, numbers: Sequence[int]) -> Total:
        key = tuple(numbers)
        if key not in self._totals:
            costs = [(self._costs[number], times) for number, times in Counter(key).items()]
            self._totals[key] = _total(costs)
        return self._totals[key]


def _inside_compiled(profile: Profile) -> set[str]:
    """Return the names of compiled modules and of all modules inside them."""
    compiled = {name for name, module in profile.modules.items() if module.compiled}
    if not compiled:
        return compiled
    return {name for name in profile.modules if not compiled.isdisjoint(ancestry(name))}


def _cost(work: Any, chip: Hardware | None, *, is_compiled: bool) -> _Cost:
    dtype, calls, macs, executed_macs, flops, bytes_moved = work
    executed_flops = flops - 2 * (macs - executed_macs)
    peak = peak_of(dtype, chip)
    # An operator without matmuls does not need a peak, and its dtype may have none.
    compute = None if executed_macs else 0.0
    if peak:
        compute = executed_flops / peak
    memory = None
    is_cached = None
    if chip is not None and chip.bandwidth_bytes_per_second:
        memory = bytes_moved / chip.bandwidth_bytes_per_second
    if chip is not None and chip.cache_bytes is not None:
        is_cached = bytes_moved <= chip.cache_bytes * calls
    return _Cost(calls, executed_flops, bytes_moved, compute, memory, is_cached, is_compiled)


def bound_of(compute: float, memory: float) -> Bound:
    """Return which of the two takes longer: computing (`compute`), or moving bytes (`memory`)."""
    if compute >= memory:
        return "compute"
    return "memory"


def _total(costs: Sequence[tuple[_Cost, int]]) -> Total:
    calls = 0
    flops = 0
    bytes_moved = 0
    seconds: float | None = 0.0
    seconds_by_bound: dict[Bound, float] = {"compute": 0.0, "memory": 0.0}
    for cost, times in costs:
        calls += cost.calls * times
        flops += cost.flops * times
        bytes_moved += cost.bytes_moved * times
        if cost.seconds is None:
            seconds = None
        elif seconds is not None:
            seconds += cost.seconds * times
        compute = cost.compute or 0.0
        memory = cost.memory or 0.0
        seconds_by_bound[bound_of(compute, memory)] += max(compute, memory) * times
    bound = bound_of(**seconds_by_bound)
    return Total(calls, flops, bytes_moved, seconds, bound, costs)


class RooflinePart(Struct, frozen=True, gc=False):
    """The work and the time of a module or an operator, from which a `Point` can be made.

    Fields that are not listed here have the same meaning as in `Point`.

    Attributes:
        total: The sums over all operators of the module, or over all calls of the operator.
    """

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
    def potential_seconds(self) -> float | None:
        if self.seconds is None or self.total.seconds is None:
            return None
        return max(self.seconds - self.total.seconds, 0.0)

    @property
    def over(self) -> AboveRoofReason | None:
        if not self.seconds or self.total.seconds is None:
            return None
        longest = self.seconds * (1 + TOLERANCE)
        if self.total.seconds <= longest:
            return None
        return _reason(self.total.costs, longest)


def point_of(part: RooflinePart) -> Point:
    """Make a point from a part, and compute the values that only a point has, such as `share`."""
    flops = part.total.flops
    moved = part.total.bytes_moved
    roof = part.total.seconds
    seconds = part.seconds
    return Point(
        module=part.module,
        operator=part.operator,
        phase=part.phase,
        dtype=part.dtype,
        calls=part.total.calls,
        flops=flops,
        bytes_moved=moved,
        intensity=ratio(flops, moved),
        seconds=seconds,
        flops_per_second=ratio(flops, seconds),
        roof_seconds=roof,
        roof_flops_per_second=ratio(flops, roof),
        bound=part.total.bound if roof else None,
        share=ratio(roof, seconds),
        potential_seconds=part.potential_seconds,
        over=part.over,
        fused_bytes=part.fused_bytes,
    )


def _reason(costs: Sequence[tuple[_Cost, int]], longest: float) -> AboveRoofReason:
    """Return the likely reason why the work was faster than the roofline allows.

    Each reason applies to some of the operators. For example, `cache` applies to the operators
    whose data fits in a cache. A reason is likely if the roofline would allow the time when these
    operators moved no bytes: the least time is then at most `longest` seconds.
    """

    def explains(moves_no_bytes: Callable[[_Cost], bool]) -> bool:
        seconds = 0.0
        for cost, times in costs:
            least = cost.compute if moves_no_bytes(cost) else cost.seconds
            if least is None:
                return False
            seconds += least * times
        return seconds <= longest

    if explains(lambda cost: bool(cost.is_cached)):
        return "cache"
    if explains(lambda cost: cost.is_compiled):
        return "compiled"
    if explains(lambda cost: cost.is_cached is None):
        return "cache_unknown"
    return "error"


def _seconds(work: Work) -> float | None:
    """Return the time of kernels in a trace. Without a trace, return the stream or host time."""
    return median_of(work.device_seconds or work.seconds)


def _ceilings(profile: Profile, chip: Hardware | None) -> tuple[Ceiling, ...]:
    """Return the roofs of the known chips for the dtypes of the matmuls, without duplicates."""
    multiplied = dict.fromkeys(cell.dtype for cell in profile.op_counts if cell.executed_macs)
    ceilings: dict[Ceiling, Ceiling] = {}
    for known in (chip, profile.run.hardware, lookup(profile.run.device_name)):
        if known is None:
            continue
        for dtype in multiplied:
            peak_name = name_of_peak(dtype, known)
            if peak_name is None or peak_name not in known.peak_flops_per_second:
                continue
            ceiling = Ceiling(
                hardware=known.name,
                source=known.source,
                dtype=peak_name,
                flops_per_second=known.peak_flops_per_second[peak_name],
                bandwidth_bytes_per_second=known.bandwidth_bytes_per_second,
                is_reference=False,
            )
            ceilings.setdefault(ceiling, replace(ceiling, is_reference=known is chip))
    return tuple(ceilings.values())


class LowerBound(Struct, frozen=True, kw_only=True):
    """The least time of a step on a chip.

    Attributes:
        hardware: Name of the chip.
        seconds: Least time of a step, in seconds.
        by_phase: Least time of each phase that ran.
        by_module: Least time of each module with its submodules, over all phases.
        unknown: Operators with matmuls in a dtype without a known peak. Only the time to move the
            bytes of these operators is included.
    """

    hardware: str
    seconds: float
    by_phase: Mapping[Phase, float]
    by_module: Mapping[str, float]
    unknown: tuple[str, ...]


def lower_bound(profile: Profile, hardware: Hardware | None = None) -> LowerBound | None:
    """Compute the least time of a step, which is the sum of the least times of all operators.

    The least time of an operator is the longer of two times: the time of its matmuls at the peak of
    their dtype, and the time of its bytes at the bandwidth. The sum assumes that operators run one
    after the other, as in eager code. Compiled code may be faster, because fused operators move
    fewer bytes. Return `None` if the chip or its bandwidth is unknown.
    """
    chip = hardware or profile.run.hardware
    if chip is None or chip.bandwidth_bytes_per_second is None:
        return None
    by_phase: dict[Phase, float] = defaultdict(float)
    by_module = dict.fromkeys(profile.modules, 0.0)
    unknown: dict[str, None] = {}
    for cell in profile.op_counts:
        seconds = cell.bytes_moved / chip.bandwidth_bytes_per_second
        peak = peak_of(cell.dtype, chip)
        if peak is not None:
            seconds = max(seconds, 2 * cell.executed_macs / peak)
        elif cell.executed_macs:
            unknown[cell.operator] = None
        by_phase[cell.phase] += seconds
        for name in ancestry(cell.module):
            by_module[name] += seconds
    phases = {phase: by_phase[phase] for phase in PHASES if phase in by_phase}
    return LowerBound(
        hardware=chip.name,
        seconds=sum(phases.values()),
        by_phase=phases,
        by_module=by_module,
        unknown=tuple(unknown),
    )


class Fusion(Struct, frozen=True, kw_only=True):
    """The bytes moved in one phase of a step, with and without the fusion of compiled kernels.

    The bytes are summed over all modules that have compiled kernels.

    Attributes:
        bytes_moved: Bytes that the operators would move if each of them ran separately.
        fused_bytes: Bytes that the compiled kernels read and write, according to the compiler.
        unknown_modules: Number of modules that have a kernel whose bytes are unknown. The two byte
            counts do not include these modules.
    """

    phase: Phase
    bytes_moved: int
    fused_bytes: int
    unknown_modules: int


def bytes_as_compiled(profile: Profile) -> Mapping[ModulePhase, int | None]:
    """Return the bytes per step that compiled kernels move, for each module and phase.

    The bytes of submodules are not included. A value is `None` if the bytes of a kernel are
    unknown.

    The compiler can decide to recompute cheap operators in backward. Eager code recomputes only
    with activation checkpointing. So that both can be compared phase by phase, kernels that
    recompute cheap operators count as backward, unless the module uses activation checkpointing.
    """
    trace = profile.trace
    steps = profile.traced_steps
    if trace is None or trace.compiled is None or steps is None:
        return {}
    recomputing = {cell.module for cell in profile.op_counts if cell.phase == "recompute"}
    kernels: defaultdict[ModulePhase, list[int | None]] = defaultdict(list)
    for kernel in trace.compiled.kernels:
        phase = kernel.phase
        if phase == "recompute" and kernel.module not in recomputing:
            phase = "backward"
        kernels[ModulePhase(kernel.module, phase)].append(kernel.bytes_moved)
    moved: dict[ModulePhase, int | None] = {}
    for key, of_kernels in kernels.items():
        total = sum_known(of_kernels)
        moved[key] = None if total is None else round(total / steps)
    return moved


def bytes_with_below(
    profile: Profile, compiled: Mapping[ModulePhase, int | None]
) -> Mapping[ModulePhase, int | None]:
    """Add up the result of `bytes_as_compiled` over each module and its submodules.

    If a module has no compiled kernels, the bytes of its operators are used. If its submodules have
    none either, the module is left out.
    """
    moved: dict[ModulePhase, int | None] = {}
    for cell in profile.op_counts:
        key = ModulePhase(cell.module, cell.phase)
        if key not in moved:
            moved[key] = profile.modules[cell.module].work(cell.phase).self_bytes_moved
    moved.update(compiled)
    parts: defaultdict[ModulePhase, list[int | None]] = defaultdict(list)
    for key, bytes_moved in moved.items():
        for above in _with_above(key):
            parts[above].append(bytes_moved)
    has_kernels: set[ModulePhase] = set()
    for key in compiled:
        has_kernels.update(_with_above(key))
    return {key: sum_known(parts[key]) for key in has_kernels}


def _with_above(key: ModulePhase) -> list[ModulePhase]:
    """Return the module in its phase, and all modules above it in the same phase."""
    return [ModulePhase(name, key.phase) for name in ancestry(key.fqn)]


def fusion(profile: Profile) -> tuple[Fusion, ...]:
    """Return the bytes moved with and without fusion, for each phase with compiled kernels.

    The result is empty if nothing was counted, or if no compiled kernels were traced.
    """
    if not profile.is_counted:
        return ()
    compiled = bytes_as_compiled(profile)
    found = []
    for phase in PHASES:
        of_phase = {key.fqn: moved for key, moved in compiled.items() if key.phase == phase}
        if of_phase:
            found.append(_fusion_in_phase(profile, phase, of_phase))
    return tuple(found)


def _fusion_in_phase(profile: Profile, phase: Phase, compiled: Mapping[str, int | None]) -> Fusion:
    """Add up the bytes that the modules in `compiled` move in one phase, with and without fusion.

    `compiled` has the bytes that the compiled kernels of each module move in this phase.
    """
    bytes_moved = 0
    fused_bytes = 0
    unknown_modules = 0
    for name, moved in compiled.items():
        if moved is None:
            unknown_modules += 1
            continue
        fused_bytes += moved
        if name in profile.modules:
            bytes_moved += profile.modules[name].work(phase).self_bytes_moved
    return Fusion(
        phase=phase,
        bytes_moved=bytes_moved,
        fused_bytes=fused_bytes,
        unknown_modules=unknown_modules,
    )

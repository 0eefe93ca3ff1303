"""The profile: the work, memory and time of one rank or one run, module by module.

Numbers are in SI units (bytes, seconds, operations), exact integers where they are counts. `None`
means unknown, never 0. It has no sentences and no torch objects: a reader needs neither torch nor a
terminal.

A module is named by its dotted path, the root by the empty string. Own work is what ran while the
module was the innermost one running; inclusive work adds that of every row below it in the tree of
names.

The values that a profile has by the thousand are left out of Python's garbage collection
(`gc=False`): none can be part of a cycle, and loading 5,000 modules takes a quarter less.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.hardware.chips import Hardware
from lflops.profile import records
from lflops.profile.module_names import ancestry, patterns
from lflops.profile.notes import Note, notes_with
from lflops.profile.records import (
    PHASES,
    ByCategory,
    Count,
    ModulePhase,
    Phase,
    Rank,
    RankComparison,
    RankStat,
    Seconds,
    TimingStats,
    Trace,
)
from lflops.profile.series import summed
from lflops.profile.steps import Step
from lflops.profile.timeline import StepTimeline

# a phase; `"all"` and `None` add the phases up
PhaseQuery = Phase | Literal["all"] | None
Metric = Literal[
    "macs", "executed_macs", "flops", "bytes_moved"
    # a field of `Work` that a profile is queried for
]

MARGIN = 0.1
"""Share of a device's memory that `Memory.fits` leaves.

Of 80 GB about 0.5 for CUDA's context, 1.6 for NCCL, 4 for fragmentation and 1 that
the driver keeps.
"""

SCHEMA_VERSION = "2.0"
"""Of the file.

A reader takes every minor version of its major one: unknown fields are ignored, new ones have a
default.
"""


class Work(Struct, frozen=True, kw_only=True, gc=False):
    """The work of one phase of one module: inclusive, and `self_`.

    Attributes:
        calls: Operator calls that computed or moved something; views and allocations are none.
        macs: Multiply-accumulates of contractions. Attention counts its full square.
        executed_macs: The same without what a causal or block mask lets the kernel skip.
        flops: 2 x `macs` plus the convention for everything else.
        bytes_moved: The least traffic of the operators as dispatched; not DRAM traffic.
        comm_bytes: Payload of the collectives.
        logical_macs: MACs of the unsharded model on this rank's batch. Read from the global shapes
            of sharded tensors; `None` where a rank computed with its local part as a plain tensor,
            which does not have the global shape.
        seconds: Stream time on CUDA, host time on CPU.
        device_seconds: Kernel time; needs a trace.
    """

    calls: Count
    macs: Count
    executed_macs: Count
    flops: Count
    bytes_moved: Count
    comm_bytes: Count
    self_calls: Count
    self_macs: Count
    self_executed_macs: Count
    self_flops: Count
    self_bytes_moved: Count
    self_comm_bytes: Count
    logical_macs: Count | None = None
    self_logical_macs: Count | None = None
    seconds: TimingStats | None = None
    self_seconds: TimingStats | None = None
    device_seconds: TimingStats | None = None


COUNTS = ("calls", "macs", "executed_macs", "flops", "bytes_moved", "comm_bytes")
"""The fields of `Work` that are exact, known always, and there as `self_` too."""
# those that a `OpCount` has
OP_COUNT_FIELDS = COUNTS[:-1]


class DtypeShare(Struct, frozen=True, kw_only=True, gc=False):
    """The parameters of one dtype below a module."""

    parameters: Count
    bytes: Count


class ModuleProfile(Struct, frozen=True, kw_only=True, gc=False):
    """One row of the tree of names.

    Attributes:
        class_name: The class's name; `"scope"` for a named part that is no module.
        detail: The module's `extra_repr`, as `in_features=768, out_features=3072, bias=True`.
        calls: How often it was called in forward. A container that only its children's names pass
            through has 0.
        compiled: Whether it runs under torch.compile outside of the counted pass.
        owner: The row that counts this row's parameters, where they are shared with an earlier one.
        parameters: Distinct parameters here and below, each counted once in the profile.
        local_parameters: The part of them that this rank holds.
        dtypes: `parameters` by dtype.
        peak_bytes: The most bytes alive at once while this row or one below it ran.
    """

    class_name: str
    depth: Count
    calls: Count
    compiled: bool
    owner: str | None
    parameters: Count
    trainable_parameters: Count
    parameter_bytes: Count
    trainable_parameter_bytes: Count
    self_parameters: Count
    local_parameters: Count
    local_parameter_bytes: Count
    dtypes: Mapping[str, DtypeShare]
    peak_bytes: Count | None
    detail: str = ""
    forward: Work
    backward: Work
    recompute: Work
    optimizer: Work
    other: Work

    def work(self, phase: str) -> Work:
        """The work of one phase, by its name."""
        work: Work = getattr(self, phase)
        return work


def with_works(
    modules: Mapping[str, ModuleProfile], works: Mapping[ModulePhase, Work]
) -> dict[str, ModuleProfile]:
    changed: dict[str, dict[str, Any]] = {}
    for (row, phase), work in works.items():
        changed.setdefault(row, {})[phase] = work
    return {
        row: replace(module, **changed[row]) if row in changed else module
        for row, module in modules.items()
    }


class OpCount(Struct, frozen=True, kw_only=True, gc=False):
    """The work of one operator in one phase of one module, in one dtype.

    That of a contraction's operands, else of the result.
    """

    module: str
    operator: str
    phase: Phase
    dtype: str
    calls: Count
    macs: Count
    executed_macs: Count
    flops: Count
    bytes_moved: Count


class UnsupportedCall(Struct, frozen=True, kw_only=True):
    """An operator that ran without a formula, in one module and phase; no total includes it."""

    module: str
    operator: str
    phase: Phase
    calls: Count
    bytes: Count


class Communication(Struct, frozen=True, kw_only=True, gc=False):
    """One collective on one group. `bytes` is the larger of what a rank sends and receives.

    Attributes:
        seconds: Of its kernels on the device, or on the host with gloo, a step. Waiting for other
            ranks is part of it. `None` where none was traced, or where others of its kind ran in
            the same place.
        exposed_seconds: Of these, in which nothing was computed.
        least_seconds: The least `seconds` of all ranks that traced it, which is the transfer where
            one rank comes last in all calls; `None` where fewer than two traced.
    """

    module: str
    phase: Phase
    collective: str
    group: str
    group_size: Count | None
    calls: Count
    bytes: Count
    seconds: Seconds | None = None
    exposed_seconds: Seconds | None = None
    least_seconds: Seconds | None = None


class Moment(Struct, frozen=True, array_like=True, gc=False):
    """One operator of the timeline and the bytes that were alive before it ran.

    Attributes:
        index: Its number among all operators of the step.
        by_category: These bytes by category.
        highest_bytes: The most bytes alive from then until the next operator of the timeline.
    """

    operator: str
    module: str
    phase: Phase
    live_bytes: Count
    index: Count
    by_category: ByCategory
    highest_bytes: Count | None = None


class Allocation(Struct, frozen=True, array_like=True, gc=False):
    """A storage that was alive at the peak, and what made it."""

    category: str
    operator: str
    module: str
    phase: Phase
    bytes: Count


class Reserved(Struct, frozen=True, kw_only=True):
    """What torch's allocator for CUDA does with the allocations of a step, simulated.

    Peaks, each at its own time, in bytes.

    Attributes:
        settings: As in `PYTORCH_ALLOC_CONF`; empty is the default.
        requested_bytes: Asked for by tensors.
        allocated_bytes: In blocks that are handed out, as `torch.cuda.max_memory_allocated()`.
        reserved_bytes: In segments, as `torch.cuda.max_memory_reserved()`.
        unused_bytes: Reserved and not allocated when the most is reserved: cached blocks and
            fragments.
    """

    settings: str
    requested_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    unused_bytes: Count


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes alive from operator to operator.

    Of tensors, without the allocator's rounding (an estimate may have it) and workspaces.

    Attributes:
        source: `counted` on a real pass, `fake` where nothing was allocated.
        peak_index: The operator that reached the peak, as its number among all operators of the
            step.
        by_category: The peak by parameters, gradients, optimizer_state, activations, temporary,
            other. What is alive of a category at the peak may be less than it had before:
            `most_by_category` has that.
        most_by_category: The most bytes alive of each category, each at its own time: activations
            at the end of forward.
        by_module: The peak by the row that made or owns the bytes, without rows below it.
        activations_by_module: The activations among them, own bytes.
        alive: The 50 largest storages at the peak.
        timeline: In the order of execution; above 20,000 operators the extremes of equal buckets,
            and the peak.
        reserved: What torch's allocator for CUDA reserves; `None` where it was not simulated.
    """

    source: Literal["counted", "fake"]
    peak_bytes: Count
    peak_index: Count
    by_category: Mapping[str, Count]
    by_module: Mapping[str, Count]
    alive: tuple[Allocation, ...]
    timeline: tuple[Moment, ...]
    activations_by_module: Mapping[str, Count] = {}
    most_by_category: Mapping[str, Count] = {}
    reserved: Reserved | None = None

    def fits(self, memory_bytes: float, *, margin: float = MARGIN) -> bool:
        """Whether the peak fits into so much memory and leaves a share of it for what no tensor holds.

        Args:
            memory_bytes: What a device has, in bytes.
            margin: The share that is left for the driver, libraries, collectives and fragmentation.
                `lflops estimate --hardware NAME` has these by chip.

        Raises:
            ValueError: The margin is no share.
        """
        if not 0 <= margin < 1:
            raise ValueError(f"margin={margin!r}: give a share of the memory from 0 to less than 1")
        return self.peak_bytes <= memory_bytes * (1 - margin)


class Run(Struct, frozen=True, kw_only=True, gc=False):
    """What was profiled, where and how.

    `created` is in ISO 8601, UTC; `shapes` are the inputs'; `device_type` is torch's word.

    Attributes:
        allocated_bytes: The peak of torch's allocator for CUDA since it was last reset, read when a
            training's window ended; of several ranks the largest. `None` on a CPU.
        reserved_bytes: The same of the memory that the allocator took from the device.
        threads: With which torch computes an operator on the CPU; `None` where the model computes
            elsewhere.
        cores: Those that the process may use.
        workers: Processes that it has started and that run, as those of a DataLoader; `None` is
            unknown.
    """

    kind: Literal["count", "measure", "estimate", "training"]
    created: str
    versions: Mapping[str, str]
    host: str
    device_name: str
    dtype: str | None
    shapes: Mapping[str, tuple[Count, ...]]
    stage: str | None = None
    step: Count | None = None
    window: Count | None = None
    partial: bool = False
    hardware: Hardware | None = None
    precision: str | None = None
    samples_per_step: Count | None = None
    tokens_per_step: Count | None = None
    accumulation: Count | None = None
    strategy: str | None = None
    world_size: Count = 1
    data_parallel_size: Count | None = None
    tensor_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    expert_parallel_size: Count | None = None
    observer_ratio: float | None = None
    device_type: str | None = None
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    threads: Count | None = None
    cores: Count | None = None
    workers: Count | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """The result of one pass or one window. Saved as JSON, the file is this value.

    Attributes:
        waits: The modules and phases in which this rank waits for others: a collective runs there,
            or is awaited.
        unprofiled_comparison: What the clean steps of all ranks say of each other, which are more than
            the hooked ones of `rank_comparison`.
        timelines: One step in time, of the rank that made the profile, or of the first ranks; empty
            where no step was traced or hooked.
    """

    schema_version: str
    run: Run
    modules: Mapping[str, ModuleProfile]
    op_counts: tuple[OpCount, ...]
    unsupported: tuple[UnsupportedCall, ...]
    communication: tuple[Communication, ...] = ()
    waits: tuple[ModulePhase, ...] = ()
    steps: tuple[Step, ...] = ()
    memory: Memory | None = None
    trace: Trace | None = None
    ranks: tuple[Rank, ...] = ()
    rank_stats: tuple[RankStat, ...] = ()
    rank_comparison: RankComparison | None = None
    unprofiled_comparison: RankComparison | None = None
    notes: tuple[Note, ...] = ()
    timelines: tuple[StepTimeline, ...] = ()

    def __repr__(self) -> str:
        root = self.modules.get("")
        macs = (
            ", ".join(f"{units.count(root.work(phase).macs)} MACs {phase}" for phase in PHASES[:2])
            if root
            else ""
        )
        missing = len({entry.operator for entry in self.unsupported})
        parts = [
            root.class_name if root else "",
            macs,
            f"modules: {len(self.modules)}",
            f"operators not counted: {missing}",
        ]
        return f"<Profile {', '.join(filter(None, parts))}>"

    def by_module(
        self, phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> dict[str, int]:
        """MACs, or another metric, of each module and all below it.

        `"all"` and `None` add the phases up.

        Raises:
            ValueError: The phase or the metric is unknown; the other queries raise the same, also
                for an unknown module.
        """
        phases = _phases(phase, metric)
        return {
            name: sum(getattr(module.work(each), metric) for each in phases)
            for name, module in self.modules.items()
        }

    def by_operator(
        self, phase: PhaseQuery = "forward", module: str = "", *, metric: Metric = "macs"
    ) -> dict[str, int]:
        """MACs, or another metric, of each operator in `module` and below it, the most first.

        Those that have none are left out.
        """
        self._check_module(module)
        sums = summed(
            (operator, value)
            for name, operator, value in self._nonzero_cells(phase, metric)
            if module in ancestry(name)
        )
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def by_module_and_operator(
        self, phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> dict[str, dict[str, int]]:
        """MACs, or another metric, of each operator in each module and below it."""
        table: dict[str, dict[str, int]] = {name: {} for name in self.modules}
        for name, operator, value in self._nonzero_cells(phase, metric):
            for above in ancestry(name):
                table[above][operator] = table[above].get(operator, 0) + value
        return table

    def total(
        self, module: str = "", phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> int:
        """MACs, or another metric, of one module and all below it."""
        self._check_module(module)
        return sum(
            getattr(self.modules[module].work(each), metric) for each in _phases(phase, metric)
        )

    @property
    def is_counted(self) -> bool:
        """Whether its counts are known.

        Without them it has times alone, and zeros where counts would be.
        """
        return not any(notes_with("not_counted", self.notes))

    @property
    def cpu_lost_shares(self) -> list[float]:
        """The share of the CPU time that the process was ready to use and others took, in each hooked step that knows it."""
        # On a device there are none: a host that waits for its core need not slow it
        steps = self.steps if self.run.device_type in {"cpu", None} else ()
        known = [
            (s.cpu_lost, s.cpu_user + (s.cpu_system or 0.0))
            for s in steps
            if s.cpu_lost is not None and s.cpu_user is not None
        ]
        return [lost / (lost + used) for lost, used in known if lost + used]

    @property
    def uncalled(self) -> tuple[str, ...]:
        """The modules that were never called, nor anything below them, in the model's order."""
        # The parts of a script are not seen to be called, and an attention computes with the
        # weights of its `out_proj` itself
        called = {
            above
            for name, module in self.modules.items()
            if module.calls
            for above in ancestry(name)
        }
        scripts = {note.subject for note in notes_with("scripted", self.notes)}
        return tuple(
            name
            for name, module in self.modules.items()
            if name not in called
            and module.class_name != _HOLDS_WEIGHTS
            and scripts.isdisjoint(ancestry(name)[1:])
        )

    def patterns(self, below: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
        """Each module's name with `*` for the numbers of what repeats, as `layers.*.mlp.0`.

        Siblings are the same where they have one class; those without any module below them also
        need as many parameters.

        Args:
            below: The names directly below each name, where they are already known.
        """
        return patterns(
            {name: (each.class_name, each.parameters) for name, each in self.modules.items()}, below
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON file, whole or not at all.

        Raises:
            ProfileError: A number in it is NaN or infinite, or the file cannot be written.
        """
        from lflops.profile.json_file import save

        save(self, path)

    def _nonzero_cells(self, phase: PhaseQuery, metric: Metric) -> Iterator[tuple[str, str, int]]:
        phases = _phases(phase, metric)
        return (
            (cell.module, cell.operator, value)
            for cell in self.op_counts
            if cell.phase in phases and (value := getattr(cell, metric))
        )

    def _check_module(self, module: str) -> None:
        if module not in self.modules:
            near = difflib.get_close_matches(str(module), self.modules, 1)
            raise ValueError(
                f"module={module!r}: no such module"
                + (f", the nearest is {near[0]!r}" if near else "")
            )


_HOLDS_WEIGHTS = "NonDynamicallyQuantizableLinear"
"""The class of the `out_proj` of torch's MultiheadAttention, whose weights are used without calling it."""


def _phases(phase: PhaseQuery, metric: Metric) -> tuple[Phase, ...]:
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}: give one of {', '.join(get_args(Metric))}")
    if phase is None or phase == "all":
        return PHASES
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r}: give one of {', '.join(PHASES)}, all")
    return (phase,)


records.ready_for_threads(Profile)

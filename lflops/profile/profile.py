"""Define the profile: the work, memory and time of one rank or one run, module by module.

Numbers are in SI units (bytes, seconds, operations), and counts are exact integers. `None` means
unknown, never 0. A profile contains no sentences and no torch objects.

The name of a module is its dotted path; the name of the root is the empty string. A named scope
(`lflops.scope`) is treated like a module. The self work of a module is the work that ran while none
of its submodules was running. The inclusive work of a module is its self work plus the work of all
modules below it.

A window is a few consecutive steps of a training run that lflops profiles. Each window ends with
one profile.

Python's garbage collector does not track the types that occur thousands of times in a profile
(`gc=False`), which makes loading 5,000 modules a quarter faster. This is safe because values of
these types cannot be part of a reference cycle.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from lflops import units
from lflops.display import Displayed, Table, from_report
from lflops.hardware.chips import Hardware
from lflops.profile import records
from lflops.profile.module_names import ancestry, patterns
from lflops.profile.notes import Note, notes_with
from lflops.profile.records import (
    PHASES,
    ByCategory,
    Count,
    MainFunction,
    ModulePhase,
    Phase,
    Rank,
    RankComparison,
    RankStat,
    Seconds,
    TimingStats,
    Trace,
)
from lflops.profile.steps import Step
from lflops.profile.timeline import StepTimeline

PhaseQuery = Phase | Literal["all"] | None
"""A phase, or `"all"` or `None` for the sum over all phases."""

Metric = Literal["macs", "executed_macs", "flops", "bytes_moved"]
"""A field of `Work` that queries of a profile can return."""

MARGIN = 0.1
"""Share of a device's memory that `Memory.fits` leaves free.

On a device with 80 GB, about 7 GB are not available for tensors: CUDA's context needs 0.5 GB, NCCL
1.6 GB, fragmentation 4 GB, and the driver 1 GB.
"""

SCHEMA_VERSION = "2.0"
"""Version of the schema of the JSON file, as "major.minor".

Files with the same major version can be read even if the minor version differs: unknown fields are
ignored, and missing fields get their default.
"""


class Work(Struct, frozen=True, kw_only=True, gc=False):
    """The work of one module in one phase.

    The value of each field includes the submodules. The field with the same name and the prefix
    `self_` is the value without the submodules. All counts are for the one pass that was counted.
    In a training run, they are for one step, including all accumulated batches.

    Attributes:
        calls: Number of operator calls that computed or moved data. Views and allocations do not
            count.
        macs: Multiply-accumulates of matmuls, convolutions and attention. Attention counts all
            pairs of positions, even if a mask excludes some of them.
        executed_macs: `macs` without the multiply-accumulates that the kernel skips because of a
            causal or block mask.
        flops: 2 x `macs`, plus all other arithmetic by a documented convention.
        bytes_moved: The least possible memory traffic of the operators: each operator reads its
            inputs once and writes its results once. This is not the measured traffic.
        comm_bytes: Bytes that the collectives exchange.
        self_calls: `calls` without the submodules.
        self_macs: `macs` without the submodules.
        self_executed_macs: `executed_macs` without the submodules.
        self_flops: `flops` without the submodules.
        self_bytes_moved: `bytes_moved` without the submodules.
        self_comm_bytes: `comm_bytes` without the submodules.
        logical_macs: MACs that the unsharded model would need for this rank's batch, computed from
            the global shapes of sharded tensors. `None` if a rank used its local part of a sharded
            tensor as a plain tensor, because a plain tensor does not have the global shape.
        self_logical_macs: `logical_macs` without the submodules. `None` if it is unknown for the
            module itself.
        seconds: Time per step. It is measured on the CUDA stream, or on the host for a CPU. `None`
            if modules were not timed, or if the work is from several ranks, and always in the
            phases `optimizer` and `other`.
        self_seconds: `seconds` without the submodules.
        device_seconds: Time per step in which kernels ran on the device. Known only with a trace.
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
"""The fields of `Work` with exact counts, which are always known. Each has a `self_` field too."""

OP_COUNT_FIELDS = COUNTS[:-1]
"""The fields of `OpCount` that are counts."""


class DtypeShare(Struct, frozen=True, kw_only=True, gc=False):
    """The parameters of one dtype in a module and its submodules: their number and their bytes.

    Attributes:
        parameters: Number of parameters of this dtype.
        bytes: Bytes of these parameters.
    """

    parameters: Count
    bytes: Count


class ModuleProfile(Struct, frozen=True, kw_only=True, gc=False):
    """One module of the model, or one named scope: its class, parameters, calls and work.

    Attributes:
        class_name: The name of the class; `"scope"` for a named scope.
        depth: Number of modules above this module; 0 for the root.
        calls: Number of calls in forward; 0 for a container that is never called itself.
        compiled: Whether the module is compiled with torch.compile. `lflops.count` and
            `lflops.measure` run its Python code without compilation.
        owner: If the module shares its parameters with an earlier module, the name of the earlier
            module, where the parameters are counted. Otherwise `None`.
        parameters: Number of parameters of this module and its submodules. In the whole profile,
            each shared parameter is counted once. If the model is sharded, the shards of all ranks
            are included.
        trainable_parameters: The number of these parameters that require a gradient.
        parameter_bytes: Bytes of `parameters`.
        trainable_parameter_bytes: Bytes of `trainable_parameters`.
        self_parameters: `parameters` without the parameters of submodules. A shared parameter is
            counted only in its first module (see `owner`).
        local_parameters: The number of `parameters` that this rank holds. It is smaller than
            `parameters` only if the model is sharded.
        local_parameter_bytes: Bytes of `local_parameters`.
        dtypes: `parameters` and their bytes, by dtype.
        peak_bytes: The most bytes that were alive at one time while this module or one of its
            submodules ran.
        detail: The module's `extra_repr`, such as `in_features=768, out_features=3072, bias=True`.
        forward: Work in the forward pass.
        backward: Work in the backward pass, without `recompute`.
        recompute: Work in the backward pass that repeats a part of forward, for example with
            activation checkpointing.
        optimizer: Work of the optimizer's steps. It is assigned to the modules that own the updated
            parameters.
        other: Work outside forward, backward and the optimizer's steps, such as gradient clipping
            and metrics.
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
        """Return the work of one phase."""
        work: Work = getattr(self, phase)
        return work


def with_works(
    modules: Mapping[str, ModuleProfile], works: Mapping[ModulePhase, Work]
) -> dict[str, ModuleProfile]:
    """Return a copy of `modules` with new work in some modules and phases.

    Args:
        modules: The modules by name.
        works: The new work, by module and phase. Unknown modules are ignored.
    """
    changed: dict[str, dict[str, Any]] = {}
    for (name, phase), work in works.items():
        changed.setdefault(name, {})[phase] = work
    result = dict(modules)
    for name, work_by_phase in changed.items():
        if name in result:
            result[name] = replace(result[name], **work_by_phase)
    return result


class OpCount(Struct, frozen=True, kw_only=True, gc=False):
    """The work of one operator in one phase of one module, in one dtype.

    Attributes:
        module: Name of the innermost module that ran the operator. `""` means the root and
            everything outside modules. In the phase `optimizer`, it is the module that owns the
            updated parameter.
        operator: Name of the operator, such as `addmm`. It includes the namespace, except for
            `aten`. `torch.compile` is the work of a compiled graph that cannot be assigned to
            single operators.
        phase: The phase in which the operator ran; see `ModuleProfile`.
        dtype: For matmuls, convolutions and attention, the dtype of the operands. For other
            operators, the dtype of the result. For a matmul in float32, it is `tf32` if torch's
            settings allow TF32. Empty if the operator has no tensors.
        calls: Number of calls. A call in backward that repeats a part of forward, such as fused
            attention, is counted in `backward` and again in `recompute`.
        macs: Multiply-accumulates of all calls; see `Work.macs`.
        executed_macs: `macs` without the multiply-accumulates that the kernel skips because of a
            causal or block mask.
        flops: FLOPs of all calls; see `Work.flops`.
        bytes_moved: The least possible memory traffic of all calls in bytes; see
            `Work.bytes_moved`.
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
    """An operator without a formula for its FLOPs, in one module and phase.

    Its work is unknown and not included in any total.

    Attributes:
        module: Name of the innermost module that ran the operator. `""` means the root and
            everything outside modules.
        operator: Name of the operator, as in `OpCount.operator`.
        phase: The phase in which the operator ran; see `ModuleProfile`.
        calls: Number of calls.
        bytes: Bytes of the arguments and results of all calls. For an operator inside a TorchScript
            module, only the bytes of its packed weights.
    """

    module: str
    operator: str
    phase: Phase
    calls: Count
    bytes: Count


class Communication(Struct, frozen=True, kw_only=True, gc=False):
    """The calls of one collective in one process group, in one module and phase.

    Attributes:
        module: Name of the innermost module that called the collective. `""` means the root and
            everything outside modules.
        phase: The phase in which the collective was called; see `ModuleProfile`.
        collective: Name of the collective's operator without its namespace, such as `allreduce_`
            or `all_gather_into_tensor`.
        group: Name of the process group in torch; empty if unknown. In an estimate, a number
            instead of a name.
        group_size: Number of ranks in the process group; `None` if unknown.
        calls: Number of calls.
        bytes: The bytes that the rank sends or the bytes that it receives, whichever number is
            larger, summed over the calls.
        seconds: Time of the collective's kernels per step, including the wait for other ranks. It
            is measured on the device, or on the host for gloo. `None` if the collective was not
            traced. Also `None` if other collectives of the same kind ran in the same module and
            phase, because their times cannot be separated.
        exposed_seconds: The part of `seconds` during which nothing was computed.
        least_seconds: The smallest `seconds` of all traced ranks. The last rank to arrive does not
            wait, so this is the transfer time if the same rank arrives last in all calls. `None` if
            fewer than two ranks were traced.
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
    """One entry of the memory timeline: an operator, and the bytes that were alive before it ran.

    Attributes:
        operator: Name of the operator, as in `OpCount.operator`.
        module: Name of the innermost module that ran the operator. `""` means the root and
            everything outside modules, including the optimizer's steps.
        phase: The phase in which the operator ran; see `ModuleProfile`.
        live_bytes: Bytes of tensors that were alive before the operator ran.
        index: Position of the operator among all operators of the step.
        by_category: `live_bytes`, divided into categories such as activations.
        highest_bytes: The most bytes that were alive from the beginning of this operator to the
            operator of the next entry.
    """

    operator: str
    module: str
    phase: Phase
    live_bytes: Count
    index: Count
    by_category: ByCategory
    highest_bytes: Count | None = None


class Allocation(Struct, frozen=True, array_like=True, gc=False):
    """A storage that was alive at the memory peak, and the operator that allocated it.

    Attributes:
        category: The final use of the storage: the name of a field of `ByCategory`.
        operator: Name of the operator that allocated the storage, as in `OpCount.operator`. Empty
            if the storage was alive before the step.
        module: Name of the module that allocated the storage. For parameters, buffers and
            optimizer state, the module that owns the parameter or buffer.
        phase: The phase in which the storage was allocated; see `ModuleProfile`. `other` if the
            storage was alive before the step.
        bytes: Size of the storage in bytes.
    """

    category: str
    operator: str
    module: str
    phase: Phase
    bytes: Count


class Reserved(Struct, frozen=True, kw_only=True):
    """The memory that torch's CUDA allocator reserves in a step, according to a simulation.

    Each number of bytes is the largest value in the step. The largest values may occur at different
    times.

    Attributes:
        settings: The value of `PYTORCH_ALLOC_CONF`; empty for the default.
        requested_bytes: Bytes that tensors requested.
        allocated_bytes: Bytes in allocated blocks, like `torch.cuda.max_memory_allocated()`.
        reserved_bytes: Bytes in segments, like `torch.cuda.max_memory_reserved()`.
        unused_bytes: Reserved bytes that are not allocated (cached blocks and fragments) at the
            moment when `reserved_bytes` is reached.
        retries: Number of times that the allocator frees its cache because the memory of the device
            is used up. 0 if the memory is sufficient. `None` if the step runs out of memory.
    """

    settings: str
    requested_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    unused_bytes: Count
    retries: Count | None = 0


class Memory(Struct, frozen=True, kw_only=True):
    """The bytes of tensors that are alive while a step runs.

    Workspaces of libraries such as cuBLAS are not included. The allocator's rounding is included
    only in some estimates.

    Attributes:
        source: `counted` if the step really ran. `fake` if it ran with fake tensors, for which no
            memory is allocated.
        peak_bytes: The most bytes that were alive at one time (the peak).
        peak_index: Position of the operator that reached the peak, among all operators of the step.
        by_category: Bytes at the peak in each category: parameters, gradients, optimizer_state,
            activations, temporary, other. At another time, more bytes of a category may be alive;
            see `most_by_category`.
        by_module: Bytes at the peak, by the module that allocated them or, for parameters, owns
            them. The bytes of submodules are not included.
        alive: The 50 largest storages at the peak.
        timeline: The operators in the order of execution. If there are more than 20,000 operators,
            the step is divided into sections. In this case, the timeline has only the operator at
            the peak and, for each section, the operators with the least and the most live bytes.
        activations_by_module: The bytes of activations at the peak, by module. They are a part of
            the bytes in `by_module`.
        most_by_category: For each category, the most bytes that were alive at one time. Activations
            reach their maximum at the end of forward.
        reserved: Memory that torch's CUDA allocator reserves; `None` if it was not simulated.
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
        """Return whether the peak fits into a device's memory with a margin.

        Args:
            memory_bytes: Memory of the device in bytes.
            margin: Share of the memory that is left for the driver, libraries, collectives and
                fragmentation. `lflops estimate --hardware NAME` uses a more exact value for each
                chip.

        Raises:
            ValueError: The margin is negative, or it is 1 or more.
        """
        if not 0 <= margin < 1:
            raise ValueError(
                f"margin={margin!r}: pass a share of the memory, at least 0 and less than 1"
            )
        return self.peak_bytes <= memory_bytes * (1 - margin)


class OptimizerSettings(Struct, frozen=True, kw_only=True, gc=False):
    """The class of an optimizer, and how it updates the parameters.

    Attributes:
        class_name: The name of the class, such as `AdamW`.
        accepts_fused: Whether the class has an argument `fused`, which updates all parameters in
            one kernel.
        fused: Whether `fused=True` is set for all parameters.
        accepts_foreach: Whether the class has an argument `foreach`, which updates lists of
            parameters.
        foreach: Whether `foreach=True` is set for all parameters.
        max_iter: Maximum number of iterations per step. Each iteration calls the closure, as in
            `LBFGS`. `None` for other optimizers.
    """

    class_name: str
    accepts_fused: bool = False
    fused: bool = False
    accepts_foreach: bool = False
    foreach: bool = False
    max_iter: Count | None = None


class Run(Struct, frozen=True, kw_only=True, gc=False):
    """Facts about the profiled run: the model, the inputs, and the machine.

    Attributes:
        kind: How the profile was made. `count`: one pass was counted and nothing was timed.
            `measure`: a pass was counted, and passes were timed. `estimate`: the step ran with fake
            tensors, without computing anything. `training`: a window of a training run, in any
            `stage`.
        created: Time at which the profile was made, in ISO 8601 and UTC.
        versions: Versions of `lflops`, `torch` and `python`, by name.
        host: Name of the machine that made the profile.
        device_name: Name of the device of the model's parameters, such as `NVIDIA H200`; for a CPU,
            the name of the processor. In an estimate, `hardware` has the chip of the estimate.
        dtype: The dtype in which forward and backward run the most MACs, such as `bfloat16` or
            `tf32`. If no MACs were counted, the dtype of autocast or of most parameters. `None` if
            unknown.
        shapes: Shapes of the inputs.
        stage: What the training run did in the window: `train`, `validate`, `test` or `predict`.
            `None` if `kind` is not `training`.
        step: Number of the last step of the window, as in `Step.index`. `steps` may contain a few
            later steps. `None` if `kind` is not `training`.
        window: Number of the window among all windows of this `stage`, from 0. `None` if `kind` is
            not `training`.
        partial: Whether results are missing, because the code ended with an exception, the run
            ended before the window did, or a rank failed or is missing.
        hardware: The peak rates and memory of the chip. `None` if they are unknown or were not
            requested, or if the ranks have different chips.
        precision: The precision as the training loop names it, such as `bf16-mixed`. If the loop
            names none, the active autocast, such as `autocast bfloat16`. `None` if there is
            neither.
        samples_per_step: Number of samples in a step on one rank, including all accumulated
            batches; `None` if unknown.
        tokens_per_step: Number of tokens in a step on one rank, including all accumulated batches.
            Padding is included, unless the user passed the number. `None` if unknown.
        accumulation: Number of batches whose gradients are accumulated for one optimizer step.
            `None` if `stage` is not `train`.
        monitor: What monitors the training loop: `FlopsMonitor` in Lightning, `FlopsCallback` in
            transformers, `lflops.monitor` in a custom loop, or `lflops` in a loop that `lflops run`
            has detected. `None` if `kind` is not `training`.
        strategy: Name of the class that distributes the run: Lightning's strategy, or in other
            loops the class that wraps the model, or else the class of the engine. In an estimate,
            the kinds of parallelism, such as `fsdp2, tensor parallel`. `None` if there is none.
        world_size: Number of ranks in the run. A profile from `count` or `measure` has 1 until it
            is merged, even if there are more ranks.
        data_parallel_size: Number of parts into which data parallelism divides the batch of a step.
            `None` if unknown.
        tensor_parallel_size: Number of ranks among which tensor parallelism divides a layer. `None`
            if unknown.
        pipeline_parallel_size: Number of ranks among which a pipeline divides the layers. `None` if
            unknown.
        expert_parallel_size: Number of ranks among which the experts of a layer are divided. `None`
            if unknown.
        observer_ratio: Factor by which lflops made steps longer: the median duration of
            module-timing steps, divided by the median duration of unprofiled steps. If one pass was
            both counted and timed, its duration with counting, divided by its duration without
            counting. `None` if one of the two durations is unknown.
        device_type: Type of the device in torch, such as `cuda`.
        allocated_bytes: The most bytes that torch's CUDA allocator had allocated since its counters
            were last reset, read at the end of a window. For several ranks, the largest value.
            `None` on a CPU.
        reserved_bytes: The most bytes that torch's CUDA allocator had reserved; see
            `allocated_bytes`.
        threads: Number of threads that torch uses in an operator on the CPU; `None` if the model
            runs on another device.
        cores: Number of cores that the process may use.
        workers: Number of running child processes, such as workers of a DataLoader; `None` if
            unknown.
        samples_from: How `samples_per_step` was found, in words, such as `dimension 0 of images`.
        tokens_from: How `tokens_per_step` was found: the names of the inputs that have one element
            per token, or `units=` if the user passed the number.
        takes_derivatives: Whether the counted code computes derivatives in addition to the
            gradients of the loss: it calls `torch.autograd.grad`, or runs a backward pass with
            `create_graph=True`. Gradient penalties and physics-informed losses do this.
        optimizers: The optimizers that made a step in the counted code, those with the most
            parameters first. Optimizers with the same settings are listed once.
        optimized_parameters: Number of parameters that these optimizers update together. `None` if
            no optimizer made a step.
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
    monitor: str | None = None
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
    samples_from: str | None = None
    tokens_from: tuple[str, ...] = ()
    takes_derivatives: bool = False
    optimizers: tuple[OptimizerSettings, ...] = ()
    optimized_parameters: Count | None = None

    @property
    def is_auto_detected(self) -> bool:
        """Return whether lflops detected the training loop by itself, in an unchanged script."""
        return self.monitor == "lflops"


class Profile(Struct, Displayed, frozen=True, kw_only=True):
    """The result of counting one pass or profiling one window.

    The JSON file has exactly these fields.

    Attributes:
        schema_version: Version of the schema of the file, as "major.minor".
        run: Facts about the run: the model, the inputs, and the machine.
        modules: The modules by name. The root has the empty name.
        op_counts: The work of each operator in each module and phase.
        unsupported: Operators without a formula for their FLOPs.
        communication: The collectives that were called in each module and phase.
        waits: The modules and phases in which this rank runs a collective or waits for a
            collective. In these modules and phases, it also waits for other ranks.
        steps: The observed steps. In a merged profile, each step is merged from the steps of all
            ranks. Empty if nothing was timed.
        memory: The memory of tensors in the counted pass or step. In a merged profile, it is from
            the rank with the largest peak. `None` if unknown.
        trace: Totals of the traced steps. In a merged profile, they are from one rank. `None` if no
            step was traced.
        ranks: All ranks of the run, including ranks that sent no results. Empty if the profile is
            not merged from ranks.
        rank_stats: The times of ranks in each module and phase that at least two ranks timed. Empty
            if the profile is not merged from ranks.
        rank_comparison: The delays of ranks in module-timing steps. `None` if the profile is not
            merged from ranks, or if the ranks cannot be compared.
        unprofiled_comparison: Like `rank_comparison`, but in unprofiled steps. There are more
            unprofiled steps, but they have no module times.
        notes: Facts that a reader of the profile must know.
        timelines: Timelines of a few steps. A profile of several ranks has timelines of the first
            ranks. For each rank, the step with the median length comes first. Empty if no step was
            traced or timed by module.
        hooks: The slowest hooks of callbacks and of the LightningModule that run outside all
            phases: mean seconds per module-timing step, by class and method, such as
            `ModelCheckpoint.on_train_batch_end`. Empty in loops without such hooks. In a merged
            profile, they are from one rank.
        main_functions: The user's functions that take most of a phase. In a merged profile, they
            are from one rank. Empty if no Python stacks were sampled.
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
    hooks: Mapping[str, float] = {}
    main_functions: tuple[MainFunction, ...] = ()

    def __repr__(self) -> str:
        parts = []
        root = self.modules.get("")
        if root is not None:
            if root.class_name:
                parts.append(root.class_name)
            for phase in PHASES[:2]:
                parts.append(f"{units.count(root.work(phase).macs)} MACs {phase}")
        unsupported = {entry.operator for entry in self.unsupported}
        parts.append(f"modules: {len(self.modules)}")
        parts.append(f"unsupported operators: {len(unsupported)}")
        return f"<Profile {', '.join(parts)}>"

    def by_module(
        self, phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> dict[str, int]:
        """Return the MACs, or another metric, of each module, including its submodules.

        Args:
            phase: A phase, or `"all"` or `None` for the sum over all phases.
            metric: The field of `Work` to return.

        Raises:
            ValueError: The phase or the metric is unknown.
        """
        totals = {}
        for name in self.modules:
            totals[name] = self.total(name, phase, metric=metric)
        return totals

    def by_operator(
        self, phase: PhaseQuery = "forward", module: str = "", *, metric: Metric = "macs"
    ) -> dict[str, int]:
        """Return the MACs, or another metric, of each operator in a module and its submodules.

        The largest value comes first. Operators with a value of 0 are left out.

        Raises:
            ValueError: The phase, the module or the metric is unknown.
        """
        self._check_module(module)
        totals: dict[str, int] = {}
        for name, operator, value in self._nonzero_counts(phase, metric):
            if module in ancestry(name):
                totals[operator] = totals.get(operator, 0) + value
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def by_module_and_operator(
        self, phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> dict[str, dict[str, int]]:
        """Return the MACs, or another metric, of each operator in each module and its submodules.

        Raises:
            ValueError: The phase or the metric is unknown.
        """
        table: dict[str, dict[str, int]] = {name: {} for name in self.modules}
        for name, operator, value in self._nonzero_counts(phase, metric):
            for above in ancestry(name):
                table[above][operator] = table[above].get(operator, 0) + value
        return table

    def total(
        self, module: str = "", phase: PhaseQuery = "forward", *, metric: Metric = "macs"
    ) -> int:
        """Return the MACs, or another metric, of one module, including its submodules.

        Raises:
            ValueError: The module, the phase or the metric is unknown.
        """
        self._check_module(module)
        total = 0
        for each in _phases(phase, metric):
            total += getattr(self.modules[module].work(each), metric)
        return total

    @property
    def is_counted(self) -> bool:
        """Return whether operators were counted.

        If operators were not counted, the profile has only times, and all its counts are 0.
        """
        return not any(notes_with("not_counted", self.notes))

    @property
    def traced_steps(self) -> float | None:
        """Number of traced optimizer steps, or `None` if no step was traced.

        With gradient accumulation, the trace may contain only a part of a step. The number is
        therefore the number of traced batches divided by the number of batches per step.
        """
        if self.trace is None or not self.trace.batches:
            return None
        return self.trace.batches / (self.run.accumulation or 1)

    @property
    def cpu_lost_shares(self) -> list[float]:
        """For each measured step, the share of the needed CPU time that other processes took.

        The needed CPU time is the time in which the threads of the process ran or were ready to
        run. Steps without this measurement are left out. The list is empty for accelerators,
        because a step on an accelerator does not always take longer if the host waits for a CPU
        core.
        """
        if self.run.device_type not in {"cpu", None}:
            return []
        shares = []
        for step in self.steps:
            if step.cpu_lost is None or step.cpu_user is None:
                continue
            needed = step.cpu_lost + step.cpu_user + (step.cpu_system or 0.0)
            if needed:
                shares.append(step.cpu_lost / needed)
        return shares

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Names of the modules that never ran. Their submodules did not run either.

        Submodules of TorchScript modules are left out, because it is unknown whether they ran.
        """
        called: set[str] = set()
        for name, module in self.modules.items():
            if module.calls:
                called.update(ancestry(name))
        scripts = {note.subject for note in notes_with("scripted", self.notes)}
        uncalled = []
        for name, module in self.modules.items():
            is_in_script = not scripts.isdisjoint(ancestry(name)[1:])
            if name not in called and module.class_name != _HOLDS_WEIGHTS and not is_in_script:
                uncalled.append(name)
        return tuple(uncalled)

    def patterns(self, below: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
        """Return the pattern of each module's name: `layers.*.mlp` for `layers.3.mlp`.

        A star replaces the numbers of repeated modules, which are numbered siblings of the same
        class. The function `patterns` describes which siblings are repeated.

        Args:
            below: The names of the modules directly below each module, if they are known.
        """
        kinds = {}
        for name, module in self.modules.items():
            kinds[name] = (module.class_name, module.parameters)
        return patterns(kinds, below)

    def table(
        self, *, depth: int = -1, sort: str | None = None, phase: Phase | None = None
    ) -> Table:
        """Return a table of the modules with their work and time, for `print` or a notebook.

        Args:
            depth: Levels of modules below the model; -1 for all.
            sort: The column to sort by, largest value first: `"macs"`, `"flops"` or `"time"`. By
                default, modules are in the order of the model.
            phase: The phase to show. By default, all phases are added up.

        Raises:
            ValueError: The depth is not valid, the column to sort by is unknown, or it is `"time"`
                and the profile has no times.
        """
        table: Table = from_report("module_table")(self, depth=depth, sort=sort, phase=phase)
        return table

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a JSON file, atomically.

        Raises:
            ProfileError: A number in the profile is NaN or infinite, or the file cannot be written.
        """
        from lflops.profile.json_file import save

        save(self, path)

    def _nonzero_counts(self, phase: PhaseQuery, metric: Metric) -> Iterator[tuple[str, str, int]]:
        """For each `OpCount` with a value other than 0, yield the module, operator and value."""
        phases = _phases(phase, metric)
        for count in self.op_counts:
            value = getattr(count, metric)
            if value and count.phase in phases:
                yield count.module, count.operator, value

    def _check_module(self, module: str) -> None:
        if module in self.modules:
            return
        message = f"module={module!r}: the profile has no such module"
        near = difflib.get_close_matches(str(module), self.modules, 1)
        if near:
            message += f"; the most similar name is {near[0]!r}"
        raise ValueError(message)


_HOLDS_WEIGHTS = "NonDynamicallyQuantizableLinear"
"""The class of `out_proj` in torch's `MultiheadAttention`.

`MultiheadAttention` uses the weights of `out_proj` without calling it, so `out_proj` does not count
as a module that never ran.
"""


def _phases(phase: PhaseQuery, metric: Metric) -> tuple[Phase, ...]:
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}: pass one of {', '.join(get_args(Metric))}")
    if phase is None or phase == "all":
        return PHASES
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r}: pass one of {', '.join(PHASES)}, all")
    return (phase,)


records.ready_for_threads(Profile)

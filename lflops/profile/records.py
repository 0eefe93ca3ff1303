"""Define the phases of a step, timing statistics, and the parts of a profile on traces and ranks.

In this module, a place is a module in a phase, or a phase of the step outside modules. An interval
is the part of a step between two collectives.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import Meta, Struct, json
from msgspec.structs import replace

from lflops.profile.series import ratio

Phase = Literal["forward", "backward", "recompute", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer", "other")
PASSES: Mapping[str, tuple[Phase, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
}
"""The phases of the forward pass and of the backward pass, keyed by pass."""

PASS_PHASES = PHASES[:3]
"""All phases of the forward pass and of the backward pass."""


def ready_for_threads(*kinds: Any) -> None:
    """Create a decoder for each of the given types, so that several threads can decode them.

    msgspec crashes if two threads decode a type for the first time at the same moment.
    """
    for kind in kinds:
        json.Decoder(kind)


def step_phase(phase: str) -> str:
    """Return the phase of a step whose time includes the given phase.

    This is `backward` for `recompute`: the operators of `recompute` are counted separately, but
    their time is a part of `backward`. All other phases are returned unchanged.
    """
    return "backward" if phase == "recompute" else phase


class ModulePhase(NamedTuple):
    """A module in one phase: `ModulePhase("encoder.layers.0", "forward")`.

    In comparisons of ranks, it can also be a phase of the step that is outside all modules:
    `ModulePhase("", "data")`.

    Attributes:
        fqn: Name of the module. `""` means the root and everything outside modules.
        phase: In a file, one of `forward`, `backward`, `recompute`, `optimizer` and `other`.
    """

    fqn: str
    phase: str


Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class TimingStats(Struct, frozen=True, kw_only=True, gc=False):
    """The median and the quartiles of a time over several steps.

    Attributes:
        median: Median in seconds.
        low: Lower quartile in seconds.
        high: Upper quartile in seconds.
        n: Number of steps.
    """

    median: Seconds
    low: Seconds
    high: Seconds
    n: Count

    @property
    def error(self) -> float | None:
        """Standard error of the median in seconds; `None` for fewer than two steps.

        The error is computed from the quartiles, as `lflops.analysis.compare.significance`
        explains.
        """
        if self.n < 2:
            return None
        return 0.93 * (self.high - self.low) * math.sqrt(self.n) / (self.n - 1)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Return the median and the quartiles of measured seconds; `None` if there are no values.

        A negative value counts as 0. Differences of two noisy times can be negative.
        """
        seconds = [max(value, 0.0) for value in values]
        if not seconds:
            return None
        if len(seconds) == 1:
            return cls(median=seconds[0], low=seconds[0], high=seconds[0], n=1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, n=len(seconds))

    def shifted(self, seconds: float) -> Self:
        """Return a copy with `seconds` added to all times. Negative results become 0."""
        return replace(
            self,
            median=max(self.median + seconds, 0.0),
            low=max(self.low + seconds, 0.0),
            high=max(self.high + seconds, 0.0),
        )

    def times(self, factor: float) -> Self:
        """Return a copy with all times multiplied by `factor`."""
        return replace(
            self, median=self.median * factor, low=self.low * factor, high=self.high * factor
        )


def median_of(stats: TimingStats | None) -> float | None:
    """Return the median in seconds, or `None` if `stats` is `None`."""
    if stats is None:
        return None
    return stats.median


class ByCategory(NamedTuple):
    """Bytes that are allocated at one moment, grouped by the category of the tensor.

    A gradient counts in `gradients` as soon as backward has created it.

    Attributes:
        parameters: Parameters of the model, including the shards of other ranks while FSDP has
            gathered them.
        gradients: Gradients of the parameters.
        optimizer_state: State that the optimizer keeps for the parameters, such as momentum.
        activations: Tensors created in forward, whether or not they are saved for backward.
        temporary: Tensors created in backward or in an optimizer's step that are neither gradients
            nor optimizer state.
        other: Tensors created before the step that are not parameters, such as the batch and
            buffers, and tensors created outside the phases of the model.
    """

    parameters: Count
    gradients: Count
    optimizer_state: Count
    activations: Count
    temporary: Count
    other: Count

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "ByCategory":
        """Convert a mapping from category to bytes. A missing category has 0 bytes."""
        return cls._make(sizes.get(name, 0) for name in cls._fields)


CATEGORIES = ByCategory._fields


class TracedOperator(Struct, frozen=True, kw_only=True):
    """The number of calls and the time of one operator in the traces.

    Inclusive time contains the operators that the operator calls; self time does not.

    Attributes:
        name: Name in the trace: an operator such as `aten::addmm`, a node of autograd, or a call of
            the device's runtime such as `cudaLaunchKernel`.
        calls: Number of calls in all traced batches.
        host_seconds: Inclusive time of all calls on the host, in seconds.
        self_host_seconds: Self time of all calls on the host, in seconds.
        device_seconds: Inclusive time on the device, in seconds: the time of the kernels and
            copies that the calls launched. 0 if they launched none.
        self_device_seconds: Self time on the device, in seconds. 0 if the operator itself launched
            no kernels or copies.
    """

    name: str
    calls: Count
    host_seconds: Seconds
    self_host_seconds: Seconds
    device_seconds: Seconds
    self_device_seconds: Seconds


class Call(NamedTuple):
    """One call of a module or of a named scope in a traced step, from entry to exit.

    In backward, modules are not called. There, a call is a sequence of consecutive autograd nodes
    that belong to the same module.

    Attributes:
        start: Unix time at which the call begins, in nanoseconds.
        end: Unix time at which the call ends, in nanoseconds.
        device: Nanoseconds of the kernels that were launched during the call; 0 without a device.
        innermost: Whether this call contains no other call.
        thread: Number of the thread; 0 is the training thread.
    """

    fqn: str
    phase: Phase
    start: int
    end: int
    device: int
    innermost: bool
    thread: int


class CompiledKernel(Struct, frozen=True, kw_only=True, gc=False):
    """A kernel of compiled code in one phase, or the share of one module in such a kernel.

    If a kernel was fused from several modules, there is one `CompiledKernel` for each of these
    modules.

    Attributes:
        name: The kernel's name in generated code, such as `cpp_fused_gelu_1` or
            `extern_kernels.mm`.
        module: Name of the module that has this share of the kernel; `""` for the root.
        phase: The phase in which the graph runs. `recompute` for a part of forward that the graph
            repeats in backward.
        modules: Number of modules that the kernel computes for. The kernel's time and bytes are
            divided among these modules in proportion to the bytes that their graph nodes move.
        calls: Number of calls of the kernel.
        host_seconds: The module's share of the time on the host, which is measured from the end of
            the previous kernel to the end of this kernel.
        device_seconds: The module's share of the time on the device; `None` if no device was
            recorded.
        bytes_moved: The module's share of the bytes that the kernel reads and writes, as counted by
            the compiler.
    """

    name: str
    module: str
    phase: Phase
    modules: Count
    calls: Count
    host_seconds: Seconds
    device_seconds: Seconds | None = None
    bytes_moved: Count | None = None

    def seconds_on(self, side: Literal["host", "device"]) -> float:
        """Return `host_seconds` or `device_seconds`.

        If no device was recorded, `host_seconds` is returned in both cases.
        """
        if side == "host" or self.device_seconds is None:
            return self.host_seconds
        return self.device_seconds


class CompiledCode(Struct, frozen=True, kw_only=True):
    """The time that traced steps spent in the graphs of torch.compile.

    Attributes:
        graphs: Number of different graphs that ran.
        unrecorded_graphs: Number of these graphs for which lflops does not know the modules,
            because their compilation was not recorded.
        regions: Number of calls of these graphs.
        timed_on: Where the times were measured: on the device if it was recorded, otherwise on the
            host.
        seconds: Time in all graphs: the sum of the times of all kernels and `unassigned_seconds`.
        unassigned_seconds: The part of `seconds` that belongs to no known module.
        divided_seconds: Time in kernels that were fused from several modules. This time was divided
            among the modules.
        kernels: The kernels, with the longest time first.
    """

    graphs: Count
    unrecorded_graphs: Count
    regions: Count
    timed_on: Literal["host", "device"]
    seconds: Seconds
    unassigned_seconds: Seconds
    divided_seconds: Seconds
    kernels: tuple[CompiledKernel, ...] = ()


class Trace(Struct, frozen=True, kw_only=True):
    """Totals over the steps that torch.profiler traced, and the files of the traces.

    The four times of the device do not overlap: at any moment, the device counts as idle,
    communicating, copying or computing. The times are `None` if no work was recorded on a device.

    Attributes:
        files: The path of each rank's trace.
        batches: Number of traced batches. All times are sums over these batches.
        device_idle_seconds: Time in which the device did nothing, between its first and its last
            work.
        exposed_comm_seconds: Time in which the device communicated but computed nothing.
        exposed_copy_seconds: Time in which the device copied data and did nothing else.
        device_compute_seconds: Time in which the device ran a kernel other than communication.
        operators: The operators with the most self time, on the device or on the host.
        compiled: The time in compiled graphs by module; `None` if it was not requested, or if
            nothing is compiled.
    """

    files: Mapping[str, str]
    batches: Count | None = None
    device_idle_seconds: Seconds | None = None
    exposed_comm_seconds: Seconds | None = None
    exposed_copy_seconds: Seconds | None = None
    device_compute_seconds: Seconds | None = None
    operators: tuple[TracedOperator, ...] = ()
    compiled: CompiledCode | None = None

    @property
    def has_device_times(self) -> bool:
        """Whether an operator launched work on a device, whose time is then known."""
        return any(operator.self_device_seconds for operator in self.operators)

    def by_own_time(self) -> list[TracedOperator]:
        """Return the operators by self time, largest first.

        This is the time on the device if it is known, and otherwise the time on the host.
        """
        field = "self_device_seconds" if self.has_device_times else "self_host_seconds"
        return sorted(self.operators, key=attrgetter(field), reverse=True)

    def per_batch(self, figure: float | None) -> float | None:
        """Divide a total of the trace by the number of traced batches.

        Returns `None` if the total is `None` or no batch was traced.
        """
        return ratio(figure, self.batches)


class Rank(Struct, frozen=True, kw_only=True, gc=False):
    """One rank of the run. If the rank did not send its results, most fields are empty.

    Attributes:
        rank: Number of the rank, from 0.
        node: Number of the rank's machine in the run, as text. `None` if the rank sent no results,
            or if its profile was merged by `merge`.
        host: Name of the rank's machine. `None` if the rank sent no results.
        device: The name of the rank's chip.
        coordinates: Position of the rank in each kind of parallelism, from 0, such as `{"data": 3,
            "tensor": 0}`. Empty if unknown.
        status: `ok` if the rank sent its results, and `failed` if the run ended with an exception
            on it. `late` if the rank had begun to send its results when rank 0 stopped waiting.
            `missing` if there are no results for any other reason.
        step: Time of an unprofiled step. It is about the same on ranks that wait for each other,
            even if one of them is slow.
        data: The data wait of an unprofiled step.
        cpu: CPU time of an unprofiled step.
        macs: MACs of this rank in forward and backward, without `recompute`. `None` if the rank
            sent no results.
        peak_bytes: The most bytes of tensors that were alive on this rank at one time, as in
            `Memory.peak_bytes`. `None` if unknown.
        slowest: Number of steps in which this rank took longest, not counting its waits for other
            ranks. `None` if its steps were not compared.
    """

    rank: Count
    node: str | None
    host: str | None
    device: str | None
    coordinates: Mapping[str, Count]
    status: Literal["ok", "late", "missing", "failed"]
    step: TimingStats | None = None
    data: TimingStats | None = None
    cpu: TimingStats | None = None
    macs: Count | None = None
    peak_bytes: Count | None = None
    slowest: Count | None = None


PREEMPTED = "preempted"
"""Name of a pseudo-phase: the time in which a rank's training thread waited for a CPU core."""


class RankDelay(Struct, frozen=True, kw_only=True, gc=False):
    """The delay of one rank in one place: the extra time that the rank takes in each step.

    A place is a module in a phase, or a phase outside modules.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules.
            `layers.*.mlp` means all modules with this pattern together.
        phase: One of `PHASES`, or `data`, `transfer`, `clip`, `validation` or `checkpoint`. `all`
            means everything that the rank's device does, `stage` means the rank's stage of a
            pipeline, and `PREEMPTED` means the time in which the rank's training thread waited for
            a CPU core.
        rank: The rank.
        seconds: Median time of this rank in the place.
        usual: Median time of the other ranks in the place, or an estimate of it if no other rank
            runs the module.
        excess: For each compared step, seconds that this rank took longer than usual. Negative if
            it was faster.
        late: For each compared step, seconds by which this rank came later than the median rank to
            the collectives that end `intervals`.
        intervals: The numbers of the intervals in which the place runs. An interval is the part of
            a step between two collectives.
        modules: Number of modules that `module` stands for.
        noise: Standard deviation of the median excesses of the other ranks in this place. It shows
            how large an excess can be by chance. `None` if there are too few ranks.
        largest_of_others: The largest excesses of other ranks in this place, over all steps,
            largest first.
        begins_collective: Whether a collective begins in the place but is awaited in another place,
            as in backward under DDP.
    """

    module: str
    phase: str
    rank: Count
    seconds: Seconds
    usual: Seconds
    excess: tuple[float, ...]
    late: tuple[float, ...]
    intervals: tuple[Count, ...] = ()
    modules: Count = 1
    noise: Seconds | None = None
    largest_of_others: tuple[float, ...] = ()
    begins_collective: bool = False


class RankWait(Struct, frozen=True, kw_only=True, gc=False):
    """The time that ranks wait in one place (a module in a phase), mainly for one rank.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules.
        phase: One of `PHASES`, or `clip` for work on gradients after backward, or `sync` for the
            end of the step, where ranks wait for each other.
        for_rank: The rank for which the other ranks wait longest.
        ranks: Number of ranks other than `for_rank`.
        seconds: Waiting time of the median rank, as a mean over the steps. With 5 or more steps,
            the longest wait is replaced by the second longest, because a single long wait is not
            typical.
        longest: Mean waiting time per step of the rank that waits longest.
        longest_rank: The rank that waits longest.
        traced_seconds: Like `seconds`, but according to the traces. `None` unless all ranks were
            traced.
        transfer_seconds: The shortest time that any rank spent in the traced collectives. This is
            the time of the transfer without waiting. `None` unless all ranks were traced.
    """

    module: str
    phase: str
    for_rank: Count
    ranks: Count
    seconds: Seconds
    longest: Seconds
    longest_rank: Count
    traced_seconds: Seconds | None = None
    transfer_seconds: Seconds | None = None


class RankActivity(Struct, frozen=True, kw_only=True, gc=False):
    """Differences between a late rank and the other ranks that may explain the delay.

    Each time is the difference from the median of the other ranks. It is a weighted mean over the
    steps: the later the rank was in a step, the more weight this step has.

    Attributes:
        rank: The late rank.
        late: Seconds that the rank was busy, not counting its waits for other ranks.
        waited: Seconds in which the training thread was ready to run while another thread had its
            CPU core.
        other_threads: CPU seconds that the process used outside the training thread.
        units_ratio: Number of tokens (or samples) in the batches of the rank, divided by the median
            number of the other ranks. This is a ratio, not a difference.
    """

    rank: Count
    late: Seconds
    waited: float | None = None
    other_threads: float | None = None
    units_ratio: Seconds | None = None


Cause = Literal["work", "chip", "thread", "preempted"]
"""The reason why a rank takes longer.

The rank has more work (`work`), it runs on a different chip (`chip`), another thread of its process
was computing (`thread`), or the operating system gave its CPU core to another process
(`preempted`).
"""


class Straggler(Struct, frozen=True, kw_only=True):
    """A straggler: a rank that the other ranks wait for, and the place in which it is slow.

    A place is a module in a phase, or a phase of the step outside modules.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules;
            `layers.*.mlp` means several modules together.
        phase: One of `PHASES`, or `data`, `transfer`, `clip`, `validation` or `checkpoint`. `all`
            means everything that the rank's device does, and `stage` means the rank's part of a
            pipeline.
        modules: Number of modules that `module` stands for.
        slow_rank: The slow rank.
        seconds_lost: Cost in seconds per step: the extra time that makes the other ranks wait.
        pattern: `steady` if the rank is slow in nearly every step, `intermittent` if it is slow in
            some steps.
        slow_steps: Number of steps in which the rank is slow; `None` if the times of single steps
            are unknown.
        steps: Number of compared steps; `None` if the times of single steps are unknown.
        seconds: Median time of the slow rank in this place.
        usual: Median time of the other ranks in this place.
        cause: The reason why the rank is slow; `None` if unknown.
        work_ratio: Ratio of the rank's work to the work of the other ranks; `None` unless `cause`
            is `work`.
        since: Index of the first slow step; `None` unless the rank became slow during the run.
        until: Index of the last step for which the rank was reported as slow; `None` if the rank is
            still slow.
        is_whole_phase: Whether the place is the whole forward or backward pass, because
            module-timing steps do not show the slow module.
    """

    module: str
    phase: str
    modules: Count
    slow_rank: Count
    seconds_lost: Seconds
    pattern: Literal["steady", "intermittent"]
    slow_steps: Count | None
    steps: Count | None
    seconds: Seconds
    usual: Seconds
    cause: Cause | None = None
    work_ratio: Seconds | None = None
    since: Count | None = None
    until: Count | None = None
    is_whole_phase: bool = False

    @property
    def ratio(self) -> float | None:
        """Ratio of `seconds` to `usual`.

        `None` if the other ranks take no time, or if the rank is slow in only some steps.
        """
        if not self.usual or self.pattern != "steady":
            return None
        return self.seconds / self.usual


LARGE_EXCESS_RATIO = 2**-0.5
"""Ratio between consecutive limits in `RankComparison.large_excesses`.

This field counts excesses, which are times that a rank takes longer than the other ranks. Each
count is the number of excesses above one limit. The limits are 1, 1/√2, 1/2, … of a step.
"""


class RankComparison(Struct, frozen=True, kw_only=True):
    """A comparison of the times of ranks in the same steps.

    A place is a module in a phase, or a phase outside modules. Module-timing steps are compared by
    module and phase, unprofiled steps only by phase. `usual_lost_seconds` and all fields after it
    are known only for unprofiled steps.

    Attributes:
        steps: Number of compared steps.
        seconds: Time of the median step.
        lost_seconds: Seconds by which a step would be shorter if the last rank arrived at each
            collective together with the median rank, as a mean over the steps. `None` if unknown.
        delays: The delays of ranks, with the most expensive delay first.
        waits: The places in which ranks wait for another rank, with the longest wait first.
        large_excesses: One count for each of the limits 1, 1/√2, 1/2, … of a step: how often a rank
            in a place took longer than the other ranks by at least this limit. These counts show
            how large a delay can be by chance.
        large_excess_seconds: Time in the places that were searched for `large_excesses`, summed
            over all ranks and steps.
        places: Number of places that were searched for `large_excesses`.
        from_quartiles: Whether the times of single steps are unknown. In this case, the quartiles
            of each rank's times are compared as if they were the times of three steps.
        usual_lost_seconds: Like `lost_seconds`, but for the median step instead of the mean step,
            so that rare delays do not change it.
        at: The index of each compared step, as in `Step.index`.
        awaited: The phases in which ranks wait for each other; `wait` is the end of backward. A
            long time in these phases does not make a rank a straggler.
        activity: Differences between late ranks and the other ranks that may explain the delays.
        waited: Seconds per step in which a rank's training thread waited for a CPU core, as a mean
            over ranks and steps.
        lengths_explain: Correlation between the size of a rank's batch and the time that the rank
            is busy, both relative to the other ranks. A value near 1 means that the sizes of the
            batches explain the delays.
        excludes_waits: Whether the times of the phases exclude the waits of the training thread for
            a CPU core. If so, these waits are a separate delay with the phase `PREEMPTED`.
        flagged: The stragglers that were logged during the run.
    """

    steps: Count
    seconds: Seconds
    lost_seconds: Seconds | None
    delays: tuple[RankDelay, ...]
    waits: tuple[RankWait, ...]
    large_excesses: tuple[Count, ...] = ()
    large_excess_seconds: Seconds = 0.0
    places: Count = 0
    from_quartiles: bool = False
    usual_lost_seconds: Seconds | None = None
    at: tuple[Count, ...] = ()
    awaited: tuple[str, ...] = ()
    activity: tuple[RankActivity, ...] = ()
    waited: Seconds | None = None
    lengths_explain: float | None = None
    excludes_waits: bool = False
    flagged: tuple[Straggler, ...] = ()

    @property
    def compares_phases(self) -> bool:
        """Return whether ranks were compared by the phases of unprofiled steps, not by modules."""
        return bool(self.at)


class MainFunction(Struct, frozen=True, kw_only=True, gc=False):
    """The function of the user in which the training thread spends most of a phase.

    In stack-sampling steps, lflops samples the Python stack of the training thread. Functions of
    installed packages are left out. If the function spends most of its time in another function of
    the user, the other function is the main function.

    Attributes:
        phase: A phase of the step, such as `data`.
        module: Name of the module that calls the function. `""` means the root and everything
            outside modules.
        name: Name of the function, with its class: `Net.training_step`. `<module>` is the code of a
            script outside functions.
        file: The source file, relative to the working directory if possible.
        line: The line of the function in which most of the samples are.
        samples: Number of samples of the phase and the module.
        share: Share of the phase's time in the module that the function takes. This includes the
            functions that it calls.
    """

    phase: str
    module: str
    name: str
    file: str
    line: Count
    samples: Count
    share: float

    @property
    def place(self) -> str:
        """The function and its line, such as `collate (train.py:28)`."""
        line = f"{self.file}:{self.line}"
        if self.name == "<module>":
            return line
        name = "a lambda" if self.name.endswith("<lambda>") else self.name
        return f"{name} ({line})"


class RankStat(Struct, frozen=True, kw_only=True, gc=False):
    """The fastest, median and slowest rank in one module and phase, or in a phase outside modules.

    The time of a rank is its median over the steps.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules.
        phase: One of `PHASES`, or `data`, `transfer`, `clip` or `sync`.
        low: Time of the fastest rank.
        median: Time of the median rank. For an even number of ranks, the lower of the two middle
            times.
        high: Time of the slowest rank.
        high_rank: The rank with the longest time. If `waits` is set, this rank may only have waited
            for other ranks.
        waits: Whether ranks wait for each other in this module and phase. If so, the times include
            the waiting.
        by_rank: The time of each rank. `None` except in the 32 entries with the largest differences
            between ranks, so that the size of a profile is not proportional to modules x ranks.
    """

    module: str
    phase: str
    low: Seconds
    median: Seconds
    high: Seconds
    high_rank: Count
    waits: bool = False
    by_rank: Mapping[Count, Seconds] | None = None

    @property
    def spread(self) -> float:
        """Difference between the slowest rank and the median rank, in seconds."""
        return self.high - self.median

"""Define the traces and ranks of a run, and the phases and units that the whole profile uses."""

import math
import statistics
from collections.abc import Iterable, Mapping
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
"""The phases that belong to each pass over the model."""
PASS_PHASES = PHASES[:3]
"""The phases of all passes over the model."""


def ready_for_threads(*kinds: Any) -> None:
    """Prepare the given types for decoding in several threads.

    msgspec crashes if two threads decode a type for the first time simultaneously.
    """
    for kind in kinds:
        json.Decoder(kind)


def step_phase(phase: str) -> str:
    """Return the phase of a timed step that contains a phase of the count."""
    return "backward" if phase == "recompute" else phase


class ModulePhase(NamedTuple):
    """A module in one phase, as a key: `ModulePhase("encoder.layers.0", "forward")`.

    In comparisons of ranks, it can also be a phase of the step outside modules: `ModulePhase("",
    "data")`.
    """

    fqn: str
    phase: str


Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class TimingStats(Struct, frozen=True, kw_only=True, gc=False):
    """Seconds over several steps: the median and the quartiles."""

    median: Seconds
    low: Seconds
    high: Seconds
    n: Count

    @property
    def error(self) -> float | None:
        """Standard error of the median in seconds; `None` for fewer than two steps.

        `lflops.analysis.compare.significance` explains how it follows from the quartiles.
        """
        if self.n < 2:
            return None
        return 0.93 * (self.high - self.low) * math.sqrt(self.n) / (self.n - 1)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Return the median and quartiles of measured seconds; `None` without a value.

        A negative difference, which is noise, counts as 0.
        """
        seconds = [max(value, 0.0) for value in values]
        if not seconds:
            return None
        if len(seconds) == 1:
            return cls(median=seconds[0], low=seconds[0], high=seconds[0], n=1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, n=len(seconds))

    def shifted(self, seconds: float) -> Self:
        """Return the times plus `seconds`, but not below 0."""
        return replace(
            self,
            median=max(self.median + seconds, 0.0),
            low=max(self.low + seconds, 0.0),
            high=max(self.high + seconds, 0.0),
        )

    def times(self, factor: float) -> Self:
        """Return the times multiplied by `factor`."""
        return replace(
            self, median=self.median * factor, low=self.low * factor, high=self.high * factor
        )


def median_of(stats: TimingStats | None) -> float | None:
    """Return the median, or `None` if there are no times."""
    if stats is None:
        return None
    return stats.median


class ByCategory(NamedTuple):
    """Bytes alive at one time, grouped by the final use of each tensor.

    A gradient counts in `gradients` as soon as backward has created it.

    Attributes:
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


CATEGORIES = ByCategory._fields


class TracedOperator(Struct, frozen=True, kw_only=True):
    """The inclusive time and the self time of an operator in the traces."""

    name: str
    calls: Count
    host_seconds: Seconds
    self_host_seconds: Seconds
    device_seconds: Seconds
    self_device_seconds: Seconds


class Call(NamedTuple):
    """A call of a module or a user's scope, from entry to exit.

    In backward, a call is a sequence of consecutive nodes of one row.

    Attributes:
        start: Nanoseconds since 1970.
        end: Nanoseconds since 1970.
        device: Nanoseconds of the kernels that were launched inside the call; 0 without a device.
        innermost: Whether there is no other call inside this call.
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
    """A kernel of compiled code in one module and phase.

    A kernel that was fused from several modules has a row for each module.

    Attributes:
        name: The name in generated code, such as `cpp_fused_gelu_1` or `extern_kernels.mm`.
        modules: Number of modules that the kernel computes for. The kernel's time and bytes are
            divided between those modules, in proportion to the bytes that their nodes move.
        calls: Number of kernel calls that compute for the module.
        host_seconds: Time from the end of the previous kernel to the end of this kernel.
        device_seconds: Kernel time; `None` if no device was recorded.
        bytes_moved: Bytes that the fused kernel reads and writes, as counted by the compiler.
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
        """Return the seconds on the host or on the device.

        Returns host seconds if no device was recorded.
        """
        if side == "host" or self.device_seconds is None:
            return self.host_seconds
        return self.device_seconds


class CompiledCode(Struct, frozen=True, kw_only=True):
    """The work inside compiled graphs in the traced steps.

    Attributes:
        graphs: Number of different graphs.
        unrecorded_graphs: Number of graphs with unknown modules.
        regions: Number of calls of graphs.
        timed_on: Where seconds were measured: on the device if it was recorded, otherwise on the
            host.
        seconds: Time in all graphs: kernels and unassigned time.
        unassigned_seconds: Time that belongs to no known module.
        divided_seconds: Time in kernels that were fused from several modules.
        kernels: The kernels, longest first.
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
    """Totals of the traced steps, and the traces' files.

    Attributes:
        files: The paths of the traces by rank.
        batches: Number of recorded batches. All figures below are sums over these batches.
        device_idle_seconds: Idle time between the first and the last work of the device; `None` if
            no work was recorded on a device. Idle, exposed and compute seconds are disjoint.
        exposed_comm_seconds: Time in which the device communicated but computed nothing.
        exposed_copy_seconds: Time in which the device copied data and did nothing else.
        device_compute_seconds: Time in which the device ran a kernel other than communication.
        operators: The operators with the most self time, on the device or on the host.
        compiled: The work inside compiled graphs by module; `None` if it was not requested, or
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

    def by_own_time(self, *, on_device: bool) -> list[TracedOperator]:
        """Return the operators, sorted by self time."""
        return sorted(
            self.operators,
            key=lambda each: each.self_device_seconds if on_device else each.self_host_seconds,
            reverse=True,
        )

    def per_batch(self, figure: float | None) -> float | None:
        """Return the mean over the recorded batches; `None` if it is unknown."""
        return ratio(figure, self.batches)


class Rank(Struct, frozen=True, kw_only=True, gc=False):
    """One rank of the run, which may not have reported.

    Attributes:
        device: The name of the rank's chip.
        step: Time of an unprofiled step. Ranks that wait for each other take equally long.
        data: The data wait of an unprofiled step.
        cpu: CPU time of an unprofiled step.
        slowest: Number of compared steps in which this rank was busy longest, without waiting;
            `None` if its steps were not compared.
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
"""A name used like a phase, for the time in which a rank's thread waited for a core in any phase."""


class RankDelay(Struct, frozen=True, kw_only=True, gc=False):
    """The time that one rank took in one place beyond the other ranks, step by step.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules;
            `layers.*.mlp` means several modules together.
        phase: One of `PHASES`, or `data`, `transfer`, `clip`, `validation` or `checkpoint`. `all`
            means everything that the rank's device does, `stage` means the rank's part of a
            pipeline, and `PREEMPTED` means the time in which the rank's thread waited for a core.
        modules: Number of modules that `module` stands for.
        intervals: The numbers of the intervals between collectives that contain the place.
        seconds: Median time of the rank.
        usual: Median time of the other ranks.
        excess: Seconds of the rank beyond the median of the other ranks, in each compared step;
            negative if the rank was faster.
        late: Seconds by which the rank was late to the next collective, beyond the median of the
            other ranks, in each compared step.
        noise: Standard deviation of the other ranks' median excesses; `None` if there are too few
            ranks.
        largest_of_others: The largest excesses of other ranks in any step, largest first.
        begins_collective: Whether a collective begins in the place and is awaited in another place,
            as under DDP.
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
    """A wait for another rank in a place where a collective is awaited.

    Attributes:
        for_rank: The rank that the other ranks wait for longest.
        ranks: Number of ranks other than `for_rank`.
        seconds: Mean waiting time per step of the median rank. With 5 or more steps, the longest
            wait is replaced by the second longest.
        longest: Mean waiting time of the rank that waits longest.
        traced_seconds: Waiting time of the median rank from the traced collectives; `None` unless
            all ranks were traced.
        transfer_seconds: The shortest time that any rank spent in the traced collectives; `None`
            unless all ranks were traced.
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
    """The activity of a late rank's process, minus the median of the other ranks.

    The figures are means over the steps, weighted by the lateness of the rank.

    Attributes:
        late: Seconds by which the rank was late.
        waited: Seconds in which the training thread was ready to run while another thread had its
            core.
        other_threads: CPU seconds in the other threads of the process.
        units_ratio: Number of tokens, or samples, in the rank's batches, divided by the number in
            the batches of the other ranks.
    """

    rank: Count
    late: Seconds
    waited: float | None = None
    other_threads: float | None = None
    units_ratio: Seconds | None = None


class FlaggedRank(Struct, frozen=True, kw_only=True, gc=False):
    """A straggler that was logged during the run.

    Attributes:
        module: See `RankDelay`.
        phase: See `RankDelay`.
        modules: Number of modules that `module` stands for.
        seconds_lost: Mean cost per step in the steps that were compared at that time.
        pattern: `steady` or `intermittent`.
        slow_steps: Number of steps in which the rank was slow.
        steps: Number of steps that were compared.
        seconds: Median time of the rank.
        usual: Median time of the other ranks.
        first_step: The index of the first compared step, or of the first slow step if the rank
            became slow during the run.
        last_step: The index of the last compared step.
        cause: The reason why the rank was slow; `None` if unknown.
        work_ratio: Ratio of the rank's work to the work of the other ranks; `None` unless more work
            was the cause.
    """

    module: str
    phase: str
    modules: Count
    rank: Count
    seconds_lost: Seconds
    pattern: Literal["steady", "intermittent"]
    slow_steps: Count
    steps: Count
    seconds: Seconds
    usual: Seconds
    first_step: Count
    last_step: Count
    cause: str | None = None
    work_ratio: Seconds | None = None


LARGE_EXCESS_RATIO = 2**-0.5
"""Ratio of each size in `RankComparison.large_excesses` to the previous size."""


class RankComparison(Struct, frozen=True, kw_only=True):
    """The delays of ranks in the same steps.

    Ranks are compared by module in module-timing steps, and by phase in unprofiled steps.
    `usual_lost_seconds` and all fields after it are only known for unprofiled steps.

    Attributes:
        steps: Number of steps.
        seconds: Time of the median step.
        lost_seconds: Seconds by which a step would be shorter if the last rank joined each
            collective with the median rank; `None` if unknown.
        delays: The delays, the most expensive first.
        waits: The places where ranks wait for another rank, the longest wait first.
        large_excesses: How often a rank took longer in a place than the other ranks by at least 1,
            1/√2, 1/2, … of a step. Shows which excesses occur by chance.
        large_excess_seconds: Total time, over all ranks and steps, in the places where large
            excesses were counted.
        places: Number of places where large excesses were counted.
        from_quartiles: Whether the three "steps" are quartiles, because the times of single steps
            are unknown.
        usual_lost_seconds: Like `lost_seconds`, but for the median step, which rare delays do not
            change.
        at: The index of each step.
        awaited: The phases in which ranks wait for each other; `wait` is the end of backward. These
            phases are not used to judge a rank.
        activity: The activity of the late ranks' processes.
        waited: Mean seconds over ranks and steps in which a rank's thread waited for a core.
        lengths_explain: Correlation between the lateness of a rank and the size of its batch, both
            relative to the other ranks.
        excludes_waits: Whether the phases are compared without the time in which a rank's thread
            waited for a core, which is a separate delay with the phase `PREEMPTED`.
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
    flagged: tuple[FlaggedRank, ...] = ()

    @property
    def compares_phases(self) -> bool:
        """Return whether whole phases of unprofiled steps are compared."""
        return bool(self.at)


class RankStat(Struct, frozen=True, kw_only=True, gc=False):
    """The median times of ranks in a module, or in a phase outside modules.

    Attributes:
        module: Name of the module. `""` means the root and everything outside modules.
        phase: One of `PHASES`, `data`, `transfer`, `clip`, `sync`.
        low: Time of the fastest rank.
        median: Time of the median rank. For an even number of ranks, the lower of the two middle
            times.
        high: Time of the slowest rank.
        high_rank: The slowest rank. It may wait for other ranks; see `waits`.
        waits: Whether ranks wait for each other in this place. If so, the times include the
            waiting.
        by_rank: The seconds of each rank that reported them, for the 32 entries with the largest
            differences. `None` for all other entries, so that a profile does not grow with modules
            x ranks.
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
        """Seconds from the median rank to the slowest rank."""
        return self.high - self.median

"""The records of a run: its traces and ranks, and the phases and units that all parts of a profile share.

Steps are in `steps.py`.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import Meta, Struct, json
from msgspec.structs import replace

Phase = Literal["forward", "backward", "recompute", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer", "other")
PASSES: Mapping[str, tuple[Phase, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
}
"""The phases whose work is done in each pass over the model."""
# the phases of all passes
PASS_PHASES = PHASES[:3]


def ready_for_threads(*kinds: Any) -> None:
    """Work out how these types are decoded.

    Where two threads are the first to decode one, msgspec crashes.
    """
    for kind in kinds:
        json.Decoder(kind)


def step_phase(phase: str) -> str:
    """The phase of a step that a phase of the count runs in."""
    return "backward" if phase == "recompute" else phase


class ModulePhase(NamedTuple):
    """A row of modules in one phase, as a key: `ModulePhase("encoder.layers.0", "forward")`.

    Where ranks are compared, also a phase of the step outside of modules: `ModulePhase("",
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
        """The error of the median in seconds, as `analyze.compare.significance` explains it.

        `None` where fewer than two were timed.
        """
        return (
            None if self.n < 2 else 0.93 * (self.high - self.low) * math.sqrt(self.n) / (self.n - 1)
        )

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The spread of measured seconds.

        `None` where there are none. A negative difference, which is noise, counts as 0.
        """
        seconds = [max(value, 0.0) for value in values]
        if not seconds:
            return None
        low, median, high = (
            statistics.quantiles(seconds, n=4, method="inclusive")
            if len(seconds) > 1
            else seconds * 3
        )
        return cls(median=median, low=low, high=high, n=len(seconds))

    def shifted(self, seconds: float) -> Self:
        """All of it so much later; never below nothing."""
        return replace(
            self,
            **{name: max(getattr(self, name) + seconds, 0.0) for name in ("median", "low", "high")},
        )

    def times(self, factor: float) -> Self:
        """All of it so many times as long."""
        return replace(
            self, median=self.median * factor, low=self.low * factor, high=self.high * factor
        )


class ByCategory(NamedTuple):
    """Bytes alive at one time, by the final use of each tensor.

    A gradient is in `gradients` as soon as backward has made it.

    Attributes:
        activations: Made in forward, saved for backward or not.
        temporary: Made in backward or in an optimizer's step, and neither gradient nor state.
        other: Made before the step and no parameter, such as the batch and buffers; or made outside
            of the model's phases.
    """

    parameters: Count
    gradients: Count
    optimizer_state: Count
    activations: Count
    temporary: Count
    other: Count


CATEGORIES = ByCategory._fields


class TracedOperator(Struct, frozen=True, kw_only=True):
    """An operator's times in the traces, inclusive and its own."""

    name: str
    calls: Count
    host_seconds: Seconds
    self_host_seconds: Seconds
    device_seconds: Seconds
    self_device_seconds: Seconds


class Call(NamedTuple):
    """A module or a user's scope from entry to exit; in backward, consecutive nodes of one row."""

    fqn: str
    phase: Phase
    # nanoseconds since 1970, as `end`
    start: int
    end: int
    # nanoseconds of the kernels launched inside it; 0 without a device
    device: int
    # whether no other call is inside it
    innermost: bool
    # the number of its thread; 0 is the training thread
    thread: int


class CompiledKernel(Struct, frozen=True, kw_only=True, gc=False):
    """A kernel of compiled code in one module and phase.

    A kernel that was fused of several modules has a row in each of them.

    Attributes:
        name: In generated code, as `cpp_fused_gelu_1` or `extern_kernels.mm`.
        modules: How many modules it computes for. Above 1 its time and bytes are divided over them,
            by the bytes that their nodes move.
        calls: In which the module has a part.
        host_seconds: From the end of the kernel before it to its own end.
        device_seconds: `None` if no device was recorded.
        bytes_moved: What the fused kernel reads and writes, as the compiler counts it.
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
        """Its seconds on the side that compiled code was timed on.

        The host's where no device was recorded.
        """
        return (
            self.host_seconds
            if side == "host" or self.device_seconds is None
            else self.device_seconds
        )


class CompiledCode(Struct, frozen=True, kw_only=True):
    """What ran inside of compiled graphs in the traced steps.

    Attributes:
        graphs: How many different ones ran.
        unrecorded_graphs: Those of them whose modules are unknown.
        regions: How often one ran.
        timed_on: What the seconds are of: the device, if it was recorded, else the host.
        seconds: In all regions; they are the kernels' and the unassigned ones.
        unassigned_seconds: Of no known module.
        divided_seconds: In kernels that were fused of several modules.
        kernels: Those with the most time first.
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
        files: By rank.
        batches: The number of recorded batches. All figures below are sums over them.
        device_idle_seconds: Idle time between the device's first and last work; `None` if the
            device recorded none. Idle, exposed and compute seconds are disjoint.
        exposed_comm_seconds: The device communicated and computed nothing.
        exposed_copy_seconds: The device copied and did nothing else.
        device_compute_seconds: The device ran a kernel other than communication.
        operators: The operators with the most own time, on the device or on the host.
        compiled: What ran inside of compiled graphs, by module; `None` if that was not asked for,
            or nothing is compiled.
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
        """The operators, sorted by own time."""
        return sorted(
            self.operators,
            key=lambda each: each.self_device_seconds if on_device else each.self_host_seconds,
            reverse=True,
        )

    def per_batch(self, figure: float) -> float | None:
        """The mean over the recorded batches; `None` where their number is unknown."""
        return figure / self.batches if self.batches else None


class Rank(Struct, frozen=True, kw_only=True, gc=False):
    """One rank of the run, also one that did not report.

    Attributes:
        device: The name of its chip.
        step: A clean step's time. Ranks that wait for each other take equally long.
        data: Its wait for data.
        slowest: In how many of the compared steps it was busy the longest, waiting left out.
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


class RankDelay(Struct, frozen=True, kw_only=True, gc=False):
    """What one rank took for something beyond the other ranks, step by step.

    Attributes:
        module: `""` is the root, and what is in no module; `layers.*.mlp` is several modules
            together.
        phase: One of `PHASES`, `data`, `transfer`, `clip`; `all` is everything that the rank's
            device does.
        modules: The number of modules.
        intervals: Between which collectives it is, by number.
        seconds: The rank's median.
        usual: The others'.
        excess: The rank's seconds beyond the median of the other ranks, in each compared step;
            negative where it was faster.
        late: How late the rank came to the next collective in each of these steps, in seconds
            beyond the median of the others.
        noise: The standard deviation of the others' medians from rank to rank; `None` where they
            are too few.
        largest_of_others: The largest excesses of other ranks in any step, in falling order.
        begins_collective: Whether a collective begins in it that is awaited elsewhere, as those of
            DDP.
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
    """Waiting for another rank where a collective is awaited.

    Attributes:
        for_rank: The rank that is waited for most.
        ranks: How many others there are.
        seconds: The median one's waiting, the mean over the steps. From 5 steps on the longest
            counts as the second longest.
        longest: That of the rank that waits longest.
        traced_seconds: The same from the collectives in the traces of all ranks; `None` where there
            are none.
        transfer_seconds: The least time that any of these ranks spent in the collectives; `None` as
            above.
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
    """What the system tells of a late rank beyond the median of the others.

    Means over the steps, weighted by how late it was in them.

    Attributes:
        late: Seconds.
        waited: Seconds in which its thread was ready to run and the system had given its core to
            another one.
        waited_by_part: The same in each eighth of the steps, each step with the same weight; `()`
            of few steps.
        other_threads: Seconds of the CPU in other threads of its process.
        units_ratio: Tokens of its batches, or samples, to those of the others.
    """

    rank: Count
    late: Seconds
    waited: float | None = None
    other_threads: float | None = None
    units_ratio: Seconds | None = None
    waited_by_part: tuple[float, ...] = ()


# ratio of each size in `RankComparison.jolts` to the size before it
JOLT_RATIO = 2**-0.5


class RankComparison(Struct, frozen=True, kw_only=True):
    """What ranks took in the same steps, as far as one of them was late.

    In the hooked steps by module, or in the clean steps by phase.

    Attributes:
        steps: The number of steps.
        seconds: The median step's.
        lost_seconds: What a step would be shorter by if the last rank came to each collective with
            the median one; `None` is unknown.
        jolts: How often any rank took longer anywhere than the others by 1, 1/√2, 1/2, … of a step:
            what happens by chance.
        jolted_seconds: The time of all ranks in all steps in which these were counted.
        places: The number of places in which they were.
        from_quartiles: Whether single steps are unknown: then the three "steps" are the quartiles.
        usual_lost_seconds: Of clean steps the same of the median step, which rare delays do not
            change.
        at: Of clean steps the number of each.
        awaited: Of clean steps the phases in which ranks wait for each other: no rank is judged by
            them; `wait` is the end of backward.
        activity: Of clean steps what else is known of the late ranks.
        waited: Of clean steps the seconds in which a rank's thread waited for a core, the mean over
            ranks and steps.
        lengths_explain: Of clean steps the correlation of lateness with how much more a rank's
            batch has than the others'.
    """

    steps: Count
    seconds: Seconds
    lost_seconds: Seconds | None
    excesses: tuple[RankDelay, ...]
    waits: tuple[RankWait, ...]
    jolts: tuple[Count, ...] = ()
    jolted_seconds: Seconds = 0.0
    places: Count = 0
    from_quartiles: bool = False
    usual_lost_seconds: Seconds | None = None
    at: tuple[Count, ...] = ()
    awaited: tuple[str, ...] = ()
    activity: tuple[RankActivity, ...] = ()
    waited: Seconds | None = None
    lengths_explain: float | None = None


class RankStat(Struct, frozen=True, kw_only=True, gc=False):
    """The time of a module, or of a phase outside of modules, over the ranks.

    The median of each rank.

    Attributes:
        module: `""` is the root, and what is in no module.
        phase: One of `PHASES`, `data`, `transfer`, `clip`, `sync`.
        median: The median rank's; of an even number of ranks the lower median.
        high_rank: The rank with the longest time. It may wait for others in it, see `waits`.
        waits: Whether ranks wait for each other in it. The times include the waiting.
        by_rank: The seconds of each rank that reported them, for the 32 entries that differ most;
            `None` for all others, so that a profile does not grow with modules x ranks.
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
        """Seconds from the median rank to the slowest one."""
        return self.high - self.median

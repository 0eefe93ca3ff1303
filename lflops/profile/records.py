"""What only watching a run tells: its steps, its traces, its ranks; and the phases and units that every part of a profile shares."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, Self

from msgspec import Meta, Struct

__all__ = [
    "CATEGORIES",
    "PHASES",
    "ByCategory",
    "Call",
    "Count",
    "Phase",
    "Rank",
    "RankStat",
    "Seconds",
    "Spread",
    "Step",
    "Trace",
    "TracedOperator",
]

Phase = Literal["forward", "backward", "recompute", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer", "other")

DISTURBANCES = frozenset({"cold", "recompiled", "new_shapes", "validation", "checkpoint", "background"})
"""Marks of steps whose time is no measure of the others'."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Spread(Struct, frozen=True, kw_only=True, gc=False):
    """Seconds over several steps: the median and the quartiles around it."""

    median: Seconds
    low: Seconds
    high: Seconds
    n: Count

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The spread of measured seconds; `None` where there are none. A difference that noise made negative counts as nothing."""
        seconds = [max(value, 0.0) for value in values]
        if not seconds:
            return None
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return cls(median=median, low=low, high=high, n=len(seconds))


class ByCategory(NamedTuple):
    """Bytes alive at one time, by what they turned out to be for: a gradient is one from the moment that backward makes it.

    Attributes:
        activations: What forward made, whether it is kept for backward or not.
        temporary: What backward or an optimizer's step made, and that became neither a gradient nor state.
        other: What was there before and is no parameter, as the batch and buffers, and what ran in no phase of the model.
    """

    parameters: Count
    gradients: Count
    optimizer_state: Count
    activations: Count
    temporary: Count
    other: Count


CATEGORIES = ByCategory._fields


class Step(Struct, frozen=True, kw_only=True):
    """One optimizer step as the clock saw it.

    Attributes:
        kind: `clean` had nothing of ours in it; `counted` ran under the count, `hooked` had its modules timed, `traced` was recorded.
        phases: Seconds of each phase, which add up to the step: stream time on CUDA, host time on a CPU.
        host_phases: On CUDA, the seconds that the host was in each of them.
        marks: What else happened in it: `cold`, `recompiled`, `new_shapes`, `validation`, `checkpoint`, `background`, `no_update`.
    """

    index: Count
    kind: Literal["clean", "counted", "hooked", "traced"]
    seconds: Seconds | None
    phases: Mapping[str, Seconds]
    host_phases: Mapping[str, Seconds] = {}
    cpu_user: Seconds | None = None
    cpu_system: Seconds | None = None
    samples: Count | None = None
    tokens: Count | None = None
    marks: tuple[str, ...] = ()

    @property
    def is_typical(self) -> bool:
        """Whether nobody was in its way: a clean step in which nothing was cold or compiled anew, no shapes new, no validation awaited."""
        return self.kind == "clean" and DISTURBANCES.isdisjoint(self.marks)


class TracedOperator(Struct, frozen=True, kw_only=True):
    """An operator's times in the traces, inclusive and its own."""

    name: str
    calls: Count
    host_seconds: Seconds
    own_host_seconds: Seconds
    device_seconds: Seconds
    own_device_seconds: Seconds


class Call(NamedTuple):
    """A module, or a named part, from when it was entered to when it was left; in backward, nodes of one row that ran in a row.

    Attributes:
        start: Nanoseconds since 1970, as `end`.
        device: Nanoseconds of what it had the device do, with all that it called; 0 where there is no device.
        innermost: Whether it called no other.
        thread: Which of the threads it ran on, counted from 0; 0 is the training's.
    """

    row: str
    phase: Phase
    start: int
    end: int
    device: int
    innermost: bool
    thread: int


class Trace(Struct, frozen=True, kw_only=True):
    """What the recorded steps showed, and where their files are.

    Attributes:
        files: By rank.
        batches: How many were recorded; the figures below are of all of them together.
        device_idle_seconds: Between the device's first and last work; `None` where none was recorded. It, the exposed seconds and those of
            computing are disjoint.
        device_idle_by_phase: The same by the phase that the host was in meanwhile; `other` is none of a module's.
        exposed_comm_seconds: In which the device communicated and computed nothing.
        exposed_copy_seconds: In which it only copied.
        device_compute_seconds: In which it ran a kernel that was no communication.
        operators: Those with the most time of their own, on the device or on the host.
    """

    files: Mapping[str, str]
    batches: Count | None = None
    device_idle_seconds: Seconds | None = None
    exposed_comm_seconds: Seconds | None = None
    exposed_copy_seconds: Seconds | None = None
    device_compute_seconds: Seconds | None = None
    device_idle_by_phase: Mapping[str, Seconds] | None = None
    operators: tuple[TracedOperator, ...] = ()


class Rank(Struct, frozen=True, kw_only=True):
    """One rank of the run, also one that did not answer."""

    rank: Count
    node: str | None
    host: str | None
    device: str | None
    coordinates: Mapping[str, Count]
    status: Literal["ok", "late", "missing", "failed"]
    step: Spread | None = None
    data: Spread | None = None
    cpu: Spread | None = None
    macs: Count | None = None
    peak_bytes: Count | None = None
    slowest: Count | None = None


class RankStat(Struct, frozen=True, kw_only=True, gc=False):
    """A module's own time in one phase over the ranks: of each its median step, without what is known to be waiting for others.

    Attributes:
        median: That of the rank in the middle, of an even number the faster of the two: of two ranks it is the other one's.
        high_rank: The rank that is slow.
        slowest_steps: In how many of `steps`, which all of the ranks tell of, it was the slowest.
        lost_seconds: The mean over these of the slowest rank's time less the median one's.
        waiting: What of it is waiting inside of collectives: `none`, as none ran in it; `left_out`; or `unknown`.
        by_rank: The seconds of each rank that has told them, of the 32 places that lose the most; of all others `None`, so that a profile
            grows with its modules and its ranks, and not with their product.
    """

    module: str
    phase: Phase
    low: Seconds
    median: Seconds
    high: Seconds
    high_rank: Count
    slowest_steps: Count | None = None
    steps: Count | None = None
    lost_seconds: Seconds | None = None
    waiting: Literal["none", "left_out", "unknown"] = "unknown"
    by_rank: Mapping[Count, Seconds] | None = None

    @property
    def seconds_lost(self) -> float:
        """What the slow rank costs a step; where single steps are not known, by the medians."""
        return self.high - self.median if self.lost_seconds is None else self.lost_seconds

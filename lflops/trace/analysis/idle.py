"""Why a device was idle, from what the host did meanwhile.

How long launches took to arrive; how much work was queued.

Each idle stretch ends with a piece of work. The thread that launched that work decides what the
stretch was lost to:

    device   ▇▇▇▇ kernel │            idle                 │ ▇▇▇ next kernel
    host                 │ Python │ operator │ launch call │
    lost to              │ python │ operators│ launching   │ launch_latency (from the call's end to the kernel's start)
"""

import functools
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from msgspec import Struct

from lflops.intervals import Intervals, joined, shares
from lflops.trace.recorded import DeviceEvent, RecordedTrace, RuntimeCall

Cause = Literal[
    # the thread was inside the data loader
    "data_loader",
    # it waited for the device, or had just been woken
    "synchronising",
    # it asked the driver for memory, or gave it back
    "allocating",
    # it was in another call of the device's library
    "launching",
    # it was in an operator, and in no such call
    "operators",
    # in none of these
    "python",
    # the next work was launched after the idle time began, and had not started yet
    "launch_latency",
    # it had been launched before the device became idle: the device's own gap, or a wait for
    # another stream
    "queued",
    # the trace does not tell what launched the next work
    "not_recorded",
]
"""What an idle moment is lost to."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

_AT: tuple[Cause, ...] = (
    "synchronising",
    "data_loader",
    "allocating",
    "launching",
    "operators",
    "python",
)
"""What a thread is at; a moment belongs to the first that it is at."""

_SYNCHRONISING = ("Synchronize", "EventQuery", "StreamQuery")
_BLOCKING_COPIES = frozenset(
    {"cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH_v2", "hipMemcpy", "hipMemcpyWithStream"}
)
_ALLOCATING = (
    "Malloc",
    "Free",
    "HostAlloc",
    "MemCreate",
    "MemMap",
    "MemUnmap",
    "MemAddressReserve",
    "MemSetAccess",
    "HostRegister",
)
_LOADERS = (
    "enumerate(DataLoader)#",
    "enumerate(DataPipe)#",
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
    "dataloader",
)


class LaunchDelays(Struct, frozen=True, kw_only=True):
    """From the beginning of launch calls to the beginning of their work, of all work with a recorded launch; in nanoseconds.

    `shorter_than_launch` kernels ran shorter than the call that launched them took.
    """

    calls: int
    median: int
    high: int
    longest: int
    call_median: int
    shorter_than_launch: int


class QueueDepth(Struct, frozen=True, kw_only=True):
    """Work that had been launched and had not started, over the window by time.

    For `empty` nanoseconds there was none.
    """

    mean: float
    largest: int
    empty: int


_Launch = Callable[[DeviceEvent], RuntimeCall | None]


def idle_by_cause(
    idle: Intervals, work: Sequence[DeviceEvent], launch_of: _Launch, trace: RecordedTrace
) -> dict[Cause, int]:
    """Nanoseconds of one device's idle stretches by cause; together they are all of the idle time."""
    # `work` is of the same device, and sorted by start as the stretches are; `launch_of` has the
    # call that launched a piece of it.
    causes: Counter[Cause] = Counter()
    pieces: defaultdict[int, Intervals] = defaultdict(list)
    starts = [each.start for each in work]
    for start, end in idle:
        place = bisect_left(starts, end)
        launch = launch_of(work[place]) if place < len(work) else None
        if launch is None:
            causes["not_recorded"] += end - start
            continue
        began, ended = min(max(launch.start, start), end), min(max(launch.end, start), end)
        causes["queued" if ended == start else "launch_latency"] += end - ended
        causes["launching"] += ended - began
        if began > start:
            pieces[launch.thread].append((start, began))
    activities = _activities(trace, pieces)
    for thread, found in pieces.items():
        for cause, took in zip(_AT, shares(found, *activities[thread]), strict=True):
            causes[cause] += took
    return {cause: causes[cause] for cause in CAUSES if causes[cause]}


def _activities(trace: RecordedTrace, threads: Iterable[int]) -> Mapping[int, list[Intervals]]:
    """When each thread was at what, in the order of `_AT`; `python` is all other time."""
    wanted = set(threads)
    found: dict[Cause, defaultdict[int, Intervals]] = {cause: defaultdict(list) for cause in CAUSES}
    for call in trace.runtime:
        if call.thread in wanted:
            found[_cause(call.name)][call.thread].append((call.start, call.end))
    for operator in trace.operators:
        if operator.thread in wanted:
            cause: Cause = "data_loader" if operator.name.startswith(_LOADERS) else "operators"
            found[cause][operator.thread].append((operator.start, operator.end))
    for span in trace.spans:
        if span.thread in wanted and span.name.startswith(_LOADERS):
            found["data_loader"][span.thread].append((span.start, span.end))
    return {thread: [joined(found[cause][thread]) for cause in _AT[:-1]] for thread in wanted}


@functools.lru_cache(1 << 12)
def _cause(call: str) -> Cause:
    if call in _BLOCKING_COPIES or any(part in call for part in _SYNCHRONISING):
        return "synchronising"
    return "allocating" if any(part in call for part in _ALLOCATING) else "launching"


def launch_delays(work: Iterable[DeviceEvent], launch_of: _Launch) -> LaunchDelays | None:
    """How long launches took.

    `None` where none was recorded. A graph is launched once, so only its first work counts.
    """
    first: dict[int, tuple[RuntimeCall, DeviceEvent]] = {}
    for each in work:
        launch = launch_of(each)
        if launch is not None and (
            each.correlation not in first or each.start < first[each.correlation][1].start
        ):
            first[each.correlation] = launch, each
    if not first:
        return None
    delays = sorted(max(each.start - launch.start, 0) for launch, each in first.values())
    high = (
        statistics.quantiles(delays, n=10, method="inclusive")[-1] if len(delays) > 1 else delays[0]
    )
    return LaunchDelays(
        calls=len(delays),
        median=round(statistics.median(delays)),
        high=round(high),
        longest=delays[-1],
        call_median=round(
            statistics.median(launch.end - launch.start for launch, _ in first.values())
        ),
        shorter_than_launch=sum(
            each.kind == "kernel" and each.end - each.start < launch.end - launch.start
            for launch, each in first.values()
        ),
    )


def queue_depth(
    work: Iterable[DeviceEvent], launch_of: _Launch, start: int, end: int
) -> QueueDepth | None:
    """How much work waited between two moments; `None` where no launch was recorded."""
    changes: list[tuple[int, int]] = []
    for each in work:
        launch = launch_of(each)
        if launch is not None and launch.start < each.start:
            changes += [(max(launch.start, start), 1), (each.start, -1)]
    if not changes or end <= start:
        return None
    depth = largest = weighted = empty = 0
    at = start
    for moment, change in sorted(changes):
        passed = min(max(moment, start), end) - at
        weighted += depth * passed
        empty += passed if depth == 0 else 0
        at += passed
        depth += change
        largest = max(largest, depth)
    empty += end - at if depth == 0 else 0
    return QueueDepth(mean=weighted / (end - start), largest=largest, empty=empty)

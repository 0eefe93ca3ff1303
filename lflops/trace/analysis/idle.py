"""Find the causes of a device's idle time, the delays of launches, and the launch queue's depth.

Each interval of idle time ends when the next kernel, copy or fill begins. The cause of the idle
time is what the thread that launches this next work does in the interval:

    device   ▇▇▇▇ kernel │               idle                              │ ▇▇▇ next kernel
    host                 │ Python │ operator  │ launch call │
    cause                │ python │ operators │ launching   │ launch_latency

`launch_latency` lasts from the end of the call to the start of the kernel.
"""

import functools
import re
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from lflops.intervals import Intervals, lengths_inside
from lflops.trace.recorded import DeviceEvent, HostItem, RecordedTrace, RuntimeCall, covered

Cause = Literal[
    "data_loader",
    "synchronising",
    "allocating",
    "launching",
    "operators",
    "python",
    "launch_latency",
    "queued",
    "not_recorded",
]
"""Cause of a device's idle time.

"The thread" is the thread that launched the next work of the device.

* `data_loader`: The thread was inside the data loader.
* `synchronising`: The thread was in a call that waits for the device, or queries its state.
* `allocating`: The thread requested or released device memory.
* `launching`: The thread was in another call of the device's runtime.
* `operators`: The thread was in an operator, outside calls of the device's runtime.
* `python`: The thread did none of the above.
* `launch_latency`: The next work was launched after the idle time began, and had not started yet.
* `queued`: The next work had been launched before the idle time began. Either the device did not
  start it at once, or the work waited for another stream.
* `not_recorded`: The trace does not show what launched the next work.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)

_ACTIVITIES: tuple[Cause, ...] = (
    "synchronising",
    "data_loader",
    "allocating",
    "launching",
    "operators",
)
"""Causes of idle time that are activities of a thread, in order of precedence.

If the thread does several of these things at the same moment, the moment counts for the first of
them. If it does none of them, the moment counts for `python`.
"""

_SYNCHRONISING = re.compile("Synchronize|EventQuery|StreamQuery")
_BLOCKING_COPIES = frozenset(
    {"cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH_v2", "hipMemcpy", "hipMemcpyWithStream"}
)
_ALLOCATING = re.compile(
    "Malloc|Free|HostAlloc|MemCreate|MemMap|MemUnmap|MemAddressReserve|MemSetAccess|HostRegister"
)
_LOADERS = (
    "enumerate(DataLoader)#",
    "enumerate(DataPipe)#",
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
    "dataloader",
)


class LaunchDelays(Struct, frozen=True, kw_only=True):
    """Delays from the start of a launch call to the start of the launched work, in nanoseconds.

    Attributes:
        calls: Number of launches.
        high: 90th percentile of the delays.
        call_median: Median duration of the launch calls.
        shorter_than_launch: Number of kernels that were shorter than their launch call.
    """

    calls: int
    median: int
    high: int
    longest: int
    call_median: int
    shorter_than_launch: int


class QueueDepth(Struct, frozen=True, kw_only=True):
    """Depth of the launch queue: the number of launches whose work has not started yet.

    Attributes:
        mean: Mean depth over the analyzed time.
        largest: Largest depth.
        empty: Nanoseconds in which the depth is 0.
    """

    mean: float
    largest: int
    empty: int


_LaunchOf = Callable[[DeviceEvent], RuntimeCall | None]


def idle_by_cause(
    idle: Intervals, work: Sequence[DeviceEvent], launch_of: _LaunchOf, trace: RecordedTrace
) -> dict[Cause, int]:
    """Return the nanoseconds of a device's idle time that each cause accounts for.

    Args:
        idle: Idle intervals of the device, sorted by start.
        work: Work of the device, sorted by start.
        launch_of: Function that returns the runtime call that launched a piece of work.
        trace: The trace, with the activities of the host.
    """
    causes: Counter[Cause] = Counter()
    before_launch: defaultdict[int, Intervals] = defaultdict(list)
    starts = [each.start for each in work]
    for start, end in idle:
        place = bisect_left(starts, end)
        launch = None
        if place < len(work):
            launch = launch_of(work[place])
        if launch is None:
            causes["not_recorded"] += end - start
            continue
        call_start = min(max(launch.start, start), end)
        call_end = min(max(launch.end, start), end)
        was_launched_before = call_end == start
        causes["queued" if was_launched_before else "launch_latency"] += end - call_end
        causes["launching"] += call_end - call_start
        if call_start > start:
            before_launch[launch.thread].append((start, call_start))
    activities = _activities(trace, before_launch.keys())
    for thread, intervals in before_launch.items():
        times = lengths_inside(intervals, *activities[thread])
        for cause, took in zip((*_ACTIVITIES, "python"), times, strict=True):
            causes[cause] += took
    return in_order_of_causes(causes)


def in_order_of_causes(times: Counter[Cause]) -> dict[Cause, int]:
    """Return idle times in the order of `CAUSES`, leaving out causes without idle time."""
    return {cause: times[cause] for cause in CAUSES if times[cause]}


def _activities(
    trace: RecordedTrace, threads: Collection[int]
) -> Mapping[int, Sequence[Intervals]]:
    """Return, for each thread, the intervals of each activity, in the order of `_ACTIVITIES`."""
    items: defaultdict[tuple[int, Cause], list[HostItem]] = defaultdict(list)
    for call in trace.runtime:
        if call.thread in threads:
            items[call.thread, _cause_of_call(call.name)].append(call)
    for operator in trace.operators:
        if operator.thread in threads:
            cause: Cause = "data_loader" if operator.name.startswith(_LOADERS) else "operators"
            items[operator.thread, cause].append(operator)
    for span in trace.spans:
        if span.thread in threads and span.name.startswith(_LOADERS):
            items[span.thread, "data_loader"].append(span)
    activities: defaultdict[int, list[Intervals]] = defaultdict(list)
    for thread in threads:
        for activity in _ACTIVITIES:
            activities[thread].append(covered(items[thread, activity]))
    return activities


@functools.lru_cache(1 << 12)
def _cause_of_call(name: str) -> Cause:
    if name in _BLOCKING_COPIES or _SYNCHRONISING.search(name):
        return "synchronising"
    if _ALLOCATING.search(name):
        return "allocating"
    return "launching"


class _Launched(NamedTuple):
    call: RuntimeCall
    work: DeviceEvent


def launch_delays(work: Iterable[DeviceEvent], launch_of: _LaunchOf) -> LaunchDelays | None:
    """Return statistics of the launch delays, or `None` if no launch was recorded.

    One launch of a CUDA graph starts many kernels, so only the first kernel of the graph counts.
    """
    first: dict[int, _Launched] = {}
    for each in work:
        call = launch_of(each)
        if call is None:
            continue
        known = first.get(each.correlation)
        if known is None or each.start < known.work.start:
            first[each.correlation] = _Launched(call, each)
    if not first:
        return None
    delays = []
    call_durations = []
    shorter_than_launch = 0
    for call, work_of_call in first.values():
        delays.append(max(work_of_call.start - call.start, 0))
        call_durations.append(call.duration)
        if work_of_call.kind == "kernel" and work_of_call.duration < call.duration:
            shorter_than_launch += 1
    delays.sort()
    high: float = delays[0]
    if len(delays) > 1:
        high = statistics.quantiles(delays, n=10, method="inclusive")[-1]
    return LaunchDelays(
        calls=len(delays),
        median=round(statistics.median(delays)),
        high=round(high),
        longest=delays[-1],
        call_median=round(statistics.median(call_durations)),
        shorter_than_launch=shorter_than_launch,
    )


def queue_depth(
    work: Iterable[DeviceEvent], launch_of: _LaunchOf, start: int, end: int
) -> QueueDepth | None:
    """Return the launch queue's depth from `start` to `end`; `None` without recorded launches."""
    changes: list[tuple[int, int]] = []
    for each in work:
        launch = launch_of(each)
        if launch is not None and launch.start < each.start:
            changes.append((max(launch.start, start), 1))
            changes.append((each.start, -1))
    if not changes or end <= start:
        return None
    depth = 0
    largest = 0
    depth_time = 0
    empty = 0
    now = start
    # The queue is empty after the last change. The final change of 0 adds that time.
    for moment, change in [*sorted(changes), (end, 0)]:
        passed = min(max(moment, start), end) - now
        depth_time += depth * passed
        if depth == 0:
            empty += passed
        now += passed
        depth += change
        largest = max(largest, depth)
    return QueueDepth(mean=depth_time / (end - start), largest=largest, empty=empty)

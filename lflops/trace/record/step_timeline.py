"""Compute the timelines of traced steps, the device states, and the times of collectives.

A timeline shows the calls of modules, the operators and the kernels of a step. They are drawn on
lanes, its horizontal tracks. A device state is, for example, computing or idle;
`trace/device_states.py` defines the states.
"""

import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec.structs import asdict

from lflops.intervals import Intervals, joined, length, lengths_inside, outside
from lflops.profile.collective_names import collective_kind
from lflops.profile.records import Call
from lflops.profile.timeline import (
    ModuleSlice,
    SelfTime,
    StepTimeline,
    TimedWork,
    longest,
    median_first,
    nested,
)
from lflops.trace.device_states import Timeline, communicates, states, timeline
from lflops.trace.record.events import LAUNCHES, Communicated, steps_of
from lflops.trace.recorded import (
    NODE,
    DeviceEvent,
    HostItem,
    OperatorCall,
    RecordedTrace,
    covered,
    extent,
    outer_first,
)

_NO_PHASE = frozenset({"other", ""})
"""Phases that a timeline does not show."""

PhaseMark = tuple[int, str]
"""The time of a phase change in nanoseconds since 1970, and the phase that begins."""


class _Step(NamedTuple):
    """A complete step.

    Attributes:
        number: Index of the step.
        begin: Start in nanoseconds since 1970.
        end: End in nanoseconds since 1970.
        thread: The training thread.
    """

    number: int
    begin: int
    end: int
    thread: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def contains(self, moment: int) -> bool:
        return self.begin <= moment < self.end

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return start and end relative to the start of the step, cut off at the step's borders."""
        return max(start, self.begin) - self.begin, min(end, self.end) - self.begin


def timelines_of(
    trace: RecordedTrace,
    calls: Sequence[Call],
    ends: Sequence[bool],
    marks: Sequence[PhaseMark] = (),
) -> Iterator[StepTimeline]:
    """Yield the timeline of each complete step. The step whose duration is the median comes first.

    Args:
        trace: The trace.
        calls: Calls of modules and scopes.
        ends: For each batch, whether it is the last batch of a step.
        marks: The phase changes of all steps, in order.
    """
    steps = list(_steps(trace, ends))
    if not steps:
        return
    operators = sorted(trace.operators, key=attrgetter("start"))
    for step in median_first(steps, attrgetter("length")):
        yield _timeline(step, trace, operators, calls, marks)


def _timeline(
    step: _Step,
    trace: RecordedTrace,
    operators: Sequence[OperatorCall],
    calls: Iterable[Call],
    marks: Sequence[PhaseMark],
) -> StepTimeline:
    """Return the timeline of one step. `operators` must be sorted by start."""
    lanes = _lanes(_calls_by_thread(step, calls))
    lanes[0] += _phases(step, marks)
    slices: list[ModuleSlice] = []
    for lane, running in enumerate(lanes):
        slices += nested(_self_times(running), lane)
    first = bisect.bisect_left(operators, step.begin, key=attrgetter("start"))
    last = bisect.bisect_left(operators, step.end, key=attrgetter("start"))
    outermost = _outermost(operators[first:last])
    kernels = [work for work in trace.work if step.contains(work.start)]
    return longest(
        "traced",
        step.length,
        slices,
        _works(outermost, "thread", step.begin, {step.thread: 0}),
        _works(kernels, "stream", step.begin, {}),
        step=step.number,
    )


def _calls_by_thread(step: _Step, calls: Iterable[Call]) -> dict[int, list[SelfTime]]:
    """Return the calls of modules and scopes that begin in a step, by thread.

    Thread 0 is the training thread. It is included even if it has no calls.
    """
    by_thread: dict[int, list[SelfTime]] = {0: []}
    for call in calls:
        if step.contains(call.start):
            start, end = step.span(call.start, call.end)
            time = SelfTime(call.fqn, call.phase, start, end)
            by_thread.setdefault(call.thread, []).append(time)
    return by_thread


def _phases(step: _Step, marks: Sequence[PhaseMark]) -> list[SelfTime]:
    """Return the phases of a step, such as forward. Their module name is empty."""
    found = []
    for (start, phase), (end, _) in pairwise([*marks, (step.end, "")]):
        if phase not in _NO_PHASE and step.begin < end and start < step.end:
            found.append(SelfTime("", phase, *step.span(start, end)))
    return found


def _works(
    found: Iterable[OperatorCall | DeviceEvent],
    field: Literal["thread", "stream"],
    begin: int,
    lanes: dict[int, int],
) -> Iterator[TimedWork]:
    """Yield operators or kernels with their lanes.

    Operators of the same thread, or kernels of the same stream, are in the same lane.

    Args:
        found: Operators or kernels.
        field: Field with the thread of an operator, or with the stream of a kernel.
        begin: Start of the step.
        lanes: Lanes that are already assigned to threads or streams. The function adds more.
    """
    for each in found:
        lane = lanes.setdefault(getattr(each, field), len(lanes))
        yield TimedWork(each.name, each.start - begin, each.end - each.start, lane)


def _lanes(by_thread: Mapping[int, Sequence[SelfTime]]) -> list[list[SelfTime]]:
    """Arrange the calls of modules in lanes, and return the calls in each lane.

    Threads that never run at the same time share a lane, for example the threads of forward and
    backward.
    """
    lanes: list[list[SelfTime]] = []
    for _, called in sorted(by_thread.items()):
        for lane in lanes:
            if not lengths_inside(covered(lane), covered(called))[0]:
                lane.extend(called)
                break
        else:
            lanes.append(list(called))
    return lanes


def _steps(trace: RecordedTrace, ends: Sequence[bool]) -> Iterator[_Step]:
    """Yield the complete steps. A step may have several batches."""
    number = 0
    begin: int | None = None
    for batch, is_last in zip(steps_of(trace), ends, strict=False):
        if begin is None:
            begin = batch.start
        if is_last:
            yield _Step(number, begin, batch.end, batch.thread)
            number += 1
            begin = None


def _self_times(calls: Iterable[SelfTime]) -> list[SelfTime]:
    """Return the intervals in which each call was the innermost running call, sorted by start.

    There is one value for each interval.
    """
    running: list[SelfTime] = []
    # For each running call, the intervals in which other calls were inside it.
    inside: list[Intervals] = []
    found: list[tuple[SelfTime, Intervals]] = []
    for call in outer_first(calls, running):
        del inside[len(running) :]
        # Add the interval to all calls around this call, not only to the innermost. A series of
        # backward nodes is one call, which can end after the call around it.
        for others in inside:
            others.append((call.start, call.end))
        running.append(call)
        inside.append([])
        found.append((call, inside[-1]))
    times = []
    for call, others in found:
        for start, end in outside([(call.start, call.end)], joined(others)):
            times.append(call._replace(start=start, end=end))
    return sorted(times, key=attrgetter("start"))


def _outermost(calls: Iterable[OperatorCall]) -> Iterator[OperatorCall]:
    """Yield the operators that are inside no other operator.

    Backward nodes are not operators. They are skipped, and the operators inside them are yielded.
    """
    last_end: defaultdict[int, int] = defaultdict(int)
    for call in sorted(calls, key=lambda each: (each.start, -each.end)):
        if "::" not in call.name or call.spans_threads or call.name.startswith(NODE):
            continue
        if call.start >= last_end[call.thread]:
            last_end[call.thread] = call.end
            yield call


ON_HOST = ("gloo:", "mpi:", "ucc:")
"""Prefixes of the names of collectives that run on the host."""

WITH_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators that launch collectives, or wait for them."""

AUTOGRAD = frozenset({"autograd", "torch"})
"""Namespaces of backward nodes such as `torch::autograd::AccumulateGrad`.

Nodes call operators, but are not operators themselves.
"""


def _states(work: Sequence[DeviceEvent]) -> Timeline | None:
    """Return when the device computes, communicates and copies; `None` if there is no work.

    The result is for the time from the first to the last device work.
    """
    if not work:
        return None
    begin, end = extent(work)
    return states(work, begin, end)


def device_seconds(work: Sequence[DeviceEvent]) -> dict[str, float]:
    """Return how long the device was in each state, between the first and the last device work.

    The keys are the fields of `DeviceTimeline`, for example `idle`, and the values are in seconds.
    The result is empty if there is no work.
    """
    found = _states(work)
    if found is None:
        return {}
    fields = asdict(timeline(found))
    return {name: nanoseconds / 1e9 for name, nanoseconds in fields.items()}


def communication(work: Sequence[DeviceEvent]) -> dict[int, list[Communicated]]:
    """Return the times of all collectives on the device.

    The keys are `DeviceEvent.external`, a number that identifies the operator that launched the
    collective.
    """
    device = _states(work)
    computing = device.computing if device else []
    found: dict[int, list[Communicated]] = {}
    for each in work:
        if not communicates(each):
            continue
        exposed = length(outside([(each.start, each.end)], computing))
        kernel = Communicated(collective_kind(each.name), each.end - each.start, exposed)
        found.setdefault(each.external, []).append(kernel)
    return found


def communication_on_host(trace: RecordedTrace) -> dict[int, Communicated]:
    """Return the times of the collectives that ran on the host, for example with Gloo.

    The keys are the start times of the operators that launched the collectives. A collective is
    exposed while no operator computes.

    The events do not show which operator launched a collective. But collectives run in the order in
    which they are launched, so each collective is assigned to the next launch of the same kind. If
    the recording missed this launch, the collective is assigned to a wrong one.
    """
    collectives = [each for each in trace.on_host() if each.name.startswith(ON_HOST)]
    if not collectives:
        return {}
    computed = _computing_on_host(trace)
    launched = [call for call in trace.operators if call.name.startswith(LAUNCHES)]
    launches = deque(sorted(launched, key=attrgetter("start")))
    found: dict[int, Communicated] = {}
    # If two collectives overlap, the overlap counts as exposed only once.
    covered_until = 0
    for each in sorted(collectives, key=attrgetter("start")):
        if not launches or launches[0].start > each.start:
            # The collective was launched before the recording began.
            continue
        launch = _launch_of(each, launches)
        while launches.popleft() is not launch:
            pass
        start = max(each.start, covered_until)
        end = max(each.end, covered_until)
        covered_until = end
        exposed = length(outside([(start, end)], computed))
        kind = collective_kind(launch.name)
        found[launch.start] = Communicated(kind, each.end - each.start, exposed)
    return found


def _computing_on_host(trace: RecordedTrace) -> Intervals:
    """Return the intervals in which operators compute.

    Time in which operators launch collectives or wait for them is left out.
    """
    waiting = []
    operators = []
    for call in trace.operators:
        namespace = _namespace(call)
        if namespace in WITH_COLLECTIVES:
            waiting.append(call)
        if namespace is not None and namespace not in AUTOGRAD:
            operators.append(call)
    return outside(covered(operators), covered(waiting))


def _launch_of(ran: HostItem, launches: Sequence[OperatorCall]) -> OperatorCall:
    """Return the operator that launched a collective.

    Args:
        ran: The collective.
        launches: The launches that are not yet assigned to a collective, in order.

    Returns:
        The first launch of the same kind before the collective ran or, if there is none, the first
        launch. For an all-reduce, the launch of a reduce-scatter is accepted as well, because Gloo
        runs a reduce-scatter as an all-reduce.
    """
    kind = collective_kind(ran.name)
    kinds = {kind, "reduce_scatter"} if kind == "all_reduce" else {kind}
    for launch in launches:
        if launch.start > ran.start:
            break
        if collective_kind(launch.name) in kinds:
            return launch
    return launches[0]


def _namespace(call: OperatorCall) -> str | None:
    namespace, is_operator, _ = call.name.partition("::")
    return namespace if is_operator else None

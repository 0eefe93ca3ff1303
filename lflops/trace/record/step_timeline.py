"""How a device spent the recorded time, by the rule of `trace/device_states.py`.

Its collectives; one traced step in time.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from operator import attrgetter

from msgspec.structs import asdict

from lflops.intervals import Intervals, joined, length, outside, shares
from lflops.profile.collective_names import collective_kind
from lflops.profile.records import Call
from lflops.profile.series import gathered
from lflops.profile.timeline import SelfTime, StepTimeline, TimedWork, longest, nested
from lflops.trace.device_states import Timeline, communicates, states, timeline
from lflops.trace.record.events import LAUNCHES, Communicated, steps_of
from lflops.trace.recorded import (
    NODE,
    DeviceEvent,
    HostItem,
    OperatorCall,
    RecordedTrace,
    outer_first,
)

_NO_PHASE = frozenset({"other", ""})

PhaseMark = tuple[
    int, str
    # nanoseconds since 1970, and the phase of the step that runs from then on
]


def timeline_of(
    trace: RecordedTrace,
    calls: Iterable[Call],
    ends: Sequence[bool],
    marks: Sequence[PhaseMark] = (),
) -> StepTimeline | None:
    """The timeline of the step of median length.

    `None` if no step ended. `ends` says of each batch whether a step ended with it.
    """
    steps = sorted(_steps(trace, ends), key=lambda step: step[1] - step[0])
    if not steps:
        return None
    begin, end, trainer = steps[(len(steps) - 1) // 2]
    by_thread: defaultdict[int, list[SelfTime]] = defaultdict(list, {0: []})
    for call in calls:
        if begin <= call.start < end:
            by_thread[call.thread].append(
                SelfTime(call.fqn, call.phase, call.start - begin, min(call.end, end) - begin)
            )
    lanes = _lanes(by_thread)
    for (start, phase), (stop, _) in pairwise([*marks, (end, "")]):
        if phase not in _NO_PHASE and begin < stop and start < end:
            lanes[0].append(SelfTime("", phase, max(start, begin) - begin, min(stop, end) - begin))
    slices = (
        each for lane, running in enumerate(lanes) for each in nested(_own_times(running), lane)
    )
    ran = _outermost(call for call in trace.operators if begin <= call.start < end)
    operators = _works(((call.thread, call) for call in ran), begin, {trainer: 0})
    kernels = _works(
        ((work.stream, work) for work in trace.work if begin <= work.start < end), begin, {}
    )
    return longest("traced", end - begin, slices, operators, kernels)


def _works(
    found: Iterable[tuple[int, OperatorCall | DeviceEvent]], begin: int, lanes: dict[int, int]
) -> Iterator[TimedWork]:
    """What was found on threads or streams, with a lane for each of these."""
    for place, each in found:
        yield TimedWork(
            each.name,
            each.start - begin,
            each.end - each.start,
            lanes.setdefault(place, len(lanes)),
        )


def _lanes(by_thread: Mapping[int, Sequence[SelfTime]]) -> list[list[SelfTime]]:
    """The calls in as few lanes as it takes.

    Threads that never run at the same time share one, as those of forward and of backward.
    """
    lanes: list[list[SelfTime]] = []
    for _, called in sorted(by_thread.items()):
        lane = next((lane for lane in lanes if not shares(_when(lane), _when(called))[0]), None)
        if lane is None:
            lanes.append(list(called))
        else:
            lane += called
    return lanes


def _when(calls: Iterable[SelfTime]) -> Intervals:
    return joined((call.start, call.end) for call in calls)


def _steps(trace: RecordedTrace, ends: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    """Beginning, end and thread of each whole step, of one batch or several."""
    begin: int | None = None
    for step, is_last in zip(steps_of(trace), ends, strict=False):
        begin = step.start if begin is None else begin
        if is_last:
            yield begin, step.end, step.thread
            begin = None


def _own_times(calls: Iterable[SelfTime]) -> list[SelfTime]:
    """When each of nested calls was the innermost one."""
    running: list[SelfTime] = []
    # of each that runs, when another one was inside of it
    inside: list[Intervals] = []
    found: list[tuple[SelfTime, Intervals]] = []
    for call in outer_first(calls, running):
        del inside[len(running) :]
        # of all: a run of backward may end after the one around it
        for others in inside:
            others.append((call.start, call.end))
        running.append(call)
        inside.append([])
        found.append((call, inside[-1]))
    own = (
        call._replace(start=start, end=end)
        for call, others in found
        for start, end in outside([call[2:]], joined(others))
    )
    return sorted(own, key=attrgetter("start"))


def _outermost(calls: Iterable[OperatorCall]) -> Iterator[OperatorCall]:
    """The operators in no other; not what only calls operators, as a node of backward."""
    last: defaultdict[int, int] = defaultdict(int)
    operators = (
        call
        for call in calls
        if "::" in call.name and not call.spans_threads and not call.name.startswith(NODE)
    )
    for call in sorted(operators, key=lambda each: (each.start, -each.end)):
        if call.start >= last[call.thread]:
            last[call.thread] = call.end
            yield call


# begin the names of collectives that run on the host
ON_HOST = ("gloo:", "mpi:", "ucc:")

WITH_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators that launch collectives, or wait for them."""

AUTOGRAD = frozenset(
    {"autograd", "torch"}
    # namespaces of what runs other operators, such as `torch::autograd::AccumulateGrad`
)


def _states(work: Sequence[DeviceEvent]) -> Timeline | None:
    """From the first to the last work; `None` where there was no device."""
    return (
        states(work, min(each.start for each in work), max(each.end for each in work))
        if work
        else None
    )


def device_seconds(work: Sequence[DeviceEvent]) -> dict[str, float]:
    """The fields of `DeviceTimeline` in seconds, from the first to the last work of the device.

    Empty where there was no device.
    """
    found = _states(work)
    return (
        {name: nanoseconds / 1e9 for name, nanoseconds in asdict(timeline(found)).items()}
        if found
        else {}
    )


def communication(work: Sequence[DeviceEvent]) -> dict[int, list[Communicated]]:
    """The kernels of collectives by the key of what launched them."""
    device = _states(work)
    computing = device.computing if device else []
    exposed = (
        (each, length(outside([(each.start, each.end)], computing)))
        for each in work
        if communicates(each)
    )
    return gathered(
        (each.external, Communicated(collective_kind(each.name), each.end - each.start, alone))
        for each, alone in exposed
    )


def communication_on_host(trace: RecordedTrace) -> dict[int, Communicated]:
    """The collectives that ran on the host by the beginning of the operators that launched them.

    Exposed: no operator ran.
    """
    # Collectives run in the order in which they are launched. Gloo runs some as another kind, such
    # as a reduce-scatter as an all-reduce. Some launch has no event, where the recording missed it:
    # what ran then belongs to the next launch of its kind.
    ran = sorted(
        (each for each in trace.on_host() if each.name.startswith(ON_HOST)), key=attrgetter("start")
    )
    if not ran:
        return {}
    launches = deque(
        sorted(
            (call for call in trace.operators if call.name.startswith(LAUNCHES)),
            key=attrgetter("start"),
        )
    )
    awaited = joined(
        (call.start, call.end) for call in trace.operators if _namespace(call) in WITH_COLLECTIVES
    )
    operators = (call for call in trace.operators if _namespace(call) not in {None, *AUTOGRAD})
    computed = outside(joined((call.start, call.end) for call in operators), awaited)
    found, covered = {}, 0
    for each in ran:
        if not launches or launches[0].start > each.start:
            # launched before the recording began
            continue
        launch = _launch_of(each, launches)
        while launches.popleft() is not launch:
            pass
        alone = (
            max(each.start, covered),
            max(each.end, covered),
            # two that wait at once wait for one time
        )
        exposed, covered = length(outside([alone], computed)), alone[1]
        found[launch.start] = Communicated(
            collective_kind(launch.name), each.end - each.start, exposed
        )
    return found


def _launch_of(ran: HostItem, launches: Sequence[OperatorCall]) -> OperatorCall:
    """Find the first earlier launch of its kind, or of the kind that gloo runs it as.

    Without one, the first launch.
    """
    kind = collective_kind(ran.name)
    kinds = {kind, "reduce_scatter"} if kind == "all_reduce" else {kind}
    before = takewhile(lambda launch: launch.start <= ran.start, launches)
    return next((launch for launch in before if collective_kind(launch.name) in kinds), launches[0])


def _namespace(call: OperatorCall) -> str | None:
    namespace, is_operator, _ = call.name.partition("::")
    return namespace if is_operator else None

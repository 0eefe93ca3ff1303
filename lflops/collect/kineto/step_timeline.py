"""How a device spent the recorded time, by the rule of `traces/device_states.py`; its collectives; one traced step in time."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Literal

from msgspec.structs import asdict

from lflops.collect.kineto.events import LAUNCHES, NO_OPERATORS, Communicated, Event, steps_of
from lflops.profile.collective_names import collective_kind
from lflops.profile.records import Call, Phase
from lflops.profile.series import gathered
from lflops.profile.timeline import OwnTime, StepTimeline, TimedWork, longest, nested
from lflops.stretches import joined, length, outside, shares
from lflops.traces.device_states import Timeline, communicates, idle_stretches, states, timeline
from lflops.traces.recorded import NODE, DeviceWork

_NO_PHASE = frozenset({"other", ""})

PhaseMark = tuple[int, str]  # nanoseconds since 1970, and the phase of the step that runs from then on


def timeline_of(
    events: Sequence[Event], calls: Iterable[Call], ends: Sequence[bool], marks: Sequence[PhaseMark] = ()
) -> StepTimeline | None:
    """The timeline of the step of median length; `None` if no step ended. `ends` says of each batch whether a step ended with it."""
    steps = sorted(_steps(events, ends), key=lambda step: step[1] - step[0])
    if not steps:
        return None
    begin, end, trainer = steps[(len(steps) - 1) // 2]
    inside = [event for event in events if begin <= event.start < end]
    by_thread: defaultdict[int, list[OwnTime]] = defaultdict(list, {0: []})
    for call in calls:
        if begin <= call.start < end:
            by_thread[call.thread].append(OwnTime(call.row, call.phase, call.start - begin, min(call.end, end) - begin))
    lanes = _lanes(by_thread)
    for (start, phase), (stop, _) in pairwise([*marks, (end, "")]):
        if phase not in _NO_PHASE and begin < stop and start < end:
            lanes[0].append(OwnTime("", phase, max(start, begin) - begin, min(stop, end) - begin))
    slices = (each for lane, running in enumerate(lanes) for each in nested(_own_times(running), lane))
    operators = list(_outermost(inside))
    kernels = [event for event in inside if event.is_on_device and not event.is_named]
    return longest("traced", end - begin, slices, _works(operators, begin, trainer), _works(kernels, begin))


def _works(events: Sequence[Event], begin: int, first: int | None = None) -> Iterator[TimedWork]:
    """The events, with a lane for each thread or stream; that of the first thread is 0."""
    lanes = {} if first is None else {first: 0}
    for event in events:
        yield TimedWork(event.name, event.start - begin, event.end - event.start, lanes.setdefault(event.thread, len(lanes)))


def _lanes(by_thread: Mapping[int, Sequence[OwnTime]]) -> list[list[OwnTime]]:
    """The calls in as few lanes as it takes: threads that never run at the same time share one, as those of forward and of backward."""
    lanes: list[list[OwnTime]] = []
    for _, called in sorted(by_thread.items()):
        lane = next((lane for lane in lanes if not _overlap(lane, called)), None)
        if lane is None:
            lanes.append(list(called))
        else:
            lane += called
    return lanes


def _overlap(some: Iterable[OwnTime], others: Iterable[OwnTime]) -> bool:
    ends = [0, 0]
    for start, end, thread in sorted((each.start, each.end, thread) for thread, calls in enumerate((some, others)) for each in calls):
        if start < ends[1 - thread]:
            return True
        ends[thread] = max(ends[thread], end)
    return False


def _steps(events: Iterable[Event], ends: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    """Beginning, end and thread of each whole step, of one batch or several."""
    begin: int | None = None
    for (start, end, thread), is_last in zip(steps_of(events), ends, strict=False):
        begin = start if begin is None else begin
        if is_last:
            yield begin, end, thread
            begin = None


def _own_times(calls: Iterable[OwnTime]) -> Iterator[OwnTime]:
    """When each of nested calls was the innermost one."""
    running: list[OwnTime] = []
    now = 0

    def until(moment: int) -> Iterator[OwnTime]:
        nonlocal now
        if running and moment > now:
            yield running[-1]._replace(start=now, end=moment)
        now = max(now, moment)

    for call in sorted(calls, key=lambda each: (each.start, -each.end)):
        while running and running[-1].end <= call.start:
            yield from until(running[-1].end)
            running.pop()
        yield from until(call.start)
        running.append(call)
    while running:
        yield from until(running[-1].end)
        running.pop()


def _is_operator(event: Event) -> bool:
    """Whether it is the call of an operator on the host, not of what only calls operators, as a node of backward."""
    return (
        "::" in event.name
        and not event.is_on_device
        and not event.is_named
        and not event.spans_threads
        and not event.link
        and not event.name.startswith(NODE)
        and event.name not in NO_OPERATORS
    )


def _outermost(events: Iterable[Event]) -> Iterator[Event]:
    last: defaultdict[int, int] = defaultdict(int)
    for event in sorted(filter(_is_operator, events), key=lambda each: (each.start, -each.end)):
        if event.start >= last[event.thread]:
            last[event.thread] = event.end
            yield event


ON_HOST = ("gloo:", "mpi:", "ucc:")  # begin the names of collectives that run on the host

WITH_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators that launch collectives, or wait for them."""

AUTOGRAD = frozenset({"autograd", "torch"})  # namespaces of what runs other operators, such as `torch::autograd::AccumulateGrad`

HOST_PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
"""The inner ones first: an optimizer's closure runs forward and backward."""


def _work(events: Iterable[Event]) -> list[DeviceWork]:
    return [
        DeviceWork(_kind(name), name, 0, thread, start, end, key, link)
        for name, start, end, thread, _, _, is_named, _, is_on_device, key, link in events
        if is_on_device and not is_named
    ]


def _kind(name: str) -> Literal["kernel", "copy", "fill"]:
    return "copy" if name.startswith("Memcpy") else "fill" if name.startswith("Memset") else "kernel"


def _states(work: Sequence[DeviceWork]) -> Timeline | None:
    """From the first to the last work; `None` where there was no device."""
    return states(work, min(each.start for each in work), max(each.end for each in work)) if work else None


def device_seconds(events: Iterable[Event]) -> dict[str, float]:
    """The fields of `DeviceTimeline` in seconds, from the first to the last work of the device; empty where there was no device."""
    found = _states(_work(events))
    return {name: nanoseconds / 1e9 for name, nanoseconds in asdict(timeline(found)).items()} if found else {}


def idle_by_phase(events: Iterable[Event], calls: Iterable[Call]) -> dict[str, float] | None:
    """Idle seconds by what the host was at: a phase of some module, or `other`; `None` where there was no device."""
    found, calls = _states(_work(events)), list(calls)
    if found is None:
        return None
    phases = (joined((call.start, call.end) for call in calls if call.phase == phase) for phase in HOST_PHASES)
    took = zip([*HOST_PHASES, "other"], shares(idle_stretches(found), *phases), strict=True)
    return {phase: nanoseconds / 1e9 for phase, nanoseconds in took if nanoseconds}


def communication(events: Iterable[Event]) -> dict[int, list[Communicated]]:
    """The kernels of collectives by the key of what launched them."""
    work = _work(events)
    device = _states(work)
    computing = device.computing if device else []
    exposed = ((each, length(outside([(each.start, each.end)], computing))) for each in work if communicates(each))
    return gathered((each.external, Communicated(collective_kind(each.name), each.end - each.start, alone)) for each, alone in exposed)


def communication_on_host(events: Sequence[Event]) -> dict[int, Communicated]:
    """The collectives that ran on the host by the beginning of the operators that launched them. Exposed: no operator ran.

    Collectives run in the order in which they are launched. Gloo runs some as another kind, such as a reduce-scatter as an all-reduce.
    Some launch has no event, where the recording missed it: what ran then belongs to the next launch of its kind.
    """
    ran = sorted((event for event in events if event.name.startswith(ON_HOST)), key=lambda event: event.start)
    if not ran:
        return {}
    launches = deque(sorted((event for event in events if event.name.startswith(LAUNCHES)), key=lambda event: event.start))
    awaited = joined((event.start, event.end) for event in events if _namespace(event) in WITH_COLLECTIVES)
    operators = (event for event in events if not event.is_named and _namespace(event) not in {None, *AUTOGRAD})
    computed = outside(joined((event.start, event.end) for event in operators), awaited)
    found, covered = {}, 0
    for event in ran:
        if not launches or launches[0].start > event.start:
            continue  # launched before the recording began
        launch = _launch_of(event, launches)
        while launches.popleft() is not launch:
            pass
        alone = max(event.start, covered), max(event.end, covered)  # two that wait at once wait for one time
        exposed, covered = length(outside([alone], computed)), alone[1]
        found[launch.start] = Communicated(collective_kind(launch.name), event.end - event.start, exposed)
    return found


def _launch_of(event: Event, launches: Sequence[Event]) -> Event:
    """Find the first earlier launch of its kind, or of the kind that gloo runs it as; without one, the first launch."""
    kind = collective_kind(event.name)
    kinds = {kind, "reduce_scatter"} if kind == "all_reduce" else {kind}
    before = takewhile(lambda launch: launch.start <= event.start, launches)
    return next((launch for launch in before if collective_kind(launch.name) in kinds), launches[0])


def _namespace(event: Event) -> str | None:
    namespace, is_operator, _ = event.name.partition("::")
    return namespace if is_operator else None

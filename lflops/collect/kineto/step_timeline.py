"""The timeline of one traced step, from Kineto's events and the calls of modules."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from lflops.collect.kineto.events import NO_OPERATORS, Event, steps_of
from lflops.profile.records import Call
from lflops.profile.timeline import OwnTime, StepTimeline, TimedWork, longest, nested
from lflops.traces.recorded import NODE

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

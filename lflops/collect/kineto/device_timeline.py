"""How a device spent the recorded time: computing, only communicating or copying, or waiting."""

from collections.abc import Callable, Iterable
from itertools import pairwise

from lflops.collect.kineto.events import Event
from lflops.profile.records import Call, Phase

__all__ = ["computing", "exposed_communication", "exposed_copies", "idle", "idle_by_phase"]

_Stretches = list[tuple[int, int]]

HOST_PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
"""The inner ones first: an optimizer's closure runs forward and backward."""


def _busy(events: Iterable[Event]) -> _Stretches:
    """When the device did something, without gaps and overlaps."""
    return _joined((event.start, event.end) for event in events if event.is_on_device and not event.is_named)


def _joined(spans: Iterable[tuple[int, int]]) -> _Stretches:
    """In their order, without overlaps."""
    stretches: _Stretches = []
    for start, end in sorted(spans):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((start, end))
    return stretches


def idle(events: Iterable[Event]) -> float | None:
    """Seconds between the first and the last work of the device in which it had none; `None` where there was no device."""
    stretches = _busy(events)
    if not stretches:
        return None
    return (stretches[-1][1] - stretches[0][0] - _length(stretches)) / 1e9


def idle_by_phase(events: Iterable[Event], calls: Iterable[Call]) -> dict[str, float] | None:
    """The same seconds by what the host was at: a phase of some module, or `other`; `None` where there was no device."""
    busy, calls = _busy(events), list(calls)
    if not busy:
        return None
    gaps = [(end, start) for (_, end), (start, _) in pairwise(busy)]
    phases: dict[str, float] = {}
    for phase in HOST_PHASES:
        left = _outside(gaps, _joined((call.start, call.end) for call in calls if call.phase == phase))
        phases[phase], gaps = (_length(gaps) - _length(left)) / 1e9, left
    return {phase: seconds for phase, seconds in (phases | {"other": _length(gaps) / 1e9}).items() if seconds}


def _outside(gaps: Iterable[tuple[int, int]], stretches: _Stretches) -> _Stretches:
    """What of the gaps lies in none of the stretches; both are in their order."""
    left, first = [], 0
    for start, end in gaps:
        while first < len(stretches) and stretches[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(stretches) and stretches[index][0] < end:
            left.append((at, stretches[index][0]))
            at, index = stretches[index][1], index + 1
        left.append((at, end))
    return [(start, end) for start, end in left if start < end]


def computing(events: Iterable[Event]) -> float | None:
    """Seconds in which the device ran a kernel that was no communication; `None` where there was no device."""
    return _alone(events, _computes, lambda _: False)


def exposed_communication(events: Iterable[Event]) -> float | None:
    """Seconds in which the device communicated and computed nothing; `None` where there was no device."""
    return _alone(events, _communicates, _computes)


def exposed_copies(events: Iterable[Event]) -> float | None:
    """Seconds in which the device copied, and neither computed nor communicated; `None` where there was no device."""
    return _alone(events, lambda _: True, lambda event: _computes(event) or _communicates(event))


def _alone(events: Iterable[Event], wanted: Callable[[Event], bool], before: Callable[[Event], bool]) -> float | None:
    """Seconds of what is wanted in which nothing ran that comes before it."""
    ran = [event for event in events if event.is_on_device and not event.is_named]
    if not ran:
        return None
    first = _length(_busy(event for event in ran if before(event)))
    return (_length(_busy(event for event in ran if before(event) or wanted(event))) - first) / 1e9


def _communicates(event: Event) -> bool:
    return "nccl" in event.name.lower()


def _computes(event: Event) -> bool:
    return not _communicates(event) and not event.name.startswith(("Memcpy", "Memset"))


def _length(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)

"""What a device did while it was recorded, whoever asked for it: when it computed, when it only communicated or copied, when it waited."""

from collections.abc import Callable, Iterable

from lflops.collect.timing.kineto_events import Event

__all__ = ["computing", "exposed_communication", "exposed_copies", "idle"]


def _busy(events: Iterable[Event]) -> list[tuple[int, int]]:
    """When the device did something, without gaps and overlaps."""
    stretches: list[tuple[int, int]] = []
    for start, end in sorted((event.start, event.end) for event in events if event.is_on_device and not event.is_named):
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

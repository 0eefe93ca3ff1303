"""What a device did while it was recorded, whoever asked for it: when it was busy, when it only communicated, when it waited."""

from collections.abc import Iterable, Sequence

from lflops.collect.timing.kineto_events import Event

__all__ = ["exposed_communication", "idle"]


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


def exposed_communication(events: Sequence[Event]) -> float | None:
    """Seconds in which the device communicated and computed nothing; `None` where there was no device."""
    everything = _busy(events)
    if not everything:
        return None
    computing = _busy(event for event in events if "nccl" not in event.name.lower())
    return (_length(everything) - _length(computing)) / 1e9


def _length(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)

"""How a device spent the recorded time: computing, only communicating or copying, or waiting. Collectives on the host, too."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from lflops.collect.kineto.events import LAUNCHES, Communicated, Event
from lflops.profile.collective_names import collective_kind, is_collective_kernel
from lflops.profile.records import Call, Phase
from lflops.stretches import Stretches, joined, length, outside

__all__ = ["communication", "communication_on_host", "computing", "exposed_communication", "exposed_copies", "idle", "idle_by_phase"]

ON_HOST = ("gloo:", "mpi:", "ucc:")
"""Begin the names of collectives that run on the host."""

WITH_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators that launch collectives, or wait for them."""

AUTOGRAD = frozenset({"autograd", "torch"})
"""Namespaces of what runs other operators, such as `torch::autograd::AccumulateGrad`."""

HOST_PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
"""The inner ones first: an optimizer's closure runs forward and backward."""


def _busy(events: Iterable[Event]) -> Stretches:
    """When the device did something, without gaps and overlaps."""
    return joined((event.start, event.end) for event in events if event.is_on_device and not event.is_named)


def idle(events: Iterable[Event]) -> float | None:
    """Seconds between the first and the last work of the device in which it had none; `None` where there was no device."""
    stretches = _busy(events)
    if not stretches:
        return None
    return (stretches[-1][1] - stretches[0][0] - length(stretches)) / 1e9


def idle_by_phase(events: Iterable[Event], calls: Iterable[Call]) -> dict[str, float] | None:
    """The same seconds by what the host was at: a phase of some module, or `other`; `None` where there was no device."""
    busy, calls = _busy(events), list(calls)
    if not busy:
        return None
    gaps = [(end, start) for (_, end), (start, _) in pairwise(busy)]
    phases: dict[str, float] = {}
    for phase in HOST_PHASES:
        left = outside(gaps, joined((call.start, call.end) for call in calls if call.phase == phase))
        phases[phase], gaps = (length(gaps) - length(left)) / 1e9, left
    return {phase: seconds for phase, seconds in (phases | {"other": length(gaps) / 1e9}).items() if seconds}


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
    first = length(_busy(event for event in ran if before(event)))
    return (length(_busy(event for event in ran if before(event) or wanted(event))) - first) / 1e9


def communication(events: Sequence[Event]) -> dict[int, list[Communicated]]:
    """The kernels of collectives by the key of what launched them."""
    communicating = [event for event in events if event.is_on_device and not event.is_named and _communicates(event)]
    computed = _busy(event for event in events if _computes(event)) if communicating else []
    found: defaultdict[int, list[Communicated]] = defaultdict(list)
    for event in communicating:
        exposed = length(outside([(event.start, event.end)], computed))
        found[event.link].append(Communicated(collective_kind(event.name), event.end - event.start, exposed))
    return dict(found)


def communication_on_host(events: Sequence[Event]) -> dict[int, Communicated]:
    """The collectives that ran on the host by the beginning of the operators that launched them. Exposed: no operator ran.

    Collectives run in the order in which they are launched. Gloo runs some as another kind, such as a reduce-scatter as an all-reduce.
    """
    ran = sorted((event for event in events if event.name.startswith(ON_HOST)), key=lambda event: event.start)
    if not ran:
        return {}
    launches = deque(sorted((event for event in events if event.name.startswith(LAUNCHES)), key=lambda event: event.start))
    awaited = joined((event.start, event.end) for event in events if _namespace(event) in WITH_COLLECTIVES)
    computed = outside(joined((event.start, event.end) for event in events if _computes_on_host(event)), awaited)
    found = {}
    for event in ran:
        if not launches or launches[0].start > event.start:
            continue  # launched before the recording began
        launch = launches.popleft()
        exposed = length(outside([(event.start, event.end)], computed))
        found[launch.start] = Communicated(collective_kind(launch.name), event.end - event.start, exposed)
    return found


def _computes_on_host(event: Event) -> bool:
    """Whether it is an operator, and not what autograd runs others in."""
    return not event.is_named and _namespace(event) not in {None, *AUTOGRAD}


def _namespace(event: Event) -> str | None:
    """An operator's; `None` of anything else."""
    namespace, is_operator, _ = event.name.partition("::")
    return namespace if is_operator else None


def _communicates(event: Event) -> bool:
    return is_collective_kernel(event.name)


def _computes(event: Event) -> bool:
    """A fill is computing: it takes the device as a kernel does."""
    return not _communicates(event) and not event.name.startswith("Memcpy")

"""How a device spent the recorded time, by the four-state rule of `traces/device_states.py`. Collectives, those on the host too."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal

from msgspec.structs import asdict

from lflops.collect.kineto.events import LAUNCHES, Communicated, Event
from lflops.profile.collective_names import collective_kind
from lflops.profile.records import Call, Phase
from lflops.profile.series import gathered
from lflops.stretches import joined, length, outside, shares
from lflops.traces.device_states import Timeline, communicates, idle_stretches, states, timeline
from lflops.traces.recorded import DeviceWork

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
    """What `DeviceTimeline` has, in seconds, from the first to the last work of the device; empty where there was no device."""
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
    """Of those before it the first of its kind, as which gloo may run it; without one, the first."""
    kind = collective_kind(event.name)
    kinds = {kind, "reduce_scatter"} if kind == "all_reduce" else {kind}
    before = takewhile(lambda launch: launch.start <= event.start, launches)
    return next((launch for launch in before if collective_kind(launch.name) in kinds), launches[0])


def _namespace(event: Event) -> str | None:
    namespace, is_operator, _ = event.name.partition("::")
    return namespace if is_operator else None

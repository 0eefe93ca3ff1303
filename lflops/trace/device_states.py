"""Divide the time of a device into four states.

At each moment, a device computes, only communicates, only copies, or is idle. Computing takes
precedence over communication, and communication takes precedence over copies. So the times of the
four states add up to exactly the window, which is the analyzed period.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from lflops.intervals import Intervals, joined, length, lengths_inside, outside
from lflops.profile.collective_names import is_collective_kernel
from lflops.profile.series import sums
from lflops.trace.recorded import DeviceEvent

DEVICE_STATES = ("computing", "exposed_communication", "exposed_copies", "idle")
"""The names of the four states of a device. `DeviceTimeline` has a field for each of them."""


class DeviceTimeline(Struct, frozen=True, kw_only=True):
    """Nanoseconds that a device spends in each state.

    `computing`, `exposed_communication`, `exposed_copies` and `idle` add up to `window`.

    Attributes:
        window: Length of the analyzed period.
        computing: Time in which the device runs a fill, or a kernel that belongs to no collective.
        exposed_communication: Time in which the device communicates but does not compute.
        exposed_copies: Time in which the device copies, but neither computes nor communicates.
        idle: Time in which the device runs no work.
        communication: All time in which the device communicates, even if it also computes.
        copies: All time in which the device copies, even if it also computes or communicates.
    """

    window: int
    computing: int
    exposed_communication: int
    exposed_copies: int
    idle: int
    communication: int
    copies: int

    def by_state(self) -> dict[str, int]:
        """Return the time in each of the `DEVICE_STATES`."""
        return {state: getattr(self, state) for state in DEVICE_STATES}

    @property
    def busy(self) -> int:
        """Time in which the device is not idle."""
        return self.window - self.idle

    @property
    def overlapped_communication(self) -> int:
        """Time in which the device communicates and computes at the same time."""
        return self.communication - self.exposed_communication

    @property
    def overlapped_copies(self) -> int:
        """Time in which the device copies and also computes or communicates."""
        return self.copies - self.exposed_copies


class Timeline(NamedTuple):
    """Intervals between `start` and `end` in which a device computes, communicates or copies.

    The three kinds of intervals may overlap.
    """

    start: int
    end: int
    computing: Intervals
    communicating: Intervals
    copying: Intervals


def communicates(work: DeviceEvent) -> bool:
    """Return whether device work is the kernel of a collective."""
    return work.kind == "kernel" and (
        work.collective is not None or is_collective_kernel(work.name)
    )


def states(work: Sequence[DeviceEvent], start: int, end: int) -> Timeline:
    """Return the intervals of computing, communication and copies between `start` and `end`."""
    computing: Intervals = []
    communicating: Intervals = []
    copying: Intervals = []
    for each in work:
        if each.end <= start or each.start >= end:
            continue
        interval = (max(each.start, start), min(each.end, end))
        if each.kind == "copy":
            copying.append(interval)
        elif communicates(each):
            communicating.append(interval)
        else:
            computing.append(interval)
    return Timeline(start, end, joined(computing), joined(communicating), joined(copying))


def timeline(found: Timeline) -> DeviceTimeline:
    """Return the time that the device spends in each state, such as computing or idle."""
    window = [(found.start, found.end)]
    computing, exposed_communication, exposed_copies, idle = lengths_inside(
        window, found.computing, found.communicating, found.copying
    )
    return DeviceTimeline(
        window=length(window),
        computing=computing,
        exposed_communication=exposed_communication,
        exposed_copies=exposed_copies,
        idle=idle,
        communication=length(found.communicating),
        copies=length(found.copying),
    )


def idle_stretches(found: Timeline) -> Intervals:
    """Return the intervals in which the device runs no work."""
    busy = joined(found.computing + found.communicating + found.copying)
    return outside([(found.start, found.end)], busy)


def total(timelines: Iterable[DeviceTimeline]) -> DeviceTimeline:
    """Return the sums of the times of several devices or steps."""
    return DeviceTimeline(**sums(list(timelines), *DeviceTimeline.__struct_fields__))

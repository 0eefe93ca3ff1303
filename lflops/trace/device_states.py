"""Divide the time of a device into four states.

A device computes, only communicates, only copies, or is idle. Computing takes precedence over
communication, and communication takes precedence over copies, so the four states add up to exactly
the window.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from lflops.intervals import Intervals, joined, length, outside, shares
from lflops.profile.collective_names import is_collective_kernel
from lflops.profile.series import sums
from lflops.trace.recorded import DeviceEvent


class DeviceTimeline(Struct, frozen=True, kw_only=True):
    """Nanoseconds of a device in each state; the four states add up to the window.

    Attributes:
        computing: Time with a fill, or with a kernel that does not communicate.
        exposed_communication: Time with communication and without computing.
        exposed_copies: Time with a copy, and without computing or communication.
        idle: Time with no work.
        communication: Time with communication, exposed or not.
        copies: Time with a copy, exposed or not.
    """

    window: int
    computing: int
    exposed_communication: int
    exposed_copies: int
    idle: int
    communication: int
    copies: int

    @property
    def busy(self) -> int:
        """Time that is not idle."""
        return self.window - self.idle

    @property
    def overlapped_communication(self) -> int:
        """Communication time overlapped by computing."""
        return self.communication - self.exposed_communication

    @property
    def overlapped_copies(self) -> int:
        """Copy time overlapped by computing or communication."""
        return self.copies - self.exposed_copies


class Timeline(NamedTuple):
    """Busy intervals of a device between two moments, by kind of work."""

    start: int
    end: int
    computing: Intervals
    communicating: Intervals
    copying: Intervals


def communicates(work: DeviceEvent) -> bool:
    """Return whether the work is a collective's kernel."""
    return work.kind == "kernel" and (
        work.collective is not None or is_collective_kernel(work.name)
    )


def states(work: Sequence[DeviceEvent], start: int, end: int) -> Timeline:
    """Return the intervals of computing, communication and copies between two moments."""
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
    """Return the time in each state."""
    window = [(found.start, found.end)]
    computing, exposed_communication, exposed_copies, idle = shares(
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
    """Return the intervals without any work."""
    busy = joined(found.computing + found.communicating + found.copying)
    return outside([(found.start, found.end)], busy)


def total(timelines: Iterable[DeviceTimeline]) -> DeviceTimeline:
    """Return the sum of several timelines."""
    return DeviceTimeline(**sums(list(timelines), *DeviceTimeline.__struct_fields__))

"""The four-state rule: when a device computed, when it only communicated or copied, and when it was idle.

Computing wins over communication, and communication over copies, so the states add up to the
window, to the nanosecond.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from lflops.intervals import Intervals, joined, length, outside, shares
from lflops.profile.collective_names import is_collective_kernel
from lflops.profile.series import sums
from lflops.trace.recorded import DeviceEvent


class DeviceTimeline(Struct, frozen=True, kw_only=True):
    """Nanoseconds of a device in each state; the first four add up to the window."""

    window: int
    # a kernel ran that is no communication, or a fill
    computing: int
    # it communicated and computed nothing
    exposed_communication: int
    # it copied, and neither computed nor communicated
    exposed_copies: int
    # none of these
    idle: int
    # all of it, exposed or not
    communication: int
    copies: int

    @property
    def busy(self) -> int:
        """The window without the idle time."""
        return self.window - self.idle

    @property
    def overlapped_communication(self) -> int:
        """Communication that computing hides."""
        return self.communication - self.exposed_communication

    @property
    def overlapped_copies(self) -> int:
        """Copies that computing or communication hides."""
        return self.copies - self.exposed_copies


class Timeline(NamedTuple):
    """A device's busy stretches between two moments."""

    start: int
    end: int
    computing: Intervals
    communicating: Intervals
    copying: Intervals


def communicates(work: DeviceEvent) -> bool:
    return work.kind == "kernel" and (
        work.collective is not None or is_collective_kernel(work.name)
    )


def states(work: Sequence[DeviceEvent], start: int, end: int) -> Timeline:
    """When the work computed, communicated and copied, between two moments."""
    computing: Intervals = []
    communicating: Intervals = []
    copying: Intervals = []
    for each in work:
        if each.end > start and each.start < end:
            stretch = max(each.start, start), min(each.end, end)
            (
                copying
                if each.kind == "copy"
                else communicating
                if communicates(each)
                else computing
            ).append(stretch)
    return Timeline(start, end, joined(computing), joined(communicating), joined(copying))


def timeline(found: Timeline) -> DeviceTimeline:
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
    return outside(
        [(found.start, found.end)], joined(found.computing + found.communicating + found.copying)
    )


def total(timelines: Iterable[DeviceTimeline]) -> DeviceTimeline:
    return DeviceTimeline(**sums(list(timelines), *DeviceTimeline.__struct_fields__))

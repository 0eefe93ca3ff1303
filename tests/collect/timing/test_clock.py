"""A clock of a device marks its moments on that device, whichever one is current."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lflops.collect.timing.clock import StreamClock


class Event:
    """Knows the device that it was recorded on, and subtracts none of another."""

    def __init__(self, devices: "Devices") -> None:
        self._devices = devices
        self.device: int | None = None
        self.at = 0.0

    def record(self, stream: int | None = None) -> None:
        """Record on a stream; without one, on that of the current device."""
        self.device = self._devices.current if stream is None else stream
        self.at = self._devices.milliseconds

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds up to another event."""
        if self.device != other.device:
            raise RuntimeError("events of two devices")
        return other.at - self.at


@dataclass
class Devices:
    """What torch has for two devices, each with one stream."""

    current: int = 0
    milliseconds: float = 0.0
    synchronized: list[int | None] = field(default_factory=list)

    def Event(self, **_: Any) -> Event:  # noqa: N802 - as torch names it
        """Make one."""
        return Event(self)

    def current_device(self) -> int:
        """That of the thread."""
        return self.current

    def current_stream(self, device: torch.device) -> int | None:
        """The stream of a device, which has its number."""
        return device.index

    def synchronize(self, device: torch.device) -> None:
        """Wait for it."""
        self.synchronized.append(device.index)


@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_marks_are_of_the_clock_s_device(name: str) -> None:
    """Between them the user makes another device the current one: it is 3 ms all the same, and nobody waits for the other device."""
    devices = Devices(current=1)
    clock = StreamClock(torch.device(name), devices)
    start = clock.mark()
    devices.current, devices.milliseconds = 0, 3.0
    end = clock.mark()
    clock.settle()
    assert 3e-3 == clock.seconds(start, end)
    assert [1] == devices.synchronized


def test_marks_of_the_current_device_would_be_of_two() -> None:
    """The planted culprit."""
    devices = Devices(current=1)
    start, end = devices.Event(), devices.Event()
    start.record()
    devices.current = 0
    end.record()
    with pytest.raises(RuntimeError, match="events of two devices"):
        start.elapsed_time(end)

"""A clock of a device marks its moments on that device, whichever one is current. What other processes took of the CPU."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lflops.collect.timing import clock as module
from lflops.collect.timing.clock import CpuWatch, StreamClock


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


@pytest.mark.parametrize(
    ("used", "waited", "lost"),
    [
        (1.0, 0.0, 0.0),  # one thread on two CPUs that nobody else wants
        (0.5, 0.5, 0.5),  # it had to share one
        (2.0, 3.0, 0.0),  # five threads waited for each other on both CPUs
        (1.5, 3.0, 0.5),  # and somebody else had half a second of the two
        (0.1, 0.0, 0.0),  # it slept
        (1.0, None, None),  # no Linux
    ],
)
def test_cpu_time_is_lost_to_others_and_not_to_own_threads(
    monkeypatch: pytest.MonkeyPatch, used: float, waited: float | None, lost: float | None
) -> None:
    """In one second on two CPUs."""
    readings = {"used": 7.0, "waited": 3.0, "now": 100.0}
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(module.time, "perf_counter", lambda: readings["now"])
    monkeypatch.setattr(module, "cpu_seconds", lambda: (readings["used"], 0.0))
    monkeypatch.setattr(module, "_waited", lambda: None if waited is None else readings["waited"])
    watch = CpuWatch()
    readings["used"] += used
    readings["waited"] += waited or 0.0
    readings["now"] += 1.0
    assert lost == pytest.approx(watch.lost()) if lost is not None else watch.lost() is None


def test_a_file_that_says_nothing_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three threads one has ended, two have waited for 2 and 3 s; without the folder nothing is known."""
    for thread, waited in {"1": "2000000000", "2": "3000000000", "3": None}.items():
        tmp_path.joinpath(thread).mkdir()
        if waited:
            tmp_path.joinpath(thread, "schedstat").write_text(f"9 {waited} 4\n")
    monkeypatch.setattr(module, "_THREADS", tmp_path)
    assert 5.0 == module._waited()
    monkeypatch.setattr(module, "_THREADS", tmp_path / "none")
    assert module._waited() is None

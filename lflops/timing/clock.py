"""Clocks: the process's own on a CPU, events of the stream on other devices, and in tests one that the test advances.

A mark is cheap and waits for nothing. The seconds between two marks are asked later, after one
`settle`.
"""

import os
import resource
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol

import torch

from lflops.errors import CountError
from lflops.inputs.devices import runtime, with_index

# share of the time that a thread could have run: where others took more, they are left out of what
# it took
MUCH = 0.05


class Clock(Protocol):
    """Marks moments, and later gives the seconds between them."""

    def mark(self) -> Any:
        """This moment."""

    def settle(self) -> None:
        """Wait until every moment marked so far has come."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one settled mark to another."""


class HostClock:
    """The process's own: on a CPU an operator is done when it returns."""

    mark = staticmethod(perf_counter)

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class OwnMark(NamedTuple):
    """A moment: before and after the system was asked for what it has counted of the thread."""

    before: float
    counted: bytes | None
    after: float


class OwnClock:
    """The host's, which stands still while another thread has the core of the one that made it.

    A mark takes 3 µs, none of it counts.
    """

    def __init__(self) -> None:
        self._schedule = ThreadSchedule()

    @property
    def is_needed(self) -> bool:
        """Whether others have had this thread's core for much of its time so far."""
        used, waited = ThreadSchedule.between(b"0 0", self._schedule.read()) or (0.0, 0.0)
        return waited > MUCH * (used + waited)

    def now(self) -> bytes | None:
        """What the system has counted of the thread until this moment."""
        # without it, Linux counts a thread that runs up to its last tick
        thread_time()
        return self._schedule.read()

    def mark(self) -> OwnMark:
        """This moment."""
        return OwnMark(perf_counter(), self._schedule.read(), perf_counter())

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: OwnMark, end: OwnMark) -> float:
        """From one mark to another, without what others took."""
        return max(end.before - start.after - self.waited(start, end), 0.0)

    @staticmethod
    def waited(start: OwnMark, end: OwnMark) -> float:
        """Seconds between two marks in which others had the core."""
        return (ThreadSchedule.between(start.counted, end.counted) or (0.0, 0.0))[1]


class StreamMark(NamedTuple):
    """An event and its stream.

    Where the mark before it is on another stream, also that mark's stream and an event there now.
    """

    event: torch.Event
    stream: torch.Stream
    last_stream: torch.Stream
    on_last_stream: torch.Event | None

    def query(self) -> bool:
        return self.event.query()


class StreamClock:
    """Events on a device's current stream.

    Between two of them is the stream's time, however far ahead the host is.

    Events of two devices cannot be subtracted. So the device is given, whichever one is current
    where a moment is marked. What runs on a second stream ends there, not where the first one goes
    on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._runtime = runtime(device)
        self._stream: torch.Stream = self._runtime.current_stream(self.device)

    def mark(self) -> StreamMark:
        """An event after everything that is queued on the device's current stream."""
        last, stream = self._stream, self._runtime.current_stream(self.device)
        self._stream = stream
        return StreamMark(
            self._event(stream), stream, last, None if stream == last else self._event(last)
        )

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def settle(self) -> None:
        """Wait for the device, and for no other."""
        self._runtime.synchronize(self.device)

    def seconds(self, start: StreamMark, end: StreamMark) -> float:
        """Events tell milliseconds."""
        other = end.on_last_stream
        return (
            start.event.elapsed_time(
                end.event if other is None or end.last_stream != start.stream else other
            )
            / 1e3
        )


class WaitingClock:
    """The host's, which waits for the device at each mark: for a device whose events have no times."""

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._wait = partial(runtime(device).synchronize, self.device)
        self._host = HostClock()
        self.settle, self.seconds = self._host.settle, self._host.seconds

    def mark(self) -> float:
        """The moment at which everything that was queued on the device is done."""
        self._wait()
        return self._host.mark()


DeviceClock = StreamClock | WaitingClock


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else device_clock(device)


def device_clock(device: torch.device) -> DeviceClock:
    """The clock of a device that is no CPU.

    A `CountError` where torch cannot wait for such a device.
    """
    try:
        return (
            WaitingClock(device)
            if event_seconds(with_index(device)) is None
            else StreamClock(device)
        )
    except (RuntimeError, AssertionError) as error:
        # of CUDA where torch was built without it
        where = "times are taken on 'cpu' and where torch can wait for the device; lflops.count works on all"
        raise CountError(f"the tensors are on {device.type!r}: {where}") from error


@cache
def event_seconds(device: torch.device) -> float | None:
    """What an event costs, the host or the stream.

    `None` if the time between two cannot be read. It waits for the device, once.
    """
    clock, host = StreamClock(device), HostClock()
    try:
        trials = [(host.mark(), clock.mark(), clock.mark(), host.mark()) for _ in range(8)]
        trials[-1][2].event.synchronize()
        return min(
            max((done - begun) / 2, clock.seconds(start, end)) for begun, start, end, done in trials
        )
    except RuntimeError:
        return None


def seconds_of(clock: Clock, run: Callable[[], object], calls: int = 1) -> float:
    """From before so many calls until what they began is done."""
    start = clock.mark()
    for _ in range(calls):
        run()
    end = clock.mark()
    clock.settle()
    return clock.seconds(start, end)


cpu_usage = partial(resource.getrusage, resource.RUSAGE_SELF)
"""What this process has used of the CPU, all its threads together, as the system tells it.

No Python runs in the call.
"""


def cpu_seconds() -> tuple[float, float]:
    """Seconds of the CPU that this process has used, all its threads together.

    Its own, and the system's for it.
    """
    usage = cpu_usage()
    return usage.ru_utime, usage.ru_stime


class CpuWatch:
    """What other processes take of this process's CPU time from now on, as Linux counts it.

    Making one reads a file for each thread.

    Involuntary context switches do not tell that: a hundred of them cost 3 ms on an idle machine,
    and 400 ms on a busy one.
    """

    def __init__(self) -> None:
        self._start, self._used, self._waited = perf_counter(), sum(cpu_seconds()), _waited()

    def lost(self) -> float | None:
        """Seconds until now in which threads were ready to run, and a CPU ran another process's.

        `None` where the system does not say.
        """
        # Where threads wait for each other, as 8 of them on 2 CPUs, nothing is lost. So it is never
        # more than what this process left unused.
        waited = _waited()
        if self._waited is None or waited is None:
            return None
        unused = len(os.sched_getaffinity(0)) * (perf_counter() - self._start) - self.used
        return max(min(waited - self._waited, unused), 0.0)

    @property
    def used(self) -> float:
        """Seconds of the CPU that this process has used until now."""
        return sum(cpu_seconds()) - self._used


class ThreadSchedule:
    """When the thread that makes it is on a core, and when another one has its core, as Linux counts it.

    To read it takes 2 µs.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(
                _THREADS / str(threading.get_native_id()) / "schedstat", os.O_RDONLY
            )
            self._close = weakref.finalize(self, os.close, self._file)

    def close(self) -> None:
        """Read nothing any more. It can be called again."""
        if self._file is not None:
            self._file = None
            self._close()

    def read(self) -> bytes | None:
        """Read what the system has counted until now; `None` where it does not say."""
        try:
            return None if self._file is None else os.pread(self._file, 80, 0)
        except OSError:
            return None

    @staticmethod
    def between(before: bytes | None, after: bytes | None) -> tuple[float, float] | None:
        """Seconds on a core, and seconds in which the thread was ready to run and waited for one."""
        if not before or not after:
            return None
        began, ended = (list(map(int, each.split()[:2])) for each in (before, after))
        return (ended[0] - began[0]) / 1e9, (ended[1] - began[1]) / 1e9


_THREADS = Path("/proc/self/task")


def _waited() -> float | None:
    """Seconds that the threads of this process were ready and waited for a CPU."""
    nanoseconds = 0
    try:
        for thread in _THREADS.iterdir():
            # the thread has ended
            with suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return nanoseconds / 1e9 if nanoseconds else None

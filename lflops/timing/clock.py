"""Define clocks: the host clock for the CPU, and events on the stream for other devices.

A clock marks moments, and returns the time between two marks later. Marking is cheap, and on most
devices it does not wait for the device. Before times are read, `settle` must be called once: it
waits until the device has reached all marks. Marks are then called settled.

The scheduler counters of a thread are the values that Linux counts in `schedstat`: how long the
thread ran on a core, and how long it was ready to run but waited for a core.
"""

import os
import resource
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import perf_counter, perf_counter_ns, thread_time
from typing import Any, NamedTuple, Protocol

import torch

from lflops.errors import CountError
from lflops.files import read
from lflops.inputs.devices import runtime, with_index

CONTENDED_SHARE = 0.05
"""If a thread waits for a core for more than this share of its time, an `UncontendedClock` is used.

This clock leaves out the waits. The thread's time is the time in which it runs or is ready to run.
"""


class Clock(Protocol):
    """Marks moments, and later returns the seconds between them."""

    def mark(self) -> Any:
        """Mark this moment."""

    def settle(self) -> None:
        """Wait until the device has reached every mark so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. Call `settle` before, but after the last mark."""


class HostClock:
    """The host clock, which is used for the CPU: an operator is done when its call returns.

    A mark is a moment in nanoseconds.
    """

    mark = staticmethod(perf_counter_ns)

    def settle(self) -> None:
        """No-op: CPU work is synchronous."""

    def seconds(self, start: int, end: int) -> float:
        return (end - start) / 1e9


class UncontendedMark(NamedTuple):
    """A mark of an `UncontendedClock`.

    Attributes:
        before: Time in nanoseconds just before the scheduler counters were read.
        counted: The scheduler counters of the thread; `None` if the system does not provide them.
        after: Time in nanoseconds just after the scheduler counters were read.
    """

    before: int
    counted: bytes | None
    after: int


class UncontendedClock:
    """A host clock that stops while the thread that created it waits for a core.

    Making a mark takes a few µs. The time between two marks does not include these µs.
    """

    def __init__(self) -> None:
        self._schedule = ThreadSchedule()

    @property
    def is_needed(self) -> bool:
        """Whether the thread has waited so long for a core that this clock should be used.

        This is the case if the waits are more than `CONTENDED_SHARE` of the time in which the
        thread was running or ready to run.
        """
        between = ThreadSchedule.between(b"0 0", self._schedule.read())
        if between is None:
            return False
        used, waited = between
        return waited > CONTENDED_SHARE * (used + waited)

    def now(self) -> bytes | None:
        """Return the scheduler counters of the thread up to this moment."""
        # This call updates the counters. Otherwise, they end at the last tick of the scheduler.
        thread_time()
        return self._schedule.read()

    def mark(self) -> UncontendedMark:
        """Mark this moment."""
        before = perf_counter_ns()
        counted = self.now()
        return UncontendedMark(before, counted, perf_counter_ns())

    def settle(self) -> None:
        """No-op: CPU work is synchronous."""

    def seconds(self, start: UncontendedMark, end: UncontendedMark) -> float:
        """Return the seconds between two marks, without the thread's waits for a core."""
        elapsed = (end.before - start.after) / 1e9
        return max(elapsed - self.waited(start, end), 0.0)

    @staticmethod
    def asleep(start: UncontendedMark, end: UncontendedMark) -> float:
        """Return the seconds between two marks in which the thread needed no core.

        For example, the thread slept, or waited for a file or for another thread.
        """
        between = ThreadSchedule.between(start.counted, end.counted)
        if between is None:
            return 0.0
        used, waited = between
        return max((end.before - start.after) / 1e9 - used - waited, 0.0)

    @staticmethod
    def waited(start: UncontendedMark, end: UncontendedMark) -> float:
        """Return the seconds between two marks in which the thread waited for a core."""
        between = ThreadSchedule.between(start.counted, end.counted)
        return 0.0 if between is None else between[1]


class StreamMark(NamedTuple):
    """A mark of a `StreamClock`: an event on the current stream.

    Attributes:
        event: The event on the current stream.
        stream: The stream that was current at this mark.
        last_stream: The stream that was current at the previous mark.
        on_last_stream: A second event, recorded on `last_stream` at the same time; `None` if
            `last_stream` and `stream` are the same.
    """

    event: torch.Event
    stream: torch.Stream
    last_stream: torch.Stream
    on_last_stream: torch.Event | None

    def query(self) -> bool:
        return self.event.query()


class StreamClock:
    """Marks moments with events on a device's current stream.

    The seconds between two marks are the time that the device needed to get from one event to the
    other. So they are correct even if the host launches work far ahead of the device.

    The time between events of two different devices cannot be measured. Therefore, the clock has
    one device, and uses it even if another device is current at a mark. If the current stream
    changes between two marks, the time is measured on the first mark's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._runtime = runtime(device)
        self._stream: torch.Stream = self._runtime.current_stream(self.device)

    def mark(self) -> StreamMark:
        """Record an event after everything that is queued on the device's current stream."""
        last = self._stream
        stream = self._runtime.current_stream(self.device)
        self._stream = stream
        event = self._event(stream)
        return StreamMark(event, stream, last, None if stream == last else self._event(last))

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def settle(self) -> None:
        """Wait until the device of this clock has finished all its work."""
        self._runtime.synchronize(self.device)

    def seconds(self, start: StreamMark, end: StreamMark) -> float:
        """Return the seconds between two settled marks, on the stream of the first mark."""
        stop = end.event
        if end.on_last_stream is not None and end.last_stream == start.stream:
            stop = end.on_last_stream
        milliseconds = start.event.elapsed_time(stop)
        return milliseconds / 1e3


class WaitingClock:
    """A host clock that waits for the device at each mark.

    It is used for devices that cannot return the time between two events.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._wait = partial(runtime(device).synchronize, self.device)
        self._host = HostClock()
        self.settle = self._host.settle
        self.seconds = self._host.seconds

    def mark(self) -> int:
        """Wait until the device has finished all queued work, and mark that moment."""
        self._wait()
        return self._host.mark()


DeviceClock = StreamClock | WaitingClock


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else device_clock(device)


def device_clock(device: torch.device) -> DeviceClock:
    """Return the clock of a device other than the CPU.

    Raises:
        CountError: Torch cannot wait for the device.
    """
    try:
        if event_seconds(with_index(device)) is None:
            return WaitingClock(device)
        return StreamClock(device)
    # CUDA raises an AssertionError if torch was built without it.
    except (RuntimeError, AssertionError) as error:
        raise CountError(
            f"the tensors are on {device.type!r}, where lflops cannot measure times: use 'cpu' or "
            "a device that torch can synchronize, or call lflops.count, which works on all devices"
        ) from error


@cache
def event_seconds(device: torch.device) -> float | None:
    """Return the cost of recording one event, in seconds.

    An event takes time on the host and on the device's stream; the larger time is returned. The
    result is `None` if the device cannot measure the time between two events. This function waits
    for the device once.
    """
    clock = StreamClock(device)
    host = HostClock()
    costs = []
    try:
        trials = []
        for _ in range(8):
            began = host.mark()
            start = clock.mark()
            end = clock.mark()
            trials.append((began, start, end, host.mark()))
        end.event.synchronize()
        for began, start, end, done in trials:
            costs.append(max(host.seconds(began, done) / 2, clock.seconds(start, end)))
    except RuntimeError:
        return None
    return min(costs)


def seconds_of(clock: Clock, run: Callable[[], object], calls: int = 1) -> float:
    """Return the duration of `calls` calls of `run`, in seconds.

    It includes the device work that the calls launch.
    """
    start = clock.mark()
    for _ in range(calls):
        run()
    end = clock.mark()
    clock.settle()
    return clock.seconds(start, end)


cpu_usage = partial(resource.getrusage, resource.RUSAGE_SELF)
"""Function that returns the CPU usage of this process, over all its threads.

The function runs no Python code.
"""


def cpu_seconds() -> tuple[float, float]:
    """Return the user and system CPU seconds of this process so far, over all its threads."""
    usage = cpu_usage()
    return usage.ru_utime, usage.ru_stime


class CpuWatch:
    """Measures how much CPU time this process loses because CPUs run other processes.

    The times are read from `/proc`. Creating an instance reads a file for each thread of the
    process.

    The number of involuntary context switches cannot be used instead: a hundred switches cost 3 ms
    on an idle machine, but 400 ms on a busy machine.
    """

    def __init__(self) -> None:
        self._start = perf_counter()
        self._used = sum(cpu_seconds())
        self._waited = _waited()

    def lost(self) -> float | None:
        """Return the seconds in which ready threads of this process waited for other processes.

        The result is the sum over all threads since the watch was created. It is `None` if the
        system does not report waiting times.
        """
        # If this process's threads wait for each other, for example 8 threads on 2 CPUs, nothing is
        # lost. So the result is at most the CPU time that this process left unused.
        waited = _waited()
        if self._waited is None or waited is None:
            return None
        unused = len(os.sched_getaffinity(0)) * (perf_counter() - self._start) - self.used
        return max(min(waited - self._waited, unused), 0.0)

    @property
    def used(self) -> float:
        """CPU seconds of this process since the watch was created."""
        return sum(cpu_seconds()) - self._used


class ThreadSchedule:
    """Reads the scheduler counters of the thread that creates the instance.

    The counters show how long the thread ran on a core, and how long it waited for a core.

    A read takes 2 µs.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(
                _THREADS / str(threading.get_native_id()) / "schedstat", os.O_RDONLY
            )
            self._close = weakref.finalize(self, os.close, self._file)

    def close(self) -> None:
        """Stop reading.

        A second call does nothing.
        """
        if self._file is not None:
            self._file = None
            self._close()

    def read(self) -> bytes | None:
        """Return the current scheduler counters, or `None` if the system does not provide them."""
        try:
            if self._file is None:
                return None
            return os.pread(self._file, 80, 0)
        except OSError:
            return None

    @staticmethod
    def between(before: bytes | None, after: bytes | None) -> tuple[float, float] | None:
        """Return the change between two results of `read`, in seconds.

        The two values are the time that the thread ran on a core, and the time that it waited for a
        core. Returns `None` if either result has no counters.
        """
        if not before or not after:
            return None
        ran_before, waited_before, *_ = before.split()
        ran_after, waited_after, *_ = after.split()
        ran = int(ran_after) - int(ran_before)
        waited = int(waited_after) - int(waited_before)
        return ran / 1e9, waited / 1e9


_THREADS = Path("/proc/self/task")


def _waited() -> float | None:
    """Return the total time that the process's threads were ready but waited for a CPU, in seconds.

    Returns `None` if the system does not report it.
    """
    nanoseconds = 0
    try:
        for thread in _THREADS.iterdir():
            # A thread may end in between.
            with suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int(read(thread / "schedstat").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    if not nanoseconds:
        return None
    return nanoseconds / 1e9

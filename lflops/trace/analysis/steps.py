"""Find the profiler's steps in a trace, and the time in each device state during each step.

At each moment, a device computes, only communicates, only copies, or is idle.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.profile.series import grouped
from lflops.trace.analysis.host_walk import HostWalk
from lflops.trace.device_states import DeviceTimeline, states, timeline, total
from lflops.trace.recorded import DeviceEvent, RecordedTrace, extent

AHEAD_SHARE = 0.05
"""Steps are timed on the device if it lags behind the host by more than this share of a step.

See `StepTimes` for the start and end of a step on the device.
"""


class StepTimes(Struct, frozen=True, kw_only=True):
    """One step of the profiler.

    A step lasts from its start on the host to the start of the next step. If the host runs ahead of
    the device, `duration` and `device` are for a time on the device instead: from the first work
    that the step launched to the first work of the next step.

    Attributes:
        start: Start of the step on the host.
        end: End of the step on the host.
        duration: Nanoseconds of the step, measured on the device if the host runs ahead.
        device: Time in each device state, such as computing, summed over all devices; `None`
            without a device.
    """

    name: str
    start: int
    end: int
    duration: int
    device: DeviceTimeline | None

    @property
    def seconds(self) -> float:
        return self.duration / 1e9


class _StepSpan(NamedTuple):
    name: str
    start: int
    end: int


def steps(
    trace: RecordedTrace, host: HostWalk, work: Sequence[DeviceEvent]
) -> tuple[StepTimes, ...]:
    """Return the steps in order, with the time in each device state.

    Args:
        trace: The trace.
        host: The launches of the device work.
        work: The device work to analyze.
    """
    spans = _step_spans(trace)
    if not spans:
        return ()
    last = spans[-1]
    launched = [_launched_work(work, host, span) for span in spans]
    if len(spans) > 1 and not launched[-1] and not _has_operator(trace, last):
        # When a profiler stops, it opens a step and closes it at once.
        spans.pop()
        launched.pop()
        end = last.start
    else:
        # The last step lasts at least until all its device work has ended.
        _, end = extent([last, *launched[-1]])
    starts = [span.start for span in spans]
    on_host = list(pairwise([*starts, end]))
    measured = on_host
    if _runs_ahead(on_host, launched):
        measured = _on_device(launched)
    by_device: dict[int, list[DeviceEvent]] = grouped(work, attrgetter("device"))
    found = []
    for span, (host_start, host_end), (begin, stop) in zip(spans, on_host, measured, strict=True):
        if stop <= begin:
            continue
        step = StepTimes(
            name=span.name,
            start=host_start,
            end=host_end,
            duration=stop - begin,
            device=_device_states(by_device, begin, stop),
        )
        found.append(step)
    return tuple(found)


def _device_states(
    by_device: Mapping[int, Sequence[DeviceEvent]], start: int, end: int
) -> DeviceTimeline | None:
    """Return the time in each device state, summed over all devices; `None` without a device."""
    if not by_device:
        return None
    timelines = []
    for work in by_device.values():
        timelines.append(timeline(states(work, start, end)))
    return total(timelines)


def device_timelines(steps: Iterable[StepTimes]) -> list[DeviceTimeline]:
    """Return the time in each device state for each step, without steps that have no device."""
    return [step.device for step in steps if step.device is not None]


def _runs_ahead(
    on_host: Sequence[tuple[int, int]], launched: Sequence[Sequence[DeviceEvent]]
) -> bool:
    """Return whether work of a step still runs when the host is well into the next step."""
    if not all(launched):
        return False
    for (start, end), before in zip(on_host[1:], launched, strict=False):
        _, end_of_work = extent(before)
        if end_of_work > start + AHEAD_SHARE * (end - start):
            return True
    return False


def _on_device(launched: Sequence[Sequence[DeviceEvent]]) -> list[tuple[int, int]]:
    """Return the start and end of each step on the device, from the work that it launched."""
    begins = []
    for of_step in launched:
        begin, _ = extent(of_step)
        begins.append(begin)
    _, end = extent(launched[-1])
    return list(pairwise([*begins, end]))


def _launched_work(
    work: Sequence[DeviceEvent], host: HostWalk, step: _StepSpan
) -> list[DeviceEvent]:
    """Return the device work that was launched in a step."""
    found = []
    for each in work:
        call = host.call(each)
        if call is not None and step.start <= call.start < step.end:
            found.append(each)
    return found


def _step_spans(trace: RecordedTrace) -> list[_StepSpan]:
    """Return the name, start and end of each step, sorted by start.

    In a merged trace, several processes have a step with the same name. They count as one step.
    """
    found = []
    for name, same in grouped(trace.steps(), attrgetter("name")).items():
        start, end = extent(same)
        found.append(_StepSpan(name, start, end))
    return sorted(found, key=attrgetter("start"))


def _has_operator(trace: RecordedTrace, step: _StepSpan) -> bool:
    return any(step.start <= call.start < step.end for call in trace.operators)

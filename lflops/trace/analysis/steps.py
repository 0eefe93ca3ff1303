"""The profiler's steps, and what the devices did in them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from lflops.profile.series import grouped
from lflops.trace.analysis.host_walk import HostWalk
from lflops.trace.device_states import DeviceTimeline, states, timeline, total
from lflops.trace.recorded import DeviceEvent, RecordedTrace


class StepTimes(Struct, frozen=True, kw_only=True):
    """One step of the profiler, from its start on the host to the start of the next step.

    Attributes:
        device: States of all devices together in this time, or `None` without a device.
    """

    name: str
    start: int
    end: int
    device: DeviceTimeline | None

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def seconds(self) -> float:
        return self.duration / 1e9


class _StepSpan(NamedTuple):
    name: str
    start: int
    end: int


def steps(trace: RecordedTrace, host: HostWalk) -> tuple[StepTimes, ...]:
    """Return the steps in order, with the states of all devices in each step."""
    spans = _step_spans(trace)
    if not spans:
        return ()
    last = spans[-1]
    launched = _ends_of_launched_work(trace, host, last)
    if len(spans) > 1 and not launched and not _has_operator(trace, last):
        # A profiler that is stopped opens a step and closes it at once.
        spans.pop()
        end = last.start
    else:
        end = max([last.end, *launched])
    by_device: dict[int, list[DeviceEvent]] = grouped(trace.work, attrgetter("device"))
    found = []
    for place, span in enumerate(spans):
        span_end = spans[place + 1].start if place + 1 < len(spans) else end
        if span_end <= span.start:
            continue
        device = None
        if by_device:
            device = total(
                timeline(states(work, span.start, span_end)) for work in by_device.values()
            )
        found.append(StepTimes(name=span.name, start=span.start, end=span_end, device=device))
    return tuple(found)


def _step_spans(trace: RecordedTrace) -> list[_StepSpan]:
    """Return the spans of the steps by start.

    In a merged trace several processes have a step of the same name, which is one step.
    """
    spans = [span for span in trace.spans if span.kind == "step"]
    found = []
    for name, same in grouped(spans, attrgetter("name")).items():
        start = min(span.start for span in same)
        end = max(span.end for span in same)
        found.append(_StepSpan(name, start, end))
    return sorted(found, key=attrgetter("start"))


def _ends_of_launched_work(trace: RecordedTrace, host: HostWalk, step: _StepSpan) -> Sequence[int]:
    """Return the ends of the work that was launched in a step."""
    ends = []
    for work in trace.work:
        call = host.call(work)
        if call is not None and step.start <= call.start < step.end:
            ends.append(work.end)
    return ends


def _has_operator(trace: RecordedTrace, step: _StepSpan) -> bool:
    return any(step.start <= call.start < step.end for call in trace.operators)

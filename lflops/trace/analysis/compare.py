"""Compare the times of two traces, and check the second trace against limits.

The times are those of steps, device states such as idle, causes of idle time, operators and
kernels.
"""

from msgspec import Struct

from lflops.analysis.compare.diff import Limit
from lflops.profile.records import TimingStats
from lflops.trace.analysis.steps import device_timelines
from lflops.trace.analysis.summary import TraceSummary
from lflops.trace.device_states import DEVICE_STATES, DeviceTimeline, total


class TimeChange(Struct, frozen=True, kw_only=True):
    """A time in the first and in the second of two compared traces, in nanoseconds.

    The times are per step if both traces have steps. Otherwise, they are for the whole trace.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


class TraceDiff(Struct, frozen=True, kw_only=True):
    """Changes from one trace to another.

    A field that is a pair has the values in the first and in the second trace; `None` means
    unknown. Fields with several changes, such as `operators`, are sorted by the size of the change,
    in descending order.

    Attributes:
        per_step: Whether times are per step rather than for the whole trace.
        window: Duration of a step or, if `per_step` is false, of the analyzed part of the trace.
        step: Median and quartiles of the step times, or `None` without steps.
        is_beyond_noise: Whether the quartile ranges of the step times do not overlap; `None` if a
            trace has fewer than two steps.
        hardware: The names of the devices.
    """

    per_step: bool
    window: TimeChange
    step: tuple[TimingStats | None, TimingStats | None]
    is_beyond_noise: bool | None
    mfu: tuple[float | None, float | None]
    allocated_bytes: tuple[int | None, int | None]
    hardware: tuple[str, str]
    states: tuple[TimeChange, ...]
    idle: tuple[TimeChange, ...]
    categories: tuple[TimeChange, ...]
    operators: tuple[TimeChange, ...]
    kernels: tuple[TimeChange, ...]


def compare(before: TraceSummary, after: TraceSummary) -> TraceDiff:
    """Compare two traces, per step if both have steps."""
    per_step = bool(before.steps and after.steps)
    first = _Times(before, per_step=per_step)
    second = _Times(after, per_step=per_step)
    states = []
    for state in DEVICE_STATES:
        change = TimeChange(name=state, before=first.states[state], after=second.states[state])
        states.append(change)
    return TraceDiff(
        per_step=per_step,
        window=TimeChange(name="window", before=first.window, after=second.window),
        step=(before.step, after.step),
        is_beyond_noise=_is_beyond_noise(before.step, after.step),
        mfu=(_mfu(before), _mfu(after)),
        allocated_bytes=(_allocated(before), _allocated(after)),
        hardware=(_device_names(before), _device_names(after)),
        states=tuple(states),
        idle=_changes(first.idle, second.idle),
        categories=_changes(first.categories, second.categories),
        operators=_changes(first.operators, second.operators),
        kernels=_changes(first.kernels, second.kernels),
    )


class _Times:
    """The times of one trace that `compare` compares with the times of another trace.

    Each attribute except `window` maps names to times, for example the names of operators or of
    device states. All times are nanoseconds, either per step or for the whole trace.
    """

    def __init__(self, summary: TraceSummary, *, per_step: bool) -> None:
        """Collect the times of a trace."""
        divisor = 1
        window = summary.recorded
        if per_step:
            divisor = len(summary.steps)
            window = summary.steps_time
        self.states = dict.fromkeys(DEVICE_STATES, 0.0)
        timeline = _timeline(summary, per_step=per_step)
        if timeline is not None:
            window = timeline.window
            for state, time in timeline.by_state().items():
                self.states[state] = time / divisor
        self.window = window / divisor
        self.idle: dict[str, float] = {}
        self.categories: dict[str, float] = {}
        self.kernels: dict[str, float] = {}
        self.operators: dict[str, float] = {}
        for cause, time in summary.idle.items():
            self.idle[cause] = time / divisor
        for category in summary.categories:
            self.categories[category.category] = category.device / divisor
        for kernel in summary.kernels:
            self.kernels[kernel.name] = kernel.device / divisor
        has_device = summary.device is not None
        for operator in summary.operators:
            self_time = operator.self_device if has_device else operator.self_host
            self.operators[operator.name] = self_time / divisor


def _timeline(summary: TraceSummary, *, per_step: bool) -> DeviceTimeline | None:
    """Return how long the device was in each state, such as computing or idle; `None` if unknown.

    If `per_step` is true, the times are sums over all steps. Otherwise, they are for the whole
    trace.
    """
    if not per_step:
        return summary.device
    timelines = device_timelines(summary.steps)
    if not timelines:
        return None
    return total(timelines)


def _changes(before: dict[str, float], after: dict[str, float]) -> tuple[TimeChange, ...]:
    rows = []
    for name in before | after:
        row = TimeChange(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0))
        if row.before or row.after:
            rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-abs(row.change), row.name)))


def _is_beyond_noise(before: TimingStats | None, after: TimingStats | None) -> bool | None:
    if before is None or after is None or before.n < 2 or after.n < 2:
        return None
    return before.high < after.low or after.high < before.low


def _mfu(summary: TraceSummary) -> float | None:
    if summary.utilization is None:
        return None
    return summary.utilization.mfu


def _allocated(summary: TraceSummary) -> int | None:
    peaks = []
    for device in summary.devices:
        if device.memory is not None:
            peaks.append(device.memory.allocated)
    return max(peaks, default=None)


def _device_names(summary: TraceSummary) -> str:
    names = []
    for device in summary.devices:
        names.append(device.name or f"device {device.device}")
    return ", ".join(dict.fromkeys(names)) or "no device"


def trace_limits(
    diff: TraceDiff,
    *,
    max_regress: float | None = None,
    min_mfu: float | None = None,
    max_memory: float | None = None,
) -> tuple[Limit, ...]:
    """Check the second trace against limits. A limit that is `None` is not checked.

    Args:
        diff: The compared traces.
        max_regress: Maximum slowdown of a step, such as 0.03 for 3 %. If the quartile ranges of
            both traces' step times overlap, the slowdown is noise and passes.
        min_mfu: Minimum MFU.
        max_memory: Maximum peak of the allocated memory in bytes.
    """
    limits = []
    if max_regress is not None:
        regress = _regress(diff)
        is_broken = None
        if regress is not None:
            is_broken = regress > max_regress and diff.is_beyond_noise is True
        limits.append(
            Limit(name="max_regress", allowed=max_regress, found=regress, is_broken=is_broken)
        )
    if min_mfu is not None:
        mfu = diff.mfu[1]
        is_broken = None if mfu is None else mfu < min_mfu
        limits.append(Limit(name="min_mfu", allowed=min_mfu, found=mfu, is_broken=is_broken))
    if max_memory is not None:
        peak = diff.allocated_bytes[1]
        is_broken = None if peak is None else peak > max_memory
        limits.append(Limit(name="max_memory", allowed=max_memory, found=peak, is_broken=is_broken))
    return tuple(limits)


def _regress(diff: TraceDiff) -> float | None:
    """Return the relative slowdown of a step, such as 0.03 for 3 %; `None` if unknown."""
    before, after = diff.step
    if diff.is_beyond_noise is None or before is None or after is None or not before.median:
        return None
    return after.median / before.median - 1
